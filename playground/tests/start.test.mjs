// What the page does before Python runs, without a network, with links, and with values that it refuses.

import assert from "node:assert/strict";
import { test } from "node:test";
import { colourAt, figures, set } from "./browser.mjs";
import { browser, open, page, text, until } from "./setup.mjs";

// Answer no request for Python.
const withoutPython = (page) => page.route("**/pyodide/**", () => {});
const BACKWARD = [0xe6, 0x9f, 0x00];

test("the first view is there before Python is", async () => {
  await open("", { prepare: withoutPython });
  assert.deepEqual(await figures(page), { "Step time": "33", Bubble: "27.3 %", "Peak activations": "4" });
  assert.equal((await figures(page, "b"))["Step time"], "25.5");
  assert.deepEqual(await colourAt(page, "a", 0, 32 / 33), BACKWARD);
  assert.match(await text("#status"), /^Python is loading/);
  await page.click("text=Memory of a rank");
  assert.equal((await figures(page, "bytes"))["Most on a GPU"], "32.8 GiB");
});

test("the questions are links with settings, and answered at once", async () => {
  await open("", { prepare: withoutPython });
  const answers = { "Why is a rank idle?": "33", "What does a slower last stage cost?": "57", "Which schedule is fastest": /\d/ };
  for (const [question, answer] of Object.entries(answers)) {
    await page.click(`text=${question}`);
    await page.waitForSelector(`.questions a[aria-current=true]:has-text("${question}")`);
    assert.match((await figures(page))["Step time"], new RegExp(answer));
    assert.ok(await page.isVisible(`li:has-text("${question}") span`));
    assert.equal(await page.isVisible("#a .error"), false);
  }
  assert.ok(parseFloat((await figures(page))["Peak activations"]) <= 2);
  await page.click("text=Memory of a rank");
  await page.click("text=Does an 8B model fit");
  assert.match(await text("#bytes .figures .bad"), /exceeds 80 GiB/);
  await page.click("text=Does ZeRO-3 make it fit?");
  await until("#bytes .figures", /of 80 GiB/);
});

test("Python says the same as the page's data", async () => {
  await open();
  const first = await figures(page);
  await set(page, "F", 2);
  assert.notDeepEqual(await figures(page), first);
  await set(page, "F", 1);
  assert.deepEqual(await figures(page), first);
});

test("a number out of range is refused at its field, and nothing else changes", async () => {
  await open("#b=");
  for (const [name, typed, said] of [
    ["pp", "500", "500 is not between 1 and 32; 4 is still in use"],
    ["pp", "0", "0 is not between 1 and 32; 4 is still in use"],
    ["pp", "", "enter a number from 1 to 32; 4 is still in use"],
    ["micro_batches", "2.5", "2.5 is not a whole number; 8 is still in use"],
    ["B", "-1", "-1 is not between 0.1 and 8; 2 is still in use"],
  ]) {
    await page.fill(`#${name}`, typed);
    assert.equal(await text(`#${name}-fault`), said);
    assert.equal(await page.getAttribute(`#${name}`, "aria-invalid"), "true");
    assert.equal(await page.getAttribute(`#${name}`, "aria-describedby"), `${name}-fault`);
    await page.focus("#critical");
    assert.equal(await page.inputValue(`#${name}`), typed, "the reader's text stays");
    assert.equal((await figures(page))["Step time"], "33");
  }
  await page.fill("#chunks", ""); // its default
  assert.equal(await page.isVisible("#chunks-fault"), false);
  await page.fill("#pp", "8");
  assert.equal(await page.isVisible("#pp-fault"), false);
  await until("#a .figures", /Step time45/);
  await page.click("text=Reset all");
  assert.deepEqual(await page.$$eval(".fault", (all) => all.filter((each) => !each.hidden).map((each) => each.textContent)), []);
});

test("a step back in the browser shows the earlier settings again", async () => {
  await open("#b=");
  await page.waitForSelector("html[data-python]");
  await set(page, "pp", 8);
  await page.click("text=Why is a rank idle?");
  await until("#a .figures", /Step time33/);
  await page.goBack();
  await until("#a .figures", /Step time45/);
  assert.equal(await page.inputValue("#pp"), "8");
});

test("a reset removes refused texts, also if no setting has changed", async () => {
  for (const [tab, name, value] of [["schedules", "pp", "4"], ["memory", "tp_size", "2"]]) {
    if (tab === "memory") await page.close();
    await open(`#tab=${tab}`, { prepare: withoutPython });
    await page.fill(`#${name}`, "5000");
    await page.click("text=Reset all");
    assert.deepEqual([await page.isVisible(`#${name}-fault`), await page.inputValue(`#${name}`)], [false, value]);
  }
});

test("a link's wrong values are refused at their fields", async () => {
  await open("#b=&pp=500&micro_batches=many&message=0.5&colour=red");
  assert.match(await text("#pp-fault"), /^500 is not between 1 and 32; 4 is still in use$/);
  assert.match(await text("#micro_batches-fault"), /^enter a number from 1 to 128; 8 is still in use$/);
  assert.equal(await page.inputValue("#message"), "0.5");
  assert.match(await text("header [role=alert]"), /does not know: colour=red$/);
  await page.evaluate(() => (location.hash = "#tab=memory&dp_engine=zero2&sequence_parallel=maybe"));
  await page.waitForSelector("#bars .bytes");
  assert.match(await text("#dp_engine-fault"), /^zero2 is none of bucket, zero1, zero3; zero1 is still in use$/);
  assert.match(await text("#sequence_parallel-fault"), /^maybe is neither true nor false/);
});

test("a schedule that does not exist or cannot be built marks its menu", async () => {
  await open("#b=");
  await page.click("#a summary");
  await page.evaluate(() => (location.hash = "#b=&a=zb_h7"));
  await until("#a .error", /zb_h7/);
  assert.equal(await page.isVisible("#a table"), false, "the numbers of the ranks are those of another schedule");
  assert.equal(await page.getAttribute("#a-schedule", "aria-invalid"), "true");
  await page.selectOption("#a-schedule", "1f1b");
  await until("#a .figures", /Step time33/);
  assert.equal(await page.getAttribute("#a-schedule", "aria-invalid"), "false");
  assert.ok(await page.isVisible("#a table"));
});

test("after the first visit, the page works without a network", async () => {
  await open("#b=");
  await page.evaluate(() => navigator.serviceWorker.ready);
  const [name] = await page.evaluate(() => caches.keys());
  const version = (await (await fetch(`${browser.url}offline.js`)).text()).match(/"(playground \w{16})"/)[1];
  assert.equal(name, version);
  await page.context().setOffline(true);
  await page.reload();
  await page.waitForSelector("html[data-ready]");
  await set(page, "pp", 7);
  assert.equal((await figures(page))["Step time"], "42");
  await page.waitForFunction(() => document.querySelectorAll("#ranking tbody tr").length === 9);
});

test("a newer build replaces the kept one at the next visit, as a whole", async () => {
  await open("#b=");
  await page.evaluate(() => navigator.serviceWorker.ready);
  browser.edit = (file, text) => {
    if (file === "offline.js") return text.replace(/"playground \w{16}"/, '"playground 0123456789abcdef"');
    return file === "index.html" ? text.replace("<h1>Playground</h1>", "<h1>Newer playground</h1>") : text;
  };
  await page.reload(); // finds the newer build, and installs it in the background
  await page.evaluate(async () => {
    const kept = await navigator.serviceWorker.getRegistration();
    await kept.update();
    while (!kept.waiting) await new Promise((resolve) => setTimeout(resolve, 50));
  });
  assert.equal(await text("h1"), "Playground");
  await page.reload();
  await page.waitForFunction(() => document.querySelector("h1")?.textContent === "Newer playground");
  await page.waitForSelector("html[data-python]");
  assert.deepEqual(await page.evaluate(() => caches.keys()), ["playground 0123456789abcdef"]);
  browser.edit = null;
});
