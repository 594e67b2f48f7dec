// A schedule: its name, its key figures, its timeline, and the action that is selected.

import { el, number, percent } from "./dom.js";
import { sentence, Timeline } from "./timeline.js";

const UNIT = "time, in forwards of one micro-batch on one rank";
const SECONDS = "time in seconds";

export class Panel {
  // Args: id: a or b. choices: [value, name] of the schedules; view: shared by the panels; actions: what buttons do.
  constructor(id, choices, view, { onchoose, oncritical, announce, onedit, ontrain }) {
    this.element = document.getElementById(id);
    this.announce = announce;
    this.choice = el("select", { id: `${id}-schedule`, onchange: () => onchoose(this.choice.value) });
    for (const [value, name] of choices) this.choice.append(el("option", { value }, name));
    this.note = el("span", { className: "note" });
    this.edit = el("button", { onclick: onedit }, "Edit");
    this.train = el("button", { onclick: ontrain }, "Train this");
    this.figures = el("dl", { className: "figures" });
    this.error = el("p", { id: `${id}-error`, className: "error", role: "alert", hidden: true });
    this.action = el("p", { className: "action" });
    this.chain = el("p", { className: "chain" });
    this.table = el("table");
    this.details = el("details", { className: "ranks" }, el("summary", {}, "Each rank in numbers"),
      el("div", { className: "scroll", tabIndex: 0, role: "region", "aria-label": `Ranks of schedule ${id.toUpperCase()}` }, this.table));
    this.details.ontoggle = () => this.fillTable();
    this.timeline = new Timeline(view, { onselect: (span, tell) => this.onselect(span, tell), oncritical });
    this.body = el("div", {}, this.figures, this.error, this.timeline.element, this.action, this.chain, this.details);
    const label = el("label", { htmlFor: this.choice.id }, id === "a" ? "Schedule" : "Compare with");
    this.element.append(el("div", { className: "title" }, label, this.choice, this.note, this.edit, this.train), this.body);
    this.choice.setAttribute("aria-describedby", this.error.id);
    this.unit = UNIT;
  }

  choose(value) {
    this.choice.value = value;
    this.body.hidden = this.edit.hidden = this.train.hidden = !value;
    if (!value) this.note.textContent = "";
  }

  // Show what the bridge returned. shared: duration and peak of all panels; reference: the step time to compare with.
  show(result, { duration, peak, limit, critical, reference, unit = UNIT, label = "" }) {
    this.unit = unit;
    this.result = result;
    this.error.hidden = true;
    this.details.hidden = false;
    this.choice.setAttribute("aria-invalid", "false");
    this.timeline.element.classList.remove("stale");
    const name = label || result.name;
    this.note.textContent = [
      name === this.choice.value ? "" : name,
      `${result.chunks} chunk${result.chunks > 1 ? "s" : ""} per rank${result.placement === "V" ? ", in a V" : ""}`,
    ].filter(Boolean).join(", ");
    const most = Math.max(...result.peaks);
    this.showFigures(result, most, limit, reference);
    const text = `${name}: ${result.pp} pp ranks, ${result.micro_batches} micro-batches, step time ${number(result.step_time)}, bubble `
      + `${percent(result.bubble)}, peak activations ${number(most)}`;
    this.timeline.show(result, { label: text, duration, limit, peak: Math.max(peak, limit || 0), unit, critical });
    this.fillTable();
  }

  showFigures(result, most, limit, reference) {
    const time = `${number(result.step_time)}${this.unit === SECONDS ? "\u202fs" : ""}`;
    const change = reference ? result.step_time / reference - 1 : 0;
    const than = reference && Math.abs(change) > 5e-5 ? `${change > 0 ? "+" : "−"}${percent(Math.abs(change))} against A` : "";
    const over = limit && most > limit * (1 + 1e-9) ? `exceeds the limit of ${number(limit)}` : limit ? `within ${number(limit)}` : "";
    this.figures.replaceChildren(
      this.figure("Step time", time, than || "forwards of a micro-batch"),
      this.figure("Bubble", percent(result.bubble), "of the ranks’ time is idle"),
      this.figure("Peak activations", number(most), over || "micro-batches on a rank", limit && most > limit * (1 + 1e-9)),
    );
  }

  figure(term, value, remark, isBad = false) {
    return el("div", { className: isBad ? "bad" : "" }, el("dt", {}, term), el("dd", {}, value), el("dd", { className: "remark" }, remark));
  }

  // Show a mistake. A deadlock's part that can run is drawn with its cycle; else the last timeline stays, but paler.
  fail({ error, deadlock, field }) {
    this.error.textContent = error;
    this.error.hidden = false;
    this.details.hidden = true; // its numbers are those of another schedule
    this.choice.setAttribute("aria-invalid", String(!field)); // else the field of the mistake is marked
    this.figures.replaceChildren();
    this.chain.textContent = this.action.textContent = this.note.textContent = "";
    this.timeline.element.classList.toggle("stale", !deadlock);
    if (!deadlock) return;
    const { drawing, cycle } = deadlock;
    this.result = drawing;
    const peak = Math.max(...drawing.peaks);
    const label = `The step until the deadlock: ${error}`;
    this.timeline.show(drawing, { label, duration: Math.max(1, drawing.step_time) * 1.6, peak, unit: UNIT, deadlock: cycle });
  }

  onselect(span, tell) {
    const hint = "Select an action, with a click or the arrow keys, to see what it waited for.";
    this.action.textContent = span ? sentence(span, this.unit === SECONDS ? " s" : "") : hint;
    this.action.classList.toggle("hint", !span);
    this.chain.replaceChildren();
    if (!span) return;
    const chain = this.timeline.chain(span);
    if (chain.length > 1) {
      const names = chain.map(({ name }) => name);
      const shown = names.length > 14 ? [...names.slice(0, 4), "…", ...names.slice(-8)] : names;
      this.chain.append(`Chain of dependencies, ${names.length} actions: `, el("code", {}, shown.join(" → ")));
    }
    if (tell) this.announce(this.action.textContent);
  }

  fillTable() {
    if (!this.details.open || !this.result) return;
    const { pp, chunks, placement, idle, peaks, step_time: step } = this.result;
    const rows = peaks.map((peak, rank) => {
      const stages = Array.from({ length: chunks }, (_, chunk) => chunk * pp + (placement === "V" && chunk % 2 ? pp - 1 - rank : rank));
      const cells = [stages.join(", "), number(step - idle[rank]), number(idle[rank]), percent(idle[rank] / step), number(peak)];
      return el("tr", {}, el("th", { scope: "row" }, `pp ${rank}`), ...cells.map((cell) => el("td", {}, cell)));
    });
    const heads = ["rank", "stages", "busy", "idle", "bubble", "peak activations"];
    this.table.replaceChildren(
      el("thead", {}, el("tr", {}, ...heads.map((head) => el("th", { scope: "col" }, head)))),
      el("tbody", {}, ...rows),
    );
  }
}
