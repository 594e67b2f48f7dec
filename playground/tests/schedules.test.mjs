// What the page shows of schedules: sliders, figures, colours, chains, comparison, ranking.

import assert from "node:assert/strict";
import { test } from "node:test";
import { colourAt, figures, set } from "./browser.mjs";
import { browser, open, page, text } from "./setup.mjs";

const FORWARD = [0x56, 0xb4, 0xe9];
const BACKWARD = [0xe6, 0x9f, 0x00];

test("the page opens with two schedules and their figures", async () => {
  await open();
  // (p - 1) / (m + p - 1) of the step is idle: 3 / 11.
  assert.deepEqual(await figures(page), { "Step time": "33", Bubble: "27.3 %", "Peak activations": "4" });
  assert.equal((await figures(page, "b"))["Step time"], "25.5");
  assert.match(await text("#b .figures"), /−22.7\s%\sagainst\sA/);
  assert.deepEqual(await colourAt(page, "a", 0, 0.5 / 33), FORWARD);
  assert.deepEqual(await colourAt(page, "a", 0, 32 / 33), BACKWARD);
});

test("every slider changes the step", async () => {
  await open("#b=");
  for (const [name, value] of Object.entries({ pp: 2, micro_batches: 16, B: 3, F: 2, message: 0.5, last: 1 })) {
    const old = (await figures(page))["Step time"];
    await set(page, name, value);
    assert.notEqual((await figures(page))["Step time"], old, name);
  }
  // The last rank takes 2 (F + B) for each of 16 micro-batches; before and after, the first one F, B and two messages.
  assert.equal((await figures(page))["Step time"], "166");
  await page.click("text=Reset all");
  await page.waitForFunction(() => document.querySelector("#a .figures dd").textContent === "33");
});

test("chunks, I, W, group size and pairs change the schedules that have them", async () => {
  await open("#a=interleaved_1f1b&b=zb_h1");
  const old = [await figures(page, "a"), await figures(page, "b")];
  await set(page, "chunks", 4);
  assert.notDeepEqual(await figures(page, "a"), old[0]);
  assert.match(await text("#a .title"), /4 chunks per rank/);
  const chunked = await figures(page, "a");
  await set(page, "group_size", 8);
  assert.notDeepEqual(await figures(page, "a"), chunked);
  const half = await figures(page, "b");
  await set(page, "I", 0.5);
  await set(page, "W", 0.5);
  assert.notDeepEqual(await figures(page, "b"), half);
  await page.selectOption("#a-schedule", "dualpipev");
  await page.waitForFunction(() => document.querySelector("#a .title .note").textContent.includes("V"));
  const pairs = await figures(page, "a");
  await set(page, "overlapped", 0.5);
  assert.notDeepEqual(await figures(page, "a"), pairs);
});

test("a factor slows a rank down, and a wrong number of factors is explained", async () => {
  await open("#b=");
  await set(page, "factors", "1 1 2 1");
  assert.equal((await figures(page))["Step time"], "55");
  await set(page, "factors", "1 2");
  assert.equal(await text("#a .error"), "there are 2 factors; write 4, one for each pp rank");
  assert.equal(await page.getAttribute("#factors", "aria-invalid"), "true");
  assert.equal(await text("#factors-fault"), await text("#a .error"));
  await set(page, "factors", "");
  assert.equal((await figures(page))["Step time"], "33");
  assert.equal(await page.isVisible("#a .error"), false);
});

test("a layout gives the stages their layers", async () => {
  await open("#b=");
  await set(page, "layout", "E|tt|tt|L");
  assert.deepEqual(await figures(page), { "Step time": "54", Bubble: "55.6 %", "Peak activations": "6" });
  await set(page, "layout", "E|tt|tt");
  assert.equal(await text("#a .error"), "pp_layout='E|tt|tt' has 3 stages, but pp_size times pp_chunks (of pp_engine) is 4; write as many");
});

test("messages that occupy the link queue for it", async () => {
  await open("#a=afab&b=&pp=2&micro_batches=4");
  await set(page, "transfer", 1.5);
  assert.equal((await figures(page))["Step time"], "19.5");
});

test("activations over the limit have another colour", async () => {
  await open("#b=");
  await set(page, "memory", 2);
  assert.match(await text("#a .figures .bad"), /4exceeds the limit of 2/);
  const limit = await page.evaluate(() => getComputedStyle(document.documentElement).getPropertyValue("--limit"));
  const found = await page.$eval("#a canvas", (canvas) => {
    const context = canvas.getContext("2d"); // the curve of pp 0, near its top, in the middle of the step
    return [...context.getImageData(canvas.width / 2, 27, 1, 1).data].slice(0, 3);
  });
  assert.equal(`#${found.map((channel) => channel.toString(16).padStart(2, "0")).join("")}`, limit.trim());
});

test("a click on an action shows what it waited for, and its chain", async () => {
  await open("#b=");
  const canvas = await page.$("#a canvas");
  const { width } = await canvas.boundingBox();
  const x = (time) => 52 + (width - 62) * (time / 33);
  await canvas.click({ position: { x: x(31.5), y: 10 } });
  const said = "0B7: backward of micro-batch 7 in stage 0, on pp rank 0, from 31 to 33. It waited for 1B7 on pp rank 1, whose result it needs.";
  assert.equal(await text("#a .action"), said);
  assert.equal(await text("#announce"), said);
  assert.match(await text("#a .chain"), /22 actions: 0F0 → 1F0 → 2F0 → 3F0 → … → .*3B7 → 2B7 → 1B7 → 0B7$/);
  assert.notDeepEqual(await colourAt(page, "a", 0, 11.5 / 33), BACKWARD, "an action that is not in the chain is paler");
  assert.deepEqual(await colourAt(page, "a", 3, 5 / 33), BACKWARD, "one in the chain is not");
  await canvas.click({ position: { x: x(6), y: 10 } }); // idle time
  assert.match(await text("#a .action"), /^Select an action/);
  assert.deepEqual(await colourAt(page, "a", 0, 11.5 / 33), BACKWARD);
});

test("the critical path stands out", async () => {
  await open("#b=");
  await page.check("#critical");
  await page.waitForFunction(() => location.hash.includes("critical=1"));
  assert.deepEqual(await colourAt(page, "a", 3, 5 / 33), BACKWARD, "the last rank is never idle between its actions");
  assert.notDeepEqual(await colourAt(page, "a", 1, 9 / 33), BACKWARD);
  await page.uncheck("#critical");
  await page.waitForFunction(() => !location.hash.includes("critical=1"));
  assert.deepEqual(await colourAt(page, "a", 1, 9 / 33), BACKWARD);
});

test("all schedules are ranked under a limit of memory, with one that is made to measure", async () => {
  await open("#memory=3");
  await page.waitForFunction(() => document.querySelectorAll("#ranking tbody tr").length === 9);
  const rows = await page.$$eval("#ranking tbody tr", (all) =>
    all.map((row) => ({ name: row.cells[0].textContent, time: parseFloat(row.cells[2].textContent), peak: row.cells[4].textContent })));
  assert.match(rows[0].name, /^made to measure/, "the other schedule that fits is slower");
  assert.ok(parseFloat(rows[0].peak) <= 3);
  assert.equal(rows[1].name, "v_min");
  const over = rows.slice(2);
  assert.equal(over.every(({ peak }) => peak.includes("over the limit")), true);
  assert.deepEqual(over.map(({ time }) => time), over.map(({ time }) => time).toSorted((a, b) => a - b));
  await page.click("#ranking tbody tr:first-child button:has-text('Compare')");
  await page.waitForFunction(() => document.querySelector("#b .note").textContent.startsWith("search"));
  assert.equal((await figures(page, "b"))["Step time"], String(rows[0].time));
  assert.match(await text("#b .figures"), /within 3/);
});

test("a link holds the state", async () => {
  await open();
  await set(page, "pp", 6);
  await set(page, "message", 0.25);
  await page.selectOption("#b-schedule", "interleaved_1f1b");
  await page.waitForFunction(() => location.hash.includes("interleaved"));
  await page.fill("#editor-text", "0F0,0B0");
  await page.click("#editor >> text=Show it");
  await page.waitForFunction(() => location.hash.includes("csv"));
  const shown = [await figures(page, "a"), await figures(page, "b")];
  const other = await browser.open(new URL(page.url()).hash);
  assert.deepEqual([await figures(other, "a"), await figures(other, "b")], shown);
  assert.equal(await other.inputValue("#editor-text"), "0F0,0B0");
  assert.equal(await other.inputValue("#pp"), "6");
  await other.close();
});
