// The settings of a tab: a label, a control, and next to it what is wrong with its value.

import { el } from "./dom.js";
import { TABS } from "./state.js";

export class Controls {
  constructor(parent, state) {
    this.state = state;
    this.faults = {}; // by setting: what Python says about its value
    this.rows = Object.values(TABS).flatMap((groups) => Object.values(groups).flat()).map((setting) => new Row(setting, state));
    const row = (setting) => this.rows.find((each) => each.setting === setting).element;
    this.tabs = Object.entries(TABS).map(([tab, groups]) => [tab, Object.entries(groups).map(([title, settings]) => fieldset(title, settings, row))]);
    const reset = el("button", { onclick: () => state.reset() }, "Reset all");
    parent.append(...this.tabs.flatMap(([, fieldsets]) => fieldsets), el("div", { className: "actions" }, reset));
    state.listeners.push(() => this.update());
    this.update();
  }

  // Show what Python says about values of settings.
  mark(faults) {
    this.faults = faults;
    this.update();
  }

  update() {
    for (const [tab, fieldsets] of this.tabs) fieldsets.forEach((each) => (each.hidden = tab !== this.state.values.tab));
    for (const row of this.rows) row.update(this.faults[row.setting.name]);
  }
}

function fieldset(title, settings, row) {
  const notes = settings.flatMap(({ label, note }) => [el("dt", {}, label), el("dd", {}, `${note}.`)]);
  const help = el("details", { className: "help" }, el("summary", { "aria-label": `What is that? ${title}` }, "What is that?"), el("dl", {}, ...notes));
  return el("fieldset", {}, el("legend", {}, title), help, ...settings.map(row));
}

class Row {
  constructor(setting, state) {
    const { name, label, kind, min, max, step, zero, note, choices, example } = setting;
    this.setting = setting;
    this.state = state;
    this.wrong = el("p", { className: "fault", id: `${name}-fault`, hidden: true });
    const enter = (event) => state.enter(setting, event.target.validity.badInput ? "?" : event.target.value.trim());
    const common = { id: name, "aria-describedby": this.wrong.id, oninput: enter, onblur: () => this.update(this.fault) };
    const limits = { min, max, step };
    if (kind === "choice") this.field = el("select", common, ...choices.map((value) => el("option", { value }, value)));
    else if (kind === "flag") this.field = el("input", { ...common, type: "checkbox", oninput: () => state.set({ [name]: this.field.checked }) });
    else if (kind === "text") this.field = el("input", { ...common, placeholder: example, autocomplete: "off", spellcheck: false });
    else this.field = el("input", { ...common, ...limits, type: "number", placeholder: zero ?? "" });
    if (kind === "slider") this.range = el("input", { ...limits, type: "range", id: `${name}-range`, "aria-label": `${label}, ${note}`, oninput: enter });
    const parts = [el("label", { htmlFor: name }, label), this.range, this.field, this.wrong];
    this.element = el("div", { className: `setting ${kind}` }, ...parts);
  }

  update(fault) {
    this.fault = fault;
    const { name, kind, zero } = this.setting;
    const value = this.state.values[name];
    const refused = this.state.refused[name];
    if (kind === "flag") this.field.checked = value;
    else if (document.activeElement !== this.field) this.field.value = refused?.text ?? (zero && value === 0 ? "" : value);
    if (this.range) this.range.value = value;
    this.wrong.textContent = refused?.why ?? fault ?? "";
    this.wrong.hidden = !this.wrong.textContent;
    this.field.setAttribute("aria-invalid", String(!this.wrong.hidden));
  }
}
