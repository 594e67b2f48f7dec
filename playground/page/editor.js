// The reader's own schedule: CSV or a Python function, checked as it is typed.

import { debounce, el } from "./dom.js";

const EXAMPLE = {
  csv: "0F0,0F1,0F2,0B0,0F3,0B1,0B2,0B3\n1F0,1F1,1B0,1F2,1B1,1F3,1B2,1B3\n2F0,2B0,2F1,2B1,2F2,2B2,2F3,2B3\n",
  python: `def mine(rank, pp, micro_batches):
    """1F1B that runs ahead by one more micro-batch."""
    program = Program(micro_batches)
    for _ in range(pp - rank):
        program.forward(rank)
    for _ in range(micro_batches):
        program.forward(rank)
        program.backward(rank)
    return program
`,
};
const HELP = {
  csv: "One line for each rank, one cell for each action: 2F0 is the forward of micro-batch 0 through stage 2; B backward, I and W its halves; (2F3;1B0) an overlapped pair.",
  python: "The last function returns the Program of one rank, from its arguments rank, pp, micro_batches and, if it has it, chunks. Program’s methods number the micro-batches: forward(stage), backward(stage), backward_input(stage), backward_weight(), overlapped(stage, stage). It runs in your browser only.",
};

export class Editor {
  constructor(state, python) {
    this.state = state;
    this.python = python;
    this.language = state.values.a === "python" || state.values.python ? "python" : "csv";
    this.text = el("textarea", { id: "editor-text", spellcheck: false, rows: 10, wrap: "off", autocapitalize: "off", "aria-describedby": "editor-help editor-verdict" });
    this.help = el("p", { id: "editor-help", className: "note" });
    this.verdict = el("p", { id: "editor-verdict", className: "verdict", role: "status" });
    this.tabs = ["csv", "python"].map((language) =>
      el("button", { "aria-pressed": "false", onclick: () => this.open(language) }, language === "csv" ? "CSV" : "Python"));
    const show = el("button", { onclick: () => this.show("a") }, "Show it");
    const compare = el("button", { onclick: () => this.show("b") }, "Compare with it");
    document.getElementById("editor").append(
      el("h2", {}, "Your own schedule"),
      el("div", { className: "row" }, el("div", { className: "group", role: "group", "aria-label": "Language" }, ...this.tabs), show, compare),
      this.help, el("label", { htmlFor: "editor-text", className: "hidden" }, "Schedule"), this.text, this.verdict,
    );
    this.check = debounce(200, () => this.checkNow());
    this.text.oninput = () => {
      this.state.values[this.language] = this.text.value; // the link and the panels follow once typing pauses
      this.check();
    };
    this.text.onkeydown = (event) => this.onkey(event);
    state.listeners.push((values) => {
      if (document.activeElement !== this.text && values[this.language] !== this.text.value) this.open(this.language);
    });
    this.open(this.language);
  }

  open(language) {
    this.language = language;
    this.tabs.forEach((tab, i) => tab.setAttribute("aria-pressed", String(["csv", "python"][i] === language)));
    this.help.textContent = HELP[language];
    this.text.value = this.state.values[language] || EXAMPLE[language];
    this.checkNow();
  }

  // Put a schedule of a panel into the editor, and show it from there.
  async take(request, panel) {
    const texts = await this.python.call("edit", request);
    if (!texts || texts.error) return;
    const language = texts.python ? "python" : "csv";
    this.state.set({ [language]: texts[language], [panel]: language });
    this.open(language);
    this.text.focus();
    this.text.scrollIntoView({ block: "center" });
  }

  show(panel) {
    this.state.set({ [this.language]: this.text.value, [panel]: this.language });
    document.getElementById("panels").scrollIntoView();
  }

  async checkNow() {
    const [language, text] = [this.language, this.text.value];
    const request = { ...this.state.request(language), text };
    const result = await this.python.call("timeline", request, "editor").catch((error) => ({ error: error.message }));
    if (!result || this.text.value !== text) return;
    this.verdict.className = result.error ? "verdict wrong" : "verdict right";
    this.verdict.textContent = result.error ?? `It runs: ${result.pp} ranks, ${result.micro_batches} micro-batches, step time ${Number(result.step_time.toPrecision(4))}.`;
    const { a, b } = this.state.values;
    if (a === language || b === language) this.state.set({ [language]: text });
  }

  // Tab indents, as in an editor; after Escape it leaves the field, as elsewhere.
  onkey(event) {
    if (event.key === "Escape") this.leaves = true;
    else if (event.key === "Tab" && !event.shiftKey && !this.leaves && this.language === "python") {
      event.preventDefault();
      this.text.setRangeText("    ", this.text.selectionStart, this.text.selectionEnd, "end");
      this.text.oninput();
    } else if (event.key !== "Shift") this.leaves = false;
  }
}
