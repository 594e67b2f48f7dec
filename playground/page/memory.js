// The memory of each pipeline rank: bars, and the same numbers in a table.

import { data } from "./data.js";
import { el } from "./dom.js";

const KINDS = ["weights", "gradients", "optimizer", "gathered", "activations", "temporary"];
const NOTE = "Gathered are the full weights that exist during a step of ZeRO-3 in a pipeline; temporary are tensors inside a forward or a backward. Kernel workspace and fragmentation are not counted.";
const gib = (bytes) => `${Number((bytes / 2 ** 30).toPrecision(3))}`;

export class Memory {
  constructor(state) {
    this.state = state;
    this.models = Object.entries(data.models).map(([name, sizes]) => [sizes, el("button", { onclick: () => state.set(sizes) }, name)]);
    this.figures = el("dl", { className: "figures" });
    this.legend = el("ul", { className: "legend" }, ...KINDS.map((kind) => el("li", {}, el("span", { className: `key ${kind}` }), ` ${kind}`)));
    this.bars = el("div", { id: "bars" });
    this.table = el("table");
    this.error = el("p", { className: "error", role: "alert", hidden: true });
    const buttons = el("div", { className: "row", role: "group", "aria-label": "Model" }, ...this.models.map(([, button]) => button));
    const scroll = el("div", { className: "scroll", tabIndex: 0, role: "region", "aria-label": "GiB by rank and kind of tensor" }, this.table);
    this.result = el("div", {}, this.figures, this.legend, this.bars, scroll);
    document.getElementById("bytes").append(buttons, this.error, this.result, el("p", { className: "note" }, NOTE));
  }

  // Show what the bridge returned. limit: memory of a GPU in GiB.
  show(result, limit) {
    this.error.hidden = true;
    this.result.classList.remove("stale");
    for (const [sizes, button] of this.models) {
      button.setAttribute("aria-pressed", String(Object.keys(sizes).every((name) => sizes[name] === this.state.values[name])));
    }
    const { ranks, gpus, parameters, tokens } = result;
    const most = Math.max(...ranks.map((rank) => rank.total));
    const over = most > limit * 2 ** 30;
    this.figures.replaceChildren(
      figure("Most on a GPU", `${gib(most)} GiB`, over ? `exceeds ${limit} GiB` : `of ${limit} GiB`, over),
      figure("GPUs", gpus.toLocaleString("en"), "tp × cp × pp × dp"),
      figure("Parameters", `${Number((parameters / 1e9).toPrecision(3))} B`, "billions, of the model"),
      figure("Tokens", tokens.toLocaleString("en"), "per step"),
    );
    const full = Math.max(most, limit * 2 ** 30);
    this.bars.replaceChildren(...ranks.map((rank, number) => bar(rank, number, full, limit)));
    const heads = ["rank", "stages", ...KINDS, "total"];
    const rows = ranks.map((rank, number) => {
      const cells = [rank.stages.replace(/t+/g, (layers) => (layers.length > 3 ? `t×${layers.length}` : layers)), ...[...KINDS, "total"].map((kind) => gib(rank[kind]))];
      return el("tr", {}, el("th", { scope: "row" }, `pp ${number}`), ...cells.map((cell) => el("td", {}, cell)));
    });
    this.table.replaceChildren(
      el("caption", {}, "GiB by rank and kind of tensor"),
      el("thead", {}, el("tr", {}, ...heads.map((head) => el("th", { scope: "col" }, head)))),
      el("tbody", {}, ...rows),
    );
  }

  // A value is refused: the last result stays, but paler.
  fail(error) {
    this.error.textContent = error;
    this.error.hidden = false;
    this.result.classList.add("stale");
  }
}

function figure(term, value, remark, isBad = false) {
  return el("div", { className: isBad ? "bad" : "" }, el("dt", {}, term), el("dd", {}, value), el("dd", { className: "remark" }, remark));
}

function bar(rank, number, full, limit) {
  const parts = KINDS.map((kind) => el("span", { className: `part ${kind}`, style: `width: ${(100 * rank[kind]) / full}%` }));
  const mark = el("span", { className: "limit", style: `left: ${(100 * limit * 2 ** 30) / full}%` });
  const track = el("div", { className: "track", "aria-hidden": "true" }, ...parts, mark);
  const over = rank.total > limit * 2 ** 30;
  return el("div", { className: "bytes" }, el("span", {}, `pp ${number}`), track, el("span", { className: over ? "over" : "" }, `${gib(rank.total)} GiB`));
}
