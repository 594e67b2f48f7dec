// Painting of a timeline on a canvas, in the style of workbench/drawing/draw_svg.py.

import { computes, parts } from "./action.js";
import { number } from "./dom.js";
import { LEFT } from "./layout.js";

const FONT = "13px system-ui, sans-serif";
const WIDTH_OF_DIGIT = 7.5;

// The colours of the page, which follow the reader's light or dark mode.
export function theme() {
  const style = getComputedStyle(document.documentElement);
  const names = ["text", "soft", "idle", "curve", "edge", "limit", "path", "message", "surface"];
  return Object.fromEntries(names.map((name) => [name, style.getPropertyValue(`--${name}`).trim()]));
}

// Prepare the spans of a drawing of the bridge: for each rank, what each span needs to be painted. Actions after a
// deadlock have no times.
export function prepare(data) {
  return data.starts.map((starts, rank) => starts.map((start, index) => spanOf(data, rank, index)));
}

function spanOf(data, rank, index) {
  const name = data.actions[rank][index];
  return {
    name, rank, index,
    start: data.starts[rank][index],
    end: data.ends[rank][index],
    during: data.during[rank][index],
    after: data.after[rank][index],
    computes: computes(name),
    parts: parts(name).map(({ stage, kind, micro_batch }) => ({
      label: micro_batch,
      colour: data.colours[kind]?.[Math.floor(stage / data.pp)] ?? null,
    })),
  };
}

// Args: rows: the result of prepare. options: peak (activations at the full height of a curve), limit, stepTime,
// shown (the spans on a path; others are paler; or null), selected, unit.
export function paint(context, layout, rows, colours, options) {
  context.clearRect(0, 0, layout.width, layout.height);
  context.font = FONT;
  context.textBaseline = "middle";
  paintAxis(context, layout, rows.length, colours, options.unit);
  rows.forEach((spans, rank) => {
    context.fillStyle = colours.text;
    context.textAlign = "left";
    const legible = layout.each >= 14 || rank % 2 === 0; // in a low timeline, every other label
    if (legible) context.fillText(`pp ${rank}`, 0, layout.top(rank) + Math.max(layout.row / 2, 7));
  });
  context.save();
  context.beginPath();
  context.rect(LEFT, 0, layout.right - LEFT + 1, layout.height);
  context.clip();
  rows.forEach((spans, rank) => {
    context.fillStyle = colours.idle;
    context.fillRect(layout.x(0), layout.top(rank), options.stepTime * layout.scale, layout.row);
    paintCurve(context, layout, spans, rank, colours, options);
    paintSpans(context, layout, spans, colours, options);
  });
  if (options.shown) paintLinks(context, layout, options.shown, colours);
  if (options.selected) outline(context, layout, options.selected, colours.text, 3);
  context.restore();
  rows.forEach((spans, rank) => paintPeak(context, layout, spans, rank, colours, options));
}

function paintSpans(context, layout, spans, colours, { shown }) {
  context.textAlign = "center";
  for (const span of spans) {
    if (span.end < layout.from || span.start > layout.to) continue;
    const x = layout.x(span.start);
    const width = (span.end - span.start) * layout.scale;
    const [top, height] = layout.box(span.rank, span.computes);
    const share = height / span.parts.length;
    context.globalAlpha = shown && !shown.has(span) ? 0.28 : 1;
    span.parts.forEach(({ label, colour }, i) => {
      context.fillStyle = colour ?? colours.message;
      const inset = width > 3 ? 0.5 : 0; // a thin edge between boxes
      context.fillRect(x + inset, top + i * share, Math.max(width - 2 * inset, 0.4), share);
      const size = share < 16 ? 12 : 13;
      if (span.computes && share >= 12 && width > WIDTH_OF_DIGIT * label.length + 3) {
        context.fillStyle = "#000";
        if (size === 12) context.font = FONT.replace("13px", "12px");
        context.fillText(label, x + width / 2, top + (i + 0.5) * share + 1);
        if (size === 12) context.font = FONT;
      }
    });
  }
  context.globalAlpha = 1;
}

// The activations as an area; what exceeds the limit has another colour.
function paintCurve(context, layout, spans, rank, colours, { peak, limit }) {
  const bottom = layout.top(rank) + layout.row + layout.curve;
  const height = (live) => (live / peak) * layout.curve;
  const area = (cap) => {
    let y = bottom;
    context.beginPath();
    context.moveTo(layout.x(0), y);
    const step = (time, live) => {
      context.lineTo(layout.x(time), y);
      y = bottom - height(cap(live));
      context.lineTo(layout.x(time), y);
    };
    for (const span of spans) {
      if (span.during === null) continue;
      step(span.start, span.during);
      step(span.end, span.after);
    }
    context.lineTo(layout.right + 1e6, y);
    context.lineTo(layout.right + 1e6, bottom);
    context.fill();
  };
  if (!peak) return;
  context.fillStyle = limit ? colours.limit : colours.curve;
  area((live) => live);
  if (!limit) return;
  context.fillStyle = colours.surface; // below the limit, the usual colour on a clean ground
  area((live) => Math.min(live, limit));
  context.fillStyle = colours.curve;
  area((live) => Math.min(live, limit));
  context.strokeStyle = colours.limit;
  context.setLineDash([4, 3]);
  context.lineWidth = 1;
  context.beginPath();
  context.moveTo(LEFT, Math.round(bottom - height(limit)) + 0.5);
  context.lineTo(layout.right, Math.round(bottom - height(limit)) + 0.5);
  context.stroke();
  context.setLineDash([]);
}

function paintPeak(context, layout, spans, rank, colours, { limit }) {
  if (layout.curve < 12) return; // its number has no room
  const most = spans.reduce((peak, { during }) => Math.max(peak, during ?? 0), 0);
  context.fillStyle = limit && most > limit * (1 + 1e-9) ? colours.limit : colours.soft;
  context.textAlign = "left";
  context.font = FONT.replace("13px", "12px");
  context.fillText(number(most), 0, layout.top(rank) + layout.row + layout.curve / 2 + 2);
  context.font = FONT;
}

function outline(context, layout, span, colour, width) {
  const [top, height] = layout.box(span.rank, span.computes);
  context.strokeStyle = colour;
  context.lineWidth = width;
  context.strokeRect(layout.x(span.start), top + width / 2, Math.max((span.end - span.start) * layout.scale, 1), height - width);
}

// A path: its spans with an outline, and a line for each message from one rank to another.
function paintLinks(context, layout, shown, colours) {
  for (const span of shown) {
    outline(context, layout, span, colours.path, 2);
  }
  context.lineWidth = 2;
  context.strokeStyle = colours.path;
  for (const span of shown) {
    const before = span.before;
    if (!before || before.rank === span.rank || !shown.has(before)) continue;
    const goesDown = before.rank < span.rank;
    context.beginPath();
    context.moveTo(layout.x(before.end), layout.top(before.rank) + (goesDown ? layout.row : 0));
    context.lineTo(layout.x(span.start), layout.top(span.rank) + (goesDown ? 0 : layout.row));
    context.stroke();
  }
}

function paintAxis(context, layout, ranks, colours, unit) {
  const y = layout.top(ranks) + 2;
  context.strokeStyle = colours.edge;
  context.fillStyle = colours.soft;
  context.lineWidth = 1;
  context.beginPath();
  context.moveTo(LEFT, y + 0.5);
  context.lineTo(layout.right, y + 0.5);
  const distance = layout.ticks();
  context.textAlign = "center";
  for (let tick = Math.ceil(layout.from / distance - 1e-9); tick * distance <= layout.to * (1 + 1e-9); tick++) {
    const x = Math.round(layout.x(tick * distance)) + 0.5;
    context.moveTo(x, y);
    context.lineTo(x, y + 5);
    context.fillText(number(tick * distance), Math.min(x, layout.right - 4), y + 13);
  }
  context.stroke();
  context.textAlign = "right";
  context.fillText(unit, layout.right, y + 29);
}

// The waits of a deadlock: at the end of each rank's spans, the action that waits, and a line to what it waits for.
export function paintDeadlock(context, layout, rows, waits, colours) {
  const at = new Map(waits.map(({ rank }) => {
    const last = rows[rank].at(-1);
    return [rank, layout.x(last ? last.end : 0) + 8];
  }));
  const width = ({ action }) => 12 + 8 * action.length;
  context.textAlign = "center";
  for (const wait of waits) {
    const x = at.get(wait.rank);
    const top = layout.top(wait.rank);
    context.fillStyle = colours.surface;
    context.fillRect(x, top, width(wait), layout.row);
    context.strokeStyle = colours.limit;
    context.lineWidth = 2;
    context.setLineDash([5, 3]);
    context.strokeRect(x, top + 1, width(wait), layout.row - 2);
    context.setLineDash([]);
    context.fillStyle = colours.text;
    context.fillText(wait.action, x + width(wait) / 2, top + layout.row / 2 + 1);
  }
  waits.forEach((wait, i) => {
    const [from, to] = [at.get(wait.rank) + width(wait), at.get(wait.other) + width(waits.find((each) => each.rank === wait.other))];
    const bend = Math.max(from, to) + 26 + 14 * i;
    const [y, yTo] = [wait.rank, wait.other].map((rank) => layout.top(rank) + layout.row / 2);
    context.beginPath();
    context.moveTo(from + 2, y - 4);
    context.bezierCurveTo(bend, y - 4, bend, yTo + 4, to + 4, yTo + 4);
    context.stroke();
    context.beginPath(); // the arrow's head
    context.moveTo(to + 10, yTo - 1);
    context.lineTo(to + 3, yTo + 4);
    context.lineTo(to + 11, yTo + 8);
    context.stroke();
  });
}
