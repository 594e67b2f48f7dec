// The settings: sliders with number fields.

import { el } from "./dom.js";

// name, label, least, most, step, what a screen reader and a tooltip add, and what 0 is called.
const GROUPS = {
  Pipeline: [
    ["pp", "Ranks", 1, 32, 1, "pipeline-parallel ranks (pp)"],
    ["microbatches", "Micro-batches", 1, 128, 1, "per step"],
    ["chunks", "Chunks", 0, 8, 1, "stages per rank; 0 is each schedule’s default, and some schedules allow no other", "default"],
    ["group_size", "Group size", 0, 64, 1, "micro-batches that take turns on the chunks of interleaved schedules; 0 is the default", "default"],
  ],
  Times: [
    ["F", "F forward", 0.1, 4, 0.1, "in forwards of one micro-batch on one rank"],
    ["B", "B backward", 0.1, 8, 0.1, "in forwards"],
    ["I", "I input half", 0.1, 4, 0.1, "first half of a split backward, in forwards"],
    ["W", "W weights half", 0.1, 4, 0.1, "second half of a split backward, in forwards"],
    ["message", "Message", 0, 2, 0.05, "latency of a message between ranks, in forwards"],
    ["transfer", "Transfer", 0, 2, 0.05, "time in which a message occupies the link between two ranks (its size, divided by the bandwidth), in forwards"],
    ["overlapped", "Overlapped pair", 0.5, 1, 0.05, "time of a pair of DualPipeV, as a fraction of F + B"],
  ],
  "Unequal stages": [
    ["first", "First stage +", 0, 2, 0.05, "additional time of the first stage, in forwards"],
    ["last", "Last stage +", 0, 2, 0.05, "additional time of the last stage, as of the head and the loss, in forwards"],
  ],
  Memory: [
    ["memory", "Limit", 0, 64, 0.5, "most activations of a rank, in micro-batches; 0 is no limit", "none"],
    ["deferred", "Kept for W", 0, 1, 0.05, "fraction of the activations that W needs"],
  ],
};

// name, label, an example, what a tooltip adds.
const TEXTS = [
  ["layout", "Layers", "Et|tt|tt|tL", "the layers of each stage, as pp_layout: E is the embedding, t a layer, L the head, | a boundary between stages; empty for equal stages"],
  ["factors", "Factors", "1 1 1.5 1", "a factor for the time of each rank, or of each stage, separated by spaces"],
];

export function buildControls(parent, state) {
  const updates = [];
  for (const [title, sliders] of Object.entries(GROUPS)) {
    const fieldset = el("fieldset", {}, el("legend", {}, title));
    for (const slider of sliders) fieldset.append(buildSlider(state, updates, ...slider));
    if (title === "Unequal stages") fieldset.append(...TEXTS.map((text) => buildText(state, updates, ...text)));
    parent.append(fieldset);
  }
  const reset = el("button", { onclick: () => (location.hash = "") }, "Reset all");
  parent.append(el("div", { className: "actions" }, reset));
  const update = (values) => updates.forEach((each) => each(values));
  state.listeners.push(update);
  update(state.values);
}

function buildSlider(state, updates, name, label, min, max, step, title, zero) {
  const range = el("input", { type: "range", id: `${name}-range`, min, max, step, title, "aria-label": `${label}, ${title}` });
  const field = el("input", { type: "number", id: name, min, max, step, title, placeholder: zero ?? "" });
  const text = (value) => (zero && value === 0 ? "" : value);
  const change = (event) => {
    const value = Number(event.target.value); // an empty field is 0
    if ((zero || event.target.value !== "") && value >= min && value <= max) state.set({ [name]: step === 1 ? Math.round(value) : value });
  };
  range.oninput = change;
  field.oninput = change;
  field.onblur = () => (field.value = text(state.values[name]));
  updates.push((values) => {
    range.value = values[name];
    if (document.activeElement !== field) field.value = text(values[name]);
  });
  return el("div", { className: "slider" }, el("label", { htmlFor: name, title }, label), range, field);
}

function buildText(state, updates, name, label, placeholder, title) {
  const field = el("input", { id: name, title, placeholder, autocomplete: "off", spellcheck: false });
  field.oninput = () => state.set({ [name]: field.value.trim() });
  updates.push((values) => {
    if (document.activeElement !== field) field.value = values[name];
  });
  return el("div", { className: "slider" }, el("label", { htmlFor: name, title }, label), field);
}
