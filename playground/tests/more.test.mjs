// The editor, recorded steps, the command, keyboard, screen readers, dark mode and a phone.

import assert from "node:assert/strict";
import fs from "node:fs";
import os from "node:os";
import path from "node:path";
import { test } from "node:test";
import { figures } from "./browser.mjs";
import { open, page, text, until } from "./setup.mjs";

test("a CSV is checked as it is typed, and a deadlock shows its cycle", async () => {
  await open("#b=");
  await page.fill("#editor-text", "0F0,0B0\n1F0");
  await until("#editor-verdict", /^pp rank 1 lacks 1B0 \(or 1I0 and 1W0\), the backward of micro-batch 0 in stage 1$/);
  await page.fill("#editor-text", "0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1\n");
  await until("#editor-verdict", /^deadlock: pp rank 0 waits at 0B0 for 1B0 of pp rank 1, which waits at 1F1 for 0F1 of pp rank 0; put 1B0 before 1F1/);
  await page.click("#editor >> text=Show it");
  await until("#a .error", /^deadlock/);
  assert.match(await page.getAttribute("#a canvas", "aria-label"), /^The step until the deadlock/);
  const red = await page.$eval("#a canvas", (canvas) => {
    const [, r, g, b] = getComputedStyle(document.documentElement).getPropertyValue("--limit").match(/#(..)(..)(..)/).map((hex) => parseInt(hex, 16));
    const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
    let count = 0;
    for (let i = 0; i < data.length; i += 4) count += data[i] === r && data[i + 1] === g && data[i + 2] === b;
    return count;
  });
  assert.ok(red > 100, "the ranks that wait, and the arrows of the cycle, are drawn");
  await page.fill("#editor-text", "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n");
  await until("#editor-verdict", /^It runs: 2 ranks, 2 micro-batches, step time 9\.$/);
  await until("#a .figures", /Step time9/);
  assert.equal(await page.isVisible("#a .error"), false);
});

test("a Python function is checked as it is typed", async () => {
  await open("#b=");
  await page.click("#editor >> text=Python");
  await until("#editor-verdict", /^It runs: 4 ranks, 8 micro-batches/);
  await page.fill("#editor-text", "def mine(rank, pp, micro_batches):\n    return programme");
  await until("#editor-verdict", /^line 2: NameError: name 'programme' is not defined/);
  await page.fill("#editor-text", "def mine(rank, pp, micro_batches:\n");
  await until("#editor-verdict", /^line 1: /);
  await page.fill("#editor-text", "def mine(rank, pp, micro_batches):\n    return [1]");
  await until("#editor-verdict", /^mine returns \[1\] for pp rank 0; it must return a Program/);
});

test("a schedule's own function can be edited and compared", async () => {
  await open("#a=1f1b&b=1f1b");
  await page.click("#b >> text=Edit");
  await page.waitForFunction(() => document.querySelector("#b-schedule").value === "python");
  const source = await page.inputValue("#editor-text");
  assert.match(source, /^def one_f_one_b\(rank: int/);
  await page.fill("#editor-text", source.replace("pp - rank - 1", "pp - rank"));
  await until("#b .figures", /Peak activations5/);
  assert.equal((await figures(page, "a"))["Peak activations"], "4");
});

test("an endless loop is stopped, and the page goes on", async () => {
  await open("#b=");
  await page.click("#editor >> text=Python");
  await page.fill("#editor-text", "def mine(rank, pp, micro_batches):\n    while True: pass");
  await until("#editor-verdict", /^this ran for more than 8 seconds, so it was stopped/);
  await page.fill("#pp", "8");
  await until("#a .figures", /Step time45/);
});

// A trace like those of workbench/schedules/trace.py: 1F1B on two ranks, with messages.
const SPANS = [
  [0, "0F0", 0, 0.01], [0, "0SEND_F0", 0.01, 0.012], [0, "0F1", 0.01, 0.021], [0, "0SEND_F1", 0.021, 0.022], [0, "0B0", 0.05, 0.07], [0, "0B1", 0.081, 0.1],
  [1, "1RECV_F0", 0.01, 0.013], [1, "1F0", 0.013, 0.023], [1, "1B0", 0.023, 0.045], [1, "1F1", 0.045, 0.056], [1, "1B1", 0.056, 0.078],
];
const TRACE = SPANS.map(([rank, action, start, end]) => `${JSON.stringify({ rank, action, start, end })}\n`).join("");

async function drop(name, contents) {
  const data = await page.evaluateHandle(([name, contents]) => {
    const transfer = new DataTransfer();
    transfer.items.add(new File([contents], name));
    return transfer;
  }, [name, contents]);
  await page.dispatchEvent("#ranking", "drop", { dataTransfer: data });
}

test("a recorded step is drawn under the simulated one", async () => {
  await open();
  await drop("trace_step_00000005.jsonl", TRACE);
  await until("#b .title .note", /^measured: trace_step_00000005.jsonl/);
  assert.equal((await figures(page, "b"))["Step time"], "0.1 s");
  assert.match((await figures(page, "a"))["Step time"], /^0\.1\d* s$/);
  assert.match(await text("#trace-verdict"), /the measured step took 0.100 s, \d.\d\d times the simulated one/);
  assert.match(await page.getAttribute("#b canvas", "aria-label"), /^measured: .*2 pp ranks, 2 micro-batches, step time 0.1/);
  await page.focus("#b canvas");
  for (const key of ["ArrowRight", "ArrowDown", "End"]) await page.keyboard.press(key);
  assert.match(await text("#announce"), /^1B1: .* It waited for 1F1, the action before it on its rank\.$/);
  await page.keyboard.press("Enter");
  assert.match(await text("#announce"), /^1F1: .* It waited for 1B0, the action before it on its rank\.$/);
  await page.click("text=Back to the sliders");
  await until("#a .figures", /Step time33/);
  await drop("notes.txt", "no trace");
  await until("#trace-verdict", /^notes.txt is not a valid trace: line 1 is 'no trace'; expected/);
  const file = path.join(os.tmpdir(), `trace_step_00000007-${process.pid}.jsonl`);
  fs.writeFileSync(file, TRACE);
  await page.setInputFiles("#trace-file", file);
  await until("#b .title .note", /^measured: trace_step_00000007/);
  fs.rmSync(file);
});

test("the command that trains", async () => {
  await open("#a=interleaved_1f1b&chunks=2");
  await page.click("#a >> text=Train this");
  await until("#train-command", /python train.py --config template\/base_config.json/);
  assert.match(await text("#train-command"), /--distributed.pp_engine interleaved_1f1b \\\n[^]*--schedule.pp_chunks 2 /);
  await page.selectOption("#a-schedule", "auto");
  await until("#a .title .note", /^[a-z0-9_]+, 2 chunks/);
  await page.click("#a >> text=Train this");
  await until("#train-command", /--distributed.pp_engine csv:schedule.csv/);
  const [download] = await Promise.all([page.waitForEvent("download"), page.click("text=Download schedule.csv")]);
  assert.match(fs.readFileSync(await download.path(), "utf8"), /^0F0,0F1/);
});

test("everything can be reached and used with the keyboard", async () => {
  await open();
  await page.waitForFunction(() => document.querySelectorAll("#ranking tbody tr").length === 9);
  const seen = new Set();
  for (let i = 0; i < 160; i++) {
    await page.keyboard.press("Tab");
    seen.add(await page.evaluate(() => {
      const at = document.activeElement;
      return at.id || at.getAttribute("aria-label") || at.textContent;
    }));
  }
  for (const name of ["critical", "zoom-in", "a-schedule", "b-schedule", "Train this", "pp", "pp-range", "factors", "memory", "Reset all", "Why is a rank idle?", "Memory of a rank", "What is that? Times", "trace-file", "editor-text", "Show it", "Compare with zbv"]) {
    assert.ok(seen.has(name), `${name} cannot be reached; seen: ${[...seen].join(", ")}`);
  }
  await page.focus("#a canvas");
  const announced = async (key) => {
    await page.keyboard.press(key);
    return (await text("#announce")).split(":")[0];
  };
  assert.equal(await announced("ArrowRight"), "0F0");
  assert.equal(await announced("ArrowRight"), "0F1");
  assert.equal(await announced("ArrowDown"), "1F0");
  assert.equal(await announced("End"), "1B7");
  assert.equal(await announced("Enter"), "2B7", "the action that it waited for");
  assert.equal(await announced("ArrowUp"), "1B6");
  assert.equal(await announced("Home"), "1F0");
  await page.keyboard.press("c");
  assert.equal(await page.isChecked("#critical"), true);
  await page.keyboard.press("Escape");
  assert.match(await text("#a .action"), /^Select an action/);
});

test("a timeline can be zoomed", async () => {
  await open("#pp=16&micro_batches=64&a=zbv&b=");
  const picture = () => page.$eval("#a canvas", (canvas) => canvas.toDataURL());
  const whole = await picture();
  await page.click("#zoom-in");
  assert.notEqual(await picture(), whole);
  await page.click("#zoom-fit");
  assert.equal(await picture(), whole);
});

test("screen readers get names for everything", async () => {
  await open();
  const label = await page.getAttribute("#a canvas", "aria-label");
  assert.match(label, /^1f1b: 4 pp ranks, 8 micro-batches, step time 33, bubble 27.3\s%, peak activations 4. Arrow keys/);
  const unnamed = await page.$$eval("input, select, textarea, button, canvas", (all) =>
    all.filter((each) => !each.labels?.length && !each.getAttribute("aria-label") && !each.textContent.trim()).map((each) => each.outerHTML));
  assert.deepEqual(unnamed, []);
  await page.click("#a >> text=Each rank in numbers");
  await page.waitForSelector("#a table tbody tr");
  assert.deepEqual(await page.$$eval("#a table tbody tr:first-child > *", (cells) => cells.map((cell) => cell.textContent.replace("\u202f", " "))),
    ["pp 0", "0", "24", "9", "27.3 %", "4"]);
});

test("dark mode", async () => {
  await open("", { scheme: "dark" });
  const [ground, ink] = await page.evaluate(() => ["background-color", "color"].map((name) =>
    getComputedStyle(document.body).getPropertyValue(name).match(/\d+/g).reduce((sum, channel) => sum + Number(channel), 0)));
  assert.ok(ground < 100 && ink > 600);
  await page.emulateMedia({ colorScheme: "light" });
  // The timeline follows: the label "pp 0" becomes dark.
  await page.waitForFunction(() => {
    const { data } = document.querySelector("#a canvas").getContext("2d").getImageData(0, 0, 40, 24);
    return Math.min(...data.filter((_, i) => i % 4 === 0 && data[i + 3] > 200)) < 80;
  });
});

test("a puzzle is checked in the page, and the answer stays", async () => {
  await open("#puzzle=12", { prepare: (page) => page.addInitScript(() => sessionStorage.opened || (localStorage.clear(), (sessionStorage.opened = 1))) });
  await page.waitForSelector("#puzzle-text:not([hidden])");
  assert.match(await page.inputValue("#puzzle-text"), /^"""Puzzle 12/);
  await page.click("#puzzle button:text-is('Check')");
  await until("#puzzle-result", /^NOT DONE YET/);
  await page.click("#puzzle button:text-is('Hint')");
  assert.equal(await page.$$eval("#puzzle ol li", (all) => all.length), 1);
  const afab = 'def program(rank, p, m):\n    return [f"{rank}{kind}{i}" for kind in "FB" for i in range(m)]\n';
  await page.fill("#puzzle-text", afab);
  await page.click("#puzzle button:text-is('Check')");
  await until("#puzzle-result", /^WRONG: p = 2, m = 3: rank 0 holds the activations of 3 micro-batches, expected at most 2/);
  assert.ok(await page.$eval("#puzzle-result img", (image) => image.decode().then(() => image.naturalWidth > 100)));
  await page.reload();
  await page.waitForSelector("#puzzle-text:not([hidden])");
  assert.equal(await page.inputValue("#puzzle-text"), afab);
});
