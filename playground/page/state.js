// The state of the page, and its form in a link: #a=zbv&pp=8, with the values that differ from the defaults.

export const DEFAULTS = {
  a: "1f1b",
  b: "zbv",
  pp: 4,
  microbatches: 8,
  chunks: 0,
  group_size: 0,
  F: 1,
  B: 2,
  I: 1,
  W: 1,
  message: 0,
  transfer: 0,
  overlapped: 1,
  first: 0,
  last: 0,
  layout: "",
  factors: "",
  memory: 0,
  deferred: 1,
  critical: 0,
  csv: "",
  python: "",
};
const PANELS = ["a", "b", "critical", "csv", "python"]; // what is not part of a request

export class State {
  constructor() {
    this.listeners = [];
    this.values = { ...DEFAULTS };
    this.read();
    window.addEventListener("hashchange", () => {
      if (location.hash !== this.written) {
        this.read();
        this.notify();
      }
    });
  }

  // Take the values from the page's address. Numbers are limited as the controls limit them, by Python if not here.
  read() {
    this.values = { ...DEFAULTS };
    for (const [name, text] of new URLSearchParams(location.hash.slice(1))) {
      if (!(name in DEFAULTS)) continue;
      const isNumber = typeof DEFAULTS[name] === "number";
      if (isNumber && Number.isFinite(Number(text))) this.values[name] = Number(text);
      if (!isNumber) this.values[name] = text;
    }
  }

  get link() {
    const changed = Object.entries(this.values).filter(([name, value]) => value !== DEFAULTS[name]);
    return `#${new URLSearchParams(changed)}`;
  }

  // Change some values, and tell everyone who shows them.
  set(values) {
    Object.assign(this.values, values);
    this.written = this.link;
    history.replaceState(null, "", this.written);
    this.notify();
  }

  notify() {
    for (const listener of this.listeners) listener(this.values);
  }

  // The request for a panel's schedule, see playground/requests.py.
  request(schedule) {
    const request = { schedule, text: this.values[schedule] ?? "" };
    for (const [name, value] of Object.entries(this.values)) if (!PANELS.includes(name)) request[name] = value;
    if (schedule !== "csv" && schedule !== "python") request.text = "";
    return request;
  }
}
