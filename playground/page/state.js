// The state of the page, and its form in a link: #a=zbv&pp=8, with the values that differ from the defaults.

import { data } from "./data.js";
import { memorySettings, problem, read, SCHEDULES } from "./settings.js";

export const TABS = { schedules: SCHEDULES, memory: memorySettings(data.schedules) };
const SETTINGS = Object.fromEntries(Object.values(TABS).flatMap((groups) => Object.values(groups).flat()).map((each) => [each.name, each]));
const OTHERS = { tab: "schedules", ...data.panels, critical: 0, csv: "", python: "", puzzle: "", gpu_memory: 80 }; // no part of a request
const DEFAULTS = { ...OTHERS, ...data.defaults.timeline, ...data.defaults.memory };

export class State {
  constructor() {
    this.listeners = [];
    this.read();
    window.addEventListener("hashchange", () => this.follow()); // by a link, by Back, or by the reader
  }

  follow() {
    this.read();
    this.notify();
  }

  // Take the values from the page's address. `refused` has the texts that are no values, and why.
  read() {
    this.values = { ...DEFAULTS };
    this.refused = {};
    this.unknown = [];
    for (const [name, text] of new URLSearchParams(location.hash.slice(1))) {
      if (name in SETTINGS) this.take(SETTINGS[name], text);
      else if (name === "critical") this.values.critical = Number(text === "1");
      else if (name === "tab" ? text in TABS : name in OTHERS) this.values[name] = text;
      else this.unknown.push(`${name}=${text}`);
    }
  }

  // Take a setting's text as its value, or keep the value and say why the text is refused.
  take(setting, text) {
    const why = problem(setting, text);
    delete this.refused[setting.name];
    if (why) this.refused[setting.name] = { text, why: `${why}; ${this.values[setting.name]} is still in use` };
    else this.values[setting.name] = read(setting, text);
  }

  enter(setting, text) {
    this.take(setting, text);
    this.set({});
  }

  get link() {
    const changed = Object.entries(this.values).filter(([name, value]) => value !== DEFAULTS[name]);
    return `#${new URLSearchParams(changed)}`;
  }

  // Change some values, and tell everyone who shows them.
  set(values) {
    Object.assign(this.values, values);
    history.replaceState(null, "", this.link);
    this.notify();
  }

  // Take the defaults, but stay on the tab.
  reset() {
    location.hash = this.values.tab === DEFAULTS.tab ? "" : `tab=${this.values.tab}`;
    this.follow(); // also if the address is the same, because texts were refused
  }

  notify() {
    for (const listener of this.listeners) listener(this.values);
  }

  // The request for a schedule, see playground/requests.py.
  request(schedule) {
    const request = this.values_of(data.defaults.timeline);
    return { schedule, text: schedule === "csv" || schedule === "python" ? this.values[schedule] : "", ...request };
  }

  // The request for the memory of the ranks, see playground/memory.py.
  get memory() {
    return this.values_of(data.defaults.memory);
  }

  values_of(defaults) {
    return Object.fromEntries(Object.keys(defaults).map((name) => [name, this.values[name]]));
  }
}
