// Python in a worker: the page stays responsive, and a function of the reader's that never ends can be stopped.

let call;

async function start({ pyodide, base }) {
  const began = performance.now();
  const archive = fetch(new URL("python.zip", base));
  const { loadPyodide } = await import(new URL("pyodide.mjs", pyodide));
  const python = await loadPyodide({ indexURL: pyodide });
  const loaded = performance.now();
  const response = await archive;
  if (!response.ok) throw new Error(`python.zip: ${response.status} ${response.statusText}`);
  python.unpackArchive(await response.arrayBuffer(), "zip", { extractDir: "/playground" });
  python.runPython("import os, sys; sys.path.insert(0, '/playground'); os.chdir('/playground')"); // entries of the scoreboard
  call = python.pyimport("playground.bridge").call;
  return { load: loaded - began, start: performance.now() - loaded, python: python.runPython("sys.version.split()[0]") };
}

self.onmessage = async ({ data }) => {
  try {
    if (data.start) self.postMessage({ ready: await start(data.start) });
    else self.postMessage({ result: call(data.name, data.argument) }); // as text, which is fast to send
  } catch (error) {
    self.postMessage({ failed: String(error.message ?? error) });
  }
};
