// A schedule among the published ones, under the settings of docs/scoreboard.md, one after the other.

import { el, number } from "./dom.js";

const HEADS = ["memory", "message", "times", "place", "step time", "at least", "fastest other"];
const LONGEST = 120_000; // milliseconds for a setting: the search in it takes some seconds

export class Score {
  // Args: call: calls the Python that may take long.
  constructor(state, call) {
    this.state = state;
    this.call = call;
    this.note = el("p", { className: "note", role: "status" });
    this.body = el("tbody");
    const head = el("thead", {}, el("tr", {}, ...HEADS.map((text) => el("th", { scope: "col" }, text))));
    this.table = el("div", { className: "scroll", tabIndex: 0, role: "region", "aria-label": "Places", hidden: true }, el("table", {}, head, this.body));
    const help = "The scoreboard ranks schedules of 4, 8 or 16 ranks under fixed settings: a limit of memory, a latency of messages, and times of actions. The times of the sliders have no effect on it.";
    const rank = (name, schedule) => el("button", { onclick: () => this.rank(schedule()) }, name);
    document.getElementById("score").append(
      el("h2", {}, "Among the published schedules"),
      el("p", { className: "note" }, help),
      el("div", { className: "row" }, rank("Rank the schedule above", () => state.values.a), rank("Rank the editor’s CSV", () => "csv"), rank("Rank the editor’s Python", () => "python")),
      this.note, this.table,
    );
  }

  async rank(schedule) {
    const request = this.state.request(schedule);
    const run = (this.run = {});
    const began = performance.now();
    this.body.replaceChildren();
    this.note.textContent = "Ranking under the first setting …";
    for (let setting = 0, count = 1; setting < count; setting++) {
      const result = await this.call("score", { ...request, setting }, "score", LONGEST).catch((error) => ({ error: error.message }));
      if (run !== this.run || !result) return;
      this.table.hidden = Boolean(result.error);
      if (result.error) return void (this.note.textContent = result.error);
      count = result.count;
      this.body.append(row(result));
      const seconds = ((performance.now() - began) / 1000).toFixed(0);
      this.note.textContent = `${setting + 1} of ${count} settings, in ${seconds} s${setting + 1 < count ? " …" : "."}`;
    }
  }
}

function row({ memory, limit, message, times, bound, peak, scores }) {
  const own = scores.find(({ name }) => name === "yours");
  const other = scores.find(({ name }) => name !== "yours");
  const cells = [
    number(message), times,
    own ? `${own.place} of ${scores.length}` : `needs ${number(peak)}`, own ? number(own.step_time) : "–", number(bound),
    other ? `${other.name}: ${number(other.step_time)}` : "–",
  ];
  const name = `${memory} = ${number(limit)}`;
  return el("tr", { className: own ? "" : "out" }, el("th", { scope: "row" }, name), ...cells.map((cell) => el("td", {}, cell)));
}
