// All schedules, ranked under the limit of memory.

import { debounce, el, number, percent } from "./dom.js";

const HEADS = ["schedule", "chunks", "step time", "bubble", "peak activations", ""];

export class Ranking {
  // Args: call: calls the Python that may take long.
  constructor(state, call) {
    this.state = state;
    this.call = call;
    const element = document.getElementById("ranking");
    this.note = el("p", { className: "note", role: "status" });
    this.body = el("tbody");
    const head = el("thead", {}, el("tr", {}, ...HEADS.map((text) => el("th", { scope: "col" }, text || el("span", { className: "hidden" }, "show")))));
    this.table = el("div", { className: "scroll", tabIndex: 0, role: "region", "aria-label": "Ranking" }, el("table", {}, head, this.body));
    element.append(el("h2", {}, "All schedules, ranked"), this.note, this.table);
    this.update = debounce(250, () => this.refresh());
    state.listeners.push(this.update);
    this.update();
  }

  async refresh() {
    const request = JSON.stringify(this.state.request("auto"));
    if (request === this.shown) return;
    this.shown = request;
    const { memory } = this.state.values;
    this.note.textContent = "Simulating all schedules …";
    const rows = await this.call("ranking", request);
    if (!rows || request !== this.shown) return;
    if (rows.error) return this.fail(rows.error);
    this.fill(rows);
    this.note.textContent = "Searching for a schedule that is made to measure …";
    const found = await this.call("best", request);
    if (!found || request !== this.shown) return;
    this.fill([...rows, found]);
    this.note.textContent = memory
      ? `Fastest first, with at most ${number(memory)} micro-batches of activations on a rank; those that need more come last.`
      : "Fastest first. Set a limit of memory to see which schedules fit.";
  }

  fail(error) {
    this.note.textContent = error;
    this.body.replaceChildren();
  }

  fill(rows) {
    const order = (row) => [row.error ? 2 : row.fits ? 0 : 1, row.step_time ?? 0];
    rows.sort((one, other) => order(one)[0] - order(other)[0] || order(one)[1] - order(other)[1]);
    const longest = Math.max(...rows.map((row) => row.step_time ?? 0));
    this.body.replaceChildren(...rows.map((row) => this.row(row, longest)));
  }

  row(row, longest) {
    const name = row.schedule === "auto" ? `made to measure${row.name && row.name !== "search" ? `: ${row.name}` : ""}` : row.schedule;
    if (row.error) return el("tr", { className: "out" }, el("th", { scope: "row" }, name), el("td", { colSpan: 5 }, row.error));
    const bar = el("span", { className: "bar", style: `width: ${(60 * row.step_time) / longest}px` });
    const show = el("button", { onclick: () => this.state.set({ a: row.schedule }), "aria-label": `Show ${name} as the schedule` }, "Show");
    const compare = el("button", { onclick: () => this.state.set({ b: row.schedule }), "aria-label": `Compare with ${name}` }, "Compare");
    return el(
      "tr", { className: row.fits ? "" : "out" },
      el("th", { scope: "row" }, name),
      el("td", {}, `${row.chunks}${row.placement === "V" ? " (V)" : ""}`),
      el("td", {}, el("span", { className: "value" }, number(row.step_time)), bar),
      el("td", {}, percent(row.bubble)),
      el("td", {}, number(row.peak), row.fits ? null : el("span", { className: "over" }, " over the limit")),
      el("td", { className: "buttons" }, show, compare),
    );
  }
}
