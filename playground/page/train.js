// The command that trains with a schedule, and the link to this page as it is.

import { copy, el } from "./dom.js";

export class Train {
  constructor(python) {
    this.python = python;
    this.command = el("pre", { id: "train-command", tabIndex: 0 });
    this.file = el("p", { hidden: true });
    this.section = document.getElementById("train");
    const copyCommand = el("button", { onclick: () => copy(this.command.textContent, copyCommand) }, "Copy the command");
    const copyLink = el("button", { onclick: () => copy(location.href, copyLink) }, "Copy a link to this page as it is");
    this.note = el("p", { className: "note" }, "In a copy of picotron, on a laptop without a GPU: this trains the quickstart’s model with the schedule, and records step 5 for the section above. The times of the sliders have no effect on it.");
    this.heading = el("h2", { tabIndex: -1 }, "Train this");
    this.result = el("div", { hidden: true }, this.note, this.command, this.file, el("div", { className: "row" }, copyCommand));
    this.hint = el("p", { className: "note" }, "The button “Train this” beside a schedule shows its command here.");
    this.section.append(this.heading, this.hint, this.result, el("div", { className: "row" }, copyLink));
  }

  async open(request) {
    const result = await this.python.call("train", request);
    if (!result) return;
    this.hint.hidden = !result.error;
    this.result.hidden = Boolean(result.error);
    if (result.error) this.hint.textContent = result.error;
    else this.show(result);
    this.section.scrollIntoView();
    this.heading.focus({ preventScroll: true });
  }

  show({ command, file }) {
    this.command.textContent = command;
    this.file.hidden = !file;
    if (this.url) URL.revokeObjectURL(this.url);
    this.url = file ? URL.createObjectURL(new Blob([file], { type: "text/csv" })) : null;
    const link = file && el("a", { href: this.url, download: "schedule.csv" }, "Download schedule.csv");
    if (file) this.file.replaceChildren(link, ", which the command reads from the current folder.");
  }
}
