// The page: what happens when its state changes.

import { buildControls } from "./controls.js";
import { el } from "./dom.js";
import { Editor } from "./editor.js";
import { View } from "./layout.js";
import { Panel } from "./panel.js";
import { Python } from "./python.js";
import { Ranking } from "./ranking.js";
import { State } from "./state.js";
import { Trace } from "./trace.js";
import { Train } from "./train.js";

const status = document.getElementById("status");
const announce = (text) => (document.getElementById("announce").textContent = text);
const pyodide = new URL(document.querySelector("meta[name=pyodide]").content, document.baseURI).href;

const state = new State();
const view = new View();
const python = new Python(pyodide, onready);
let search = null; // a second Python, for searches, which take up to a few seconds; started when it is first needed
let panels = {};
let trace;

function onready({ failed, load, start }) {
  if (failed) {
    status.textContent = `Python did not start: ${failed}. The page needs WebAssembly and module workers; reload it to try again.`;
    return;
  }
  document.documentElement.dataset.load = load.toFixed(0);
  document.documentElement.dataset.start = start.toFixed(0);
  if (!panels.a) build();
}

async function build() {
  const { schedules, colours, meaning } = await python.call("start", "");
  const legend = document.getElementById("legend");
  for (const [kind, colour] of Object.entries(colours)) {
    if (kind === "R") continue; // only in recorded steps
    const box = el("span", { className: "key", style: `background: ${colour}` }, kind);
    legend.append(el("li", {}, box, ` ${meaning[kind]}`));
  }
  legend.append(el("li", {}, el("span", { className: "key idle" }), " idle"));
  const choices = [...schedules.map((name) => [name, name]), ["auto", "made to measure"], ["csv", "your own, CSV"], ["python", "your own, Python"]];
  const make = (id, all) =>
    new Panel(id, all, view, {
      onchoose: (value) => state.set({ [id]: value }),
      oncritical: toggleCritical,
      announce,
      onedit: () => editor.take(state.request(state.values[id]), id),
      ontrain: () => train.open(state.request(state.values[id])),
    });
  panels = { a: make("a", choices), b: make("b", [["", "nothing"], ...choices]) };
  const editor = new Editor(state, python);
  const train = new Train(python);
  new Ranking(state, searching);
  trace = new Trace(python, () => update(state.values));
  buildControls(document.getElementById("controls"), state);
  document.getElementById("critical").onchange = toggleCritical;
  document.getElementById("zoom-in").onclick = () => view.zoom(1.5);
  document.getElementById("zoom-out").onclick = () => view.zoom(1 / 1.5);
  document.getElementById("zoom-fit").onclick = () => view.set(0, 1);
  state.listeners.push(update);
  await update(state.values);
  document.documentElement.dataset.ready = performance.now().toFixed(0);
}

function toggleCritical() {
  state.set({ critical: state.values.critical ? 0 : 1 });
}

// Call the Python that searches, so that the sliders do not wait for it.
function searching(name, request, slot = name) {
  search ??= new Python(pyodide);
  return search.call(name, request, slot);
}

const results = {}; // the last result of each panel

async function update(values) {
  document.getElementById("critical").checked = Boolean(values.critical);
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
  if (!schedule) {
    results[id] = null;
    return;
  }
  const request = state.request(schedule);
  const call = schedule === "auto" ? searching("timeline", request, id) : python.call("timeline", request, id);
  const result = await call.catch((error) => ({ error: error.message }));
  if (result !== undefined) results[id] = result;
}

function finish(began) {
  status.hidden = true;
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
  status.hidden = true;
  panels.b.body.hidden = false;
  panels.a.show(simulated, { ...shared, critical: values.critical, label: "simulated, with the mean times of the recorded actions" });
  panels.b.show(measured, { ...shared, reference: simulated.step_time, label: `measured: ${name}` });
}
