// Where things are in a timeline: the geometry that drawing and pointing share.

export const LEFT = 52; // pixels of the labels
const RIGHT = 10;
export const AXIS = 38; // height of the time axis with its name

// The part of the step that is shown, as fractions; timelines that are compared share one.
export class View {
  constructor() {
    this.listeners = [];
    this.from = 0;
    this.to = 1;
    this.room = Infinity;
  }

  // Make timelines at most so high, in pixels.
  fit(room) {
    this.room = room;
    this.listeners.forEach((listener) => listener());
  }

  set(from, to) {
    const width = Math.min(1, Math.max(1e-4, to - from));
    this.from = Math.min(Math.max(0, from), 1 - width);
    this.to = this.from + width;
    this.listeners.forEach((listener) => listener());
  }

  // Zoom by a factor around a fraction of what is shown.
  zoom(factor, around = 0.5) {
    const width = (this.to - this.from) / factor;
    const centre = this.from + (this.to - this.from) * around;
    this.set(centre - width * around, centre + width * (1 - around));
  }

  // Move, so that a time span is shown.
  reveal(from, to) {
    const width = this.to - this.from;
    if (from < this.from || to > this.to) this.set((from + to - width) / 2, (from + to + width) / 2);
  }
}

export class Layout {
  // Args: ranks: number of rows; width: of the canvas; duration: the time that View's fractions are of.
  constructor(ranks, width, duration, view) {
    const usual = ranks > 12 ? [18, 16, 6] : [24, 22, 10];
    const share = Math.min(1, (view.room - AXIS) / (ranks * (usual[0] + usual[1] + usual[2])));
    [this.row, this.curve, this.gap] = usual.map((size) => Math.max(2, Math.floor(size * share)));
    this.each = this.row + this.curve + this.gap;
    this.width = width;
    this.height = ranks * this.each + AXIS;
    this.from = view.from * duration;
    this.to = view.to * duration;
    this.right = width - RIGHT;
    this.scale = (this.right - LEFT) / (this.to - this.from);
  }

  x(time) {
    return LEFT + (time - this.from) * this.scale;
  }

  time(x) {
    return this.from + (x - LEFT) / this.scale;
  }

  top(rank) {
    return rank * this.each;
  }

  // The top and the height of a span's box; messages and reductions are low, because they overlap computations.
  box(rank, isComputation) {
    const top = this.top(rank);
    return isComputation ? [top, this.row] : [top + 0.75 * this.row, 0.25 * this.row];
  }

  rank(y) {
    return Math.floor(y / this.each);
  }

  // The distance of the numbers on the time axis: 1, 2 or 5 times a power of ten.
  ticks() {
    const most = Math.max(2, Math.floor((this.right - LEFT) / 64));
    const power = 10 ** Math.floor(Math.log10((this.to - this.from) / most));
    return [1, 2, 5, 10, 20].map((factor) => factor * power).find((each) => each * most >= this.to - this.from);
  }
}
