// The memory tab and the scoreboard.

import assert from "node:assert/strict";
import { test } from "node:test";
import { figures, set } from "./browser.mjs";
import { open, page, text, until } from "./setup.mjs";

const widths = () => page.$$eval("#bars .bytes:first-child .part", (parts) => Object.fromEntries(parts.map((part) => [part.classList[1], part.getBoundingClientRect().width])));
const row = (number) => page.$$eval(`#bytes tbody tr:nth-child(${number}) > *`, (cells) => cells.map((cell) => cell.textContent));

test("bars and numbers follow the layout", async () => {
  await open("#tab=memory&tp_size=1&sequence_parallel=false&pp_size=1&dp_size=1");
  // 18 bytes for each of 8,030,261,248 parameters, in GiB: 15.0 + 29.9 + 89.7 = 134.6 without activations.
  assert.deepEqual((await row(1)).slice(0, 5), ["pp 0", "Et×32L", "15", "29.9", "89.7"]);
  const parts = await widths();
  assert.ok(Math.abs(parts.gradients / parts.weights - 2) < 0.05 && Math.abs(parts.optimizer / parts.weights - 6) < 0.1);
  assert.match(await text("#bytes .figures .bad"), /exceeds 80 GiB/);
  await set(page, "dp_size", 8);
  await page.selectOption("#dp_engine", "zero3");
  await until("#bytes tbody", /^pp 0Et×32L1\.873\.7411\.2/);
  assert.equal((await figures(page, "bytes")).GPUs, "8");
  await page.selectOption("#activation_checkpointing", "full");
  await set(page, "pp_size", 4);
  assert.equal(await page.$$eval("#bars .bytes", (all) => all.length), 4);
});

test("a model's button sets its sizes", async () => {
  await open("#tab=memory");
  assert.equal(await page.getAttribute("text=llama-3.1-8b", "aria-pressed"), "true");
  await page.click("text=llama-3.1-70b");
  await until("#bytes .figures", /Parameters70\.6/);
  assert.equal(await page.inputValue("#num_hidden_layers"), "80");
  assert.match(page.url(), /hidden_size=8192/);
  await page.click("#bytes >> text=llama-3.1-8b");
  await until("#bytes .figures", /Parameters8\.03/);
});

test("what the trainer would refuse is marked at its control, and the last bars stay, paler", async () => {
  await open("#tab=memory");
  await set(page, "tp_size", 3);
  assert.equal(await text("#tp_size-fault"), "3 ranks cannot split the heads and the MLP; use one of [1, 2, 4, 8, 16, 32]");
  assert.equal(await page.getAttribute("#tp_size", "aria-invalid"), "true");
  assert.ok(await page.isVisible("#bytes .stale #bars"));
  await set(page, "tp_size", 4);
  assert.equal(await page.isVisible("#tp_size-fault"), false);
  assert.equal(await page.isVisible("#bytes .stale"), false);
});

test("the tabs keep their settings, and a link has both", async () => {
  await open("#b=");
  await set(page, "pp", 6);
  await page.click("text=Memory of a rank");
  await page.waitForSelector("#bars .bytes");
  await set(page, "pp_size", 4);
  assert.match(page.url(), /tab=memory/);
  assert.equal(await page.isVisible("#ranking"), false);
  await page.click("text=Pipeline schedules");
  assert.equal(await page.inputValue("#pp"), "6");
  assert.match(page.url(), /pp=6&pp_size=4/);
});

test("a schedule is ranked among the published ones", { timeout: 300_000 }, async () => {
  await open("#b=&micro_batches=4");
  await page.fill("#editor-text", "0F0,0F1,0F2,0F3,0B0,0B1,0B2,0B3\n1F0,1F1,1F2,1B0,1F3,1B1,1B2,1B3\n2F0,2F1,2B0,2F2,2B1,2F3,2B2,2B3\n3F0,3B0,3F1,3B1,3F2,3B2,3F3,3B3\n");
  await until("#editor-verdict", /^It runs: 4 ranks, 4 micro-batches/);
  page.setDefaultTimeout(240_000);
  await page.click("text=Rank the editor’s CSV");
  await until("#score [role=status]", /^12 of 12 settings, in \d+ s\.$/);
  const rows = await page.$$eval("#score tbody tr", (all) => all.map((each) => [...each.cells].map((cell) => cell.textContent)));
  // 1F1B with the memory of 4 micro-batches: (m + p - 1) (F + B) = 21; the bound is 13.5, which zb_h1 reaches.
  assert.deepEqual(rows[0].slice(0, 3), ["p = 4", "0", "equal"]);
  assert.match(rows[0][3], /^\d of \d+$/);
  assert.deepEqual(rows[0].slice(4), ["21", "13.5", "zb_h1 (v 2): 13.5"]);
  assert.match(rows[5][6], /^(v_min|search) \(v 2\): 1[67]\.\d+$/);
  assert.equal(rows.filter((each) => each[3] === "needs 4").length, 8);
  await set(page, "pp", 5);
  await page.click("text=Rank the schedule above");
  await until("#score [role=status]", /^no setting has pp=5 and micro_batches=4/);
});
