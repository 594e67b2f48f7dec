// A timeline that can be pointed at, zoomed and walked through with the keyboard.

import { describe } from "./action.js";
import { el, number } from "./dom.js";
import { paint, paintDeadlock, prepare, theme } from "./draw.js";
import { Layout, LEFT } from "./layout.js";

export class Timeline {
  // Args: view: the part of the step that is shown. onselect(span or null); oncritical(): the key C.
  constructor(view, { onselect, oncritical }) {
    this.view = view;
    this.onselect = onselect;
    this.oncritical = oncritical;
    this.canvas = el("canvas", { tabIndex: 0, role: "application", "aria-roledescription": "timeline" });
    this.tip = el("div", { className: "tip", hidden: true, "aria-hidden": "true" });
    this.element = el("div", { className: "timeline" }, this.canvas, this.tip);
    this.rows = [];
    this.selected = null;
    this.canvas.addEventListener("keydown", (event) => this.onkey(event));
    this.canvas.addEventListener("wheel", (event) => this.onwheel(event), { passive: false });
    this.canvas.addEventListener("pointerdown", (event) => this.ondrag(event));
    this.canvas.addEventListener("pointermove", (event) => this.onhover(event));
    this.canvas.addEventListener("pointerleave", () => (this.tip.hidden = true));
    this.canvas.addEventListener("click", (event) => !this.dragged && this.select(this.spanAt(event)));
    new ResizeObserver(() => this.draw()).observe(this.element);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.draw());
    view.listeners.push(() => this.draw());
  }

  // Show a drawing of the bridge. options: label, duration (the time of the full width), limit, peak, unit, critical,
  // and waits of a deadlock. The selection stays on the action of the same name.
  show(data, options) {
    const name = this.selected?.name;
    this.data = data;
    this.options = options;
    this.rows = prepare(data);
    const all = this.rows.flat();
    all.forEach((span, i) => (span.before = all[data.waits?.[i]] ?? null));
    this.canvas.setAttribute("aria-label", `${options.label}. Arrow keys go from action to action.`);
    this.select(name ? all.find((span) => span.name === name) ?? null : null, false);
  }

  // The chain of what an action waited for, itself last.
  chain(span) {
    const found = [];
    for (let each = span; each; each = each.before) found.unshift(each);
    return found;
  }

  get critical() {
    return this.chain(this.rows.flat().reduce((last, span) => (span.end > last.end ? span : last)));
  }

  draw() {
    const width = this.element.clientWidth;
    if (!this.data || !width) return;
    const { duration, limit, peak, unit, critical, deadlock } = this.options;
    this.layout = new Layout(this.rows.length, width, duration, this.view);
    const ratio = devicePixelRatio || 1;
    this.canvas.width = Math.round(width * ratio);
    this.canvas.height = Math.round(this.layout.height * ratio);
    this.canvas.style.height = `${this.layout.height}px`;
    const context = this.canvas.getContext("2d");
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    const path = this.selected?.before ? this.chain(this.selected) : critical ? this.critical : null;
    const colours = theme();
    const stepTime = this.data.step_time;
    const options = { peak, limit, stepTime, unit, selected: this.selected, shown: path && new Set(path) };
    paint(context, this.layout, this.rows, colours, options);
    if (deadlock) paintDeadlock(context, this.layout, this.rows, deadlock, colours);
  }

  select(span, tell = true) {
    this.selected = span;
    if (span && tell) this.view.reveal(span.start / this.options.duration, span.end / this.options.duration);
    this.draw();
    this.onselect(span, tell);
  }

  spanAt(event) {
    const box = this.canvas.getBoundingClientRect();
    const [x, y] = [event.clientX - box.left, event.clientY - box.top];
    const rank = this.layout?.rank(y);
    const time = this.layout?.time(x);
    if (x < LEFT || !this.rows[rank] || y - this.layout.top(rank) > this.layout.row) return null;
    const here = this.rows[rank].filter((span) => span.start <= time && time < span.end);
    return here.find((span) => span.computes) ?? here[0] ?? null;
  }

  onhover(event) {
    const span = this.data && this.spanAt(event);
    this.tip.hidden = !span;
    this.canvas.style.cursor = span ? "pointer" : "default";
    if (!span) return;
    const box = this.element.getBoundingClientRect();
    this.tip.textContent = `${span.name}  ${number(span.start)} to ${number(span.end)}`;
    const x = Math.min(event.clientX - box.left + 12, box.width - this.tip.offsetWidth - 4);
    this.tip.style.transform = `translate(${Math.max(0, x)}px, ${event.clientY - box.top + 16}px)`;
  }

  // Drag the part that is shown, if the timeline is zoomed.
  ondrag(down) {
    this.dragged = false;
    if (this.view.to - this.view.from >= 1) return;
    const { from, to } = this.view;
    const move = (event) => {
      const distance = ((down.clientX - event.clientX) / (this.layout.right - LEFT)) * (to - from);
      if (Math.abs(down.clientX - event.clientX) > 4) this.dragged = true;
      if (this.dragged) this.view.set(from + distance, to + distance);
    };
    window.addEventListener("pointermove", move);
    window.addEventListener("pointerup", () => window.removeEventListener("pointermove", move), { once: true });
  }

  onwheel(event) {
    if (!event.ctrlKey && !event.metaKey) return; // the page scrolls
    event.preventDefault();
    const around = (event.offsetX - LEFT) / (this.layout.right - LEFT);
    this.view.zoom(event.deltaY < 0 ? 1.25 : 0.8, Math.min(1, Math.max(0, around)));
  }

  onkey(event) {
    if (event.ctrlKey || event.metaKey || event.altKey || !this.data) return;
    const here = this.selected;
    const row = here && this.rows[here.rank];
    const go = (span) => this.select(span ?? here);
    const actions = {
      ArrowRight: () => go(here ? row[here.index + 1] : this.rows[0][0]),
      ArrowLeft: () => go(here ? row[here.index - 1] : this.rows[0][0]),
      ArrowDown: () => go(here ? this.nearest(here, 1) : this.rows[0][0]),
      ArrowUp: () => go(here ? this.nearest(here, -1) : this.rows[0][0]),
      Home: () => go((row ?? this.rows[0])[0]),
      End: () => go((row ?? this.rows[0]).at(-1)),
      Enter: () => go(here?.before),
      Escape: () => this.select(null),
      "+": () => this.view.zoom(1.5),
      "=": () => this.view.zoom(1.5),
      "-": () => this.view.zoom(1 / 1.5),
      0: () => this.view.set(0, 1),
      c: () => this.oncritical(),
      C: () => this.oncritical(),
    };
    if (!(event.key in actions)) return;
    event.preventDefault();
    actions[event.key]();
  }

  // The action of a neighbouring rank that is nearest in time.
  nearest(span, step) {
    const middle = (span.start + span.end) / 2;
    const distance = (each) => Math.abs((each.start + each.end) / 2 - middle);
    return this.rows[span.rank + step]?.reduce((best, each) => (distance(each) < distance(best) ? each : best));
  }
}

// Say in a sentence what a span is and what it waited for.
export function sentence(span, unit) {
  const when = `on pp rank ${span.rank}, from ${number(span.start)} to ${number(span.end)}${unit}`;
  const before = span.before;
  const reason = !before ? "" : before.rank === span.rank
    ? ` It waited for ${before.name}, ${before.index === span.index - 1 ? "the action before it on its rank" : "on the same rank"}.`
    : ` It waited for ${before.name} on pp rank ${before.rank}, whose result it needs.`;
  return `${span.name}: ${describe(span.name)}, ${when}.${reason}`;
}
