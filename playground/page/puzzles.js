// Puzzles about schedules: the reader fills in a function, and the check of puzzles/ runs in this browser.

import { data } from "./data.js";
import { el } from "./dom.js";

export class Puzzles {
  constructor(state, python) {
    this.state = state;
    this.python = python;
    this.tabs = data.puzzles.map((number) => el("button", { "aria-pressed": "false", onclick: () => this.state.set({ puzzle: number }) }, `Puzzle ${number}`));
    this.text = el("textarea", { id: "puzzle-text", spellcheck: false, rows: 16, wrap: "off", autocapitalize: "off", hidden: true });
    this.text.oninput = () => localStorage.setItem(`puzzle ${this.number}`, this.text.value);
    this.result = el("div", { id: "puzzle-result", role: "status" });
    this.hints = el("ol", { className: "note" });
    this.actions = el("div", { className: "row", hidden: true },
      el("button", { onclick: () => this.check() }, "Check"), el("button", { onclick: () => this.hint() }, "Hint"), el("button", { onclick: () => this.open("") }, "Start again"));
    const about = "Fill in a function, which is checked here. Your text stays in this browser.";
    document.getElementById("puzzle").append(
      el("h2", {}, "Puzzles"), el("p", { className: "note" }, about),
      el("div", { className: "row" }, el("div", { className: "group", role: "group", "aria-label": "Puzzle" }, ...this.tabs)),
      el("label", { htmlFor: "puzzle-text", className: "hidden" }, "Answer"), this.text, this.actions, this.hints, this.result,
    );
    const follow = ({ puzzle }) => puzzle !== this.number && data.puzzles.includes(puzzle) && this.open(localStorage.getItem(`puzzle ${puzzle}`), puzzle);
    state.listeners.push(follow);
    follow(state.values);
  }

  // Show a puzzle, with the reader's text if there is one.
  async open(text, number = this.number) {
    this.number = number;
    this.tabs.forEach((tab, i) => tab.setAttribute("aria-pressed", String(data.puzzles[i] === number)));
    const puzzle = await this.python.call("puzzle", { number, text: "" });
    if (!puzzle || number !== this.number) return;
    this.unseen = [...puzzle.hints];
    this.text.value = text || puzzle.text;
    this.text.hidden = this.actions.hidden = false;
    this.hints.replaceChildren();
    this.result.replaceChildren();
    document.getElementById("puzzle").scrollIntoView();
  }

  hint() {
    if (this.unseen.length) this.hints.append(el("li", {}, this.unseen.shift()));
  }

  async check() {
    const result = await this.python.call("puzzle", { number: this.number, text: this.text.value }).catch((error) => ({ error: error.message }));
    if (!result) return;
    const sentences = result.sentences ?? [result.error];
    this.result.replaceChildren(...sentences.map((each) => el("p", { className: result.right ? "verdict right" : "verdict wrong" }, each)));
    if (result.picture) this.result.append(el("img", { src: `data:image/svg+xml,${encodeURIComponent(result.picture)}`, alt: "The schedule of your answer" }));
  }
}
