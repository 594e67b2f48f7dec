// The page's side of the worker: calls of playground/bridge.py, one at a time.

const LONGEST = 8000; // milliseconds: a call that takes longer is stopped, unless it may

export class Python {
  // Args: pyodide: the folder of Pyodide; onready: called with the times of the start, in milliseconds.
  constructor(pyodide, onready = () => {}) {
    this.pyodide = pyodide;
    this.onready = onready;
    this.waiting = []; // calls that have not been sent
    this.current = null; // the call that Python works on
    this.start();
  }

  start() {
    this.isReady = false;
    this.worker = new Worker(new URL("worker.js", import.meta.url), { type: "module" });
    this.worker.onmessage = ({ data }) => this.receive(data);
    this.worker.onerror = (event) => this.receive({ failed: event.message || "the worker did not start" });
    this.worker.postMessage({ start: { pyodide: this.pyodide, base: document.baseURI } });
  }

  // Call a function of bridge.FUNCTIONS. A newer call replaces one with the same slot that has not been sent; the
  // older one's promise then resolves to undefined.
  call(name, argument, slot = name, longest = LONGEST) {
    const text = typeof argument === "string" ? argument : JSON.stringify(argument);
    return new Promise((resolve, reject) => {
      const index = this.waiting.findIndex((each) => each.slot === slot);
      if (index >= 0) this.waiting.splice(index, 1)[0].resolve(undefined);
      this.waiting.push({ name, argument: text, slot, longest, resolve, reject });
      this.send();
    });
  }

  send() {
    if (!this.isReady || this.current || !this.waiting.length) return;
    this.current = this.waiting.shift();
    const { name, argument, longest } = this.current;
    this.timer = setTimeout(() => this.stop(), longest);
    this.worker.postMessage({ name, argument });
  }

  receive({ ready, result, failed }) {
    clearTimeout(this.timer);
    const done = this.current;
    this.current = null;
    if (ready) {
      this.isReady = true;
      this.onready(ready);
    } else if (done) {
      if (failed === undefined) done.resolve(JSON.parse(result));
      else done.reject(new Error(failed));
    } else {
      this.onready({ failed });
    }
    this.send();
  }

  // End a call that takes too long, and start Python again.
  stop() {
    const stopped = this.current;
    this.current = null;
    this.worker.terminate();
    this.start();
    stopped.resolve({ error: `this ran for more than ${stopped.longest / 1000} seconds, so it was stopped; is there an endless loop?` });
  }
}
