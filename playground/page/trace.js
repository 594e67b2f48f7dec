// A recorded step of a real run: the file is read in the browser and goes nowhere else.

import { el } from "./dom.js";

export class Trace {
  // Args: onchange: called when there is a trace (result: measured, simulated and its name), or none any more.
  constructor(python, onchange) {
    this.python = python;
    this.onchange = onchange;
    this.result = null;
    this.input = el("input", { type: "file", id: "trace-file", accept: ".jsonl", onchange: () => this.read(this.input.files[0]) });
    this.verdict = el("p", { className: "verdict", id: "trace-verdict", role: "status" });
    this.close = el("button", { hidden: true, onclick: () => this.end() }, "Back to the sliders");
    const text = "Drop trace_step_*.jsonl of a run on this page, or choose it: the measured step is drawn under the simulated one. A run writes it in the steps of ";
    document.getElementById("trace").append(
      el("h2", {}, "A recorded step"),
      el("p", { className: "note" }, text, el("code", {}, "--logging.trace_steps"), ". The file stays in your browser."),
      el("div", { className: "row" }, el("label", { htmlFor: "trace-file" }, "Trace"), this.input, this.close),
      this.verdict,
    );
    window.addEventListener("dragover", (event) => {
      event.preventDefault();
      document.body.classList.add("dropping");
    });
    window.addEventListener("dragleave", (event) => !event.relatedTarget && document.body.classList.remove("dropping"));
    window.addEventListener("drop", (event) => {
      event.preventDefault();
      document.body.classList.remove("dropping");
      if (event.dataTransfer.files.length) this.read(event.dataTransfer.files[0]);
    });
  }

  async read(file) {
    if (!file) return;
    const result = await this.python.call("trace", await file.text()).catch((error) => ({ error: error.message }));
    this.verdict.className = result.error ? "verdict wrong" : "verdict right";
    if (result.error) {
      this.verdict.textContent = result.error.replace("the file", file.name);
      return;
    }
    const { measured, simulated } = result;
    const ratio = measured.step_time / simulated.step_time;
    this.verdict.textContent = `${file.name}: the measured step took ${measured.step_time.toPrecision(3)} s, ${ratio.toFixed(2)} times the simulated one.`;
    this.result = { ...result, name: file.name };
    this.close.hidden = false;
    document.body.classList.add("traced");
    this.onchange();
    document.getElementById("panels").scrollIntoView();
  }

  end() {
    this.result = null;
    this.input.value = "";
    this.close.hidden = true;
    this.verdict.textContent = "";
    document.body.classList.remove("traced");
    this.onchange();
  }
}
