// The page: what happens when its state changes.

import { Controls } from "./controls.js";
import { data, known } from "./data.js";
import { el } from "./dom.js";
import { Editor } from "./editor.js";
import { install } from "./install.js";
import { View } from "./layout.js";
import { Memory } from "./memory.js";
import { Panel } from "./panel.js";
import { Puzzles } from "./puzzles.js";
import { Python } from "./python.js";
import { markQuestions } from "./questions.js";
import { Ranking } from "./ranking.js";
import { Score } from "./score.js";
import { buildSheet } from "./sheet.js";
import { State } from "./state.js";
import { Trace } from "./trace.js";
import { Train } from "./train.js";

const status = document.getElementById("status");
const announce = (text) => (document.getElementById("announce").textContent = text);
const pyodide = new URL(document.querySelector("meta[name=pyodide]").content, document.baseURI).href;

const state = new State();
const view = new View();
const python = new Python(pyodide, onready);
let isReady;
const started = new Promise((resolve) => (isReady = resolve));
let search = null; // a second Python, for searches, which take up to a few seconds; started when it is first needed
const panels = {};
const memory = new Memory(state);
let controls;
let trace;
const results = {}; // the last result of each panel
const asked = {}; // the last request of each panel, and of the memory tab

function onready({ failed, load, start }) {
  if (failed) {
    status.textContent = `Python did not start: ${failed}. The page needs WebAssembly and module workers; reload it to try again.`;
    return;
  }
  Object.assign(document.documentElement.dataset, { load: load.toFixed(0), start: start.toFixed(0), python: performance.now().toFixed(0) });
  status.hidden = true;
  isReady();
  install();
}

async function build() {
  const legend = document.getElementById("legend");
  for (const [kind, colour] of Object.entries(data.colours)) {
    if (kind === "R") continue; // only in recorded steps
    const box = el("span", { className: "key", style: `background: ${colour}` }, kind);
    legend.append(el("li", {}, box, ` ${data.meaning[kind]}`));
  }
  legend.append(el("li", {}, el("span", { className: "key idle" }), " idle"));
  const choices = [...data.schedules.map((name) => [name, name]), ["auto", "made to measure"], ["csv", "your own, CSV"], ["python", "your own, Python"]];
  const make = (id, all) =>
    new Panel(id, all, view, {
      onchoose: (value) => state.set({ [id]: value }),
      oncritical: toggleCritical,
      announce,
      onedit: () => editor.take(state.request(state.values[id]), id),
      ontrain: () => train.open(state.request(state.values[id])),
    });
  Object.assign(panels, { a: make("a", choices), b: make("b", [["", "nothing"], ...choices]) });
  controls = new Controls(document.getElementById("controls"), state);
  trace = new Trace(python, () => update(state.values));
  document.getElementById("critical").onchange = toggleCritical;
  document.getElementById("zoom-in").onclick = () => view.zoom(1.5);
  document.getElementById("zoom-out").onclick = () => view.zoom(1 / 1.5);
  document.getElementById("zoom-fit").onclick = () => view.set(0, 1);
  buildSheet(view);
  state.listeners.push(update, markQuestions(state));
  const drawn = update(state.values); // at once, if the page holds the results
  const editor = new Editor(state, python);
  const train = new Train(python);
  new Ranking(state, searching);
  new Score(state, searching);
  new Puzzles(state, python);
  await drawn;
  document.documentElement.dataset.ready = performance.now().toFixed(0);
}

function toggleCritical() {
  state.set({ critical: state.values.critical ? 0 : 1 });
}

// Call the Python that searches, so that the sliders do not wait for it.
async function searching(...call) {
  await started; // the first Python loads alone, which is faster
  search ??= new Python(pyodide);
  return search.call(...call);
}

async function update(values) {
  document.body.dataset.tab = values.tab;
  document.getElementById("critical").checked = Boolean(values.critical);
  if (values.tab === "memory") {
    await showMemory(performance.now());
    return;
  }
  if (trace.result) {
    showTrace(values);
    return;
  }
  panels.a.choose(values.a);
  panels.b.choose(values.b);
  const began = performance.now();
  await Promise.all(["a", "b"].map((id) => simulate(id, values[id])));
  finish(began);
}

async function simulate(id, schedule) {
  const request = (asked[id] = schedule && state.request(schedule));
  if (!request) {
    results[id] = null;
    return;
  }
  const ask = schedule === "auto" ? searching : python.call.bind(python);
  const result = known("timeline", request) ?? await ask("timeline", request, id).catch((error) => ({ error: error.message }));
  if (result !== undefined && asked[id] === request) results[id] = result;
}

function finish(began) {
  const shown = ["a", "b"].filter((id) => results[id] && !results[id].error);
  const duration = Math.max(...shown.map((id) => results[id].step_time));
  const peak = Math.max(...shown.flatMap((id) => results[id].peaks));
  const { memory: limit, critical } = state.values;
  for (const id of ["a", "b"]) {
    if (results[id]?.error) panels[id].fail(results[id]);
    else if (results[id]) {
      const reference = id === "b" && shown.length === 2 ? results.a.step_time : null;
      panels[id].show(results[id], { duration, peak, limit, critical, reference });
    }
  }
  controls.mark(Object.fromEntries(Object.values(results).filter((each) => each?.field).map(({ field, error }) => [field, error])));
  count(began);
}

async function showMemory(began) {
  const request = (asked.memory = state.memory);
  const result = known("memory", request) ?? await python.call("memory", request).catch((error) => ({ error: error.message }));
  if (!result || asked.memory !== request) return; // a newer call replaced this one
  if (result.error) memory.fail(result.error);
  else memory.show(result, state.values.gpu_memory);
  controls.mark(result.field ? { [result.field]: result.error } : {});
  count(began);
}

// Leave the number of redraws, and the milliseconds of the last one, where tests and speed.mjs find them.
function count(began) {
  const { dataset } = document.documentElement;
  dataset.redraw = (performance.now() - began).toFixed(1);
  dataset.count = Number(dataset.count ?? 0) + 1;
}

function showTrace(values) {
  const { simulated, measured, name } = trace.result;
  const duration = Math.max(simulated.step_time, measured.step_time);
  const peak = Math.max(...simulated.peaks, ...measured.peaks);
  const shared = { duration, peak, unit: "time in seconds" };
  panels.b.body.hidden = false;
  panels.a.show(simulated, { ...shared, critical: values.critical, label: "simulated, with the mean times of the recorded actions" });
  panels.b.show(measured, { ...shared, reference: simulated.step_time, label: `measured: ${name}` });
}

build();
