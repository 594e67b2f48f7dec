// How fast the page is: `node playground/tests/speed.mjs`, after `make playground-test`. Times are in milliseconds.

import { Browser } from "./browser.mjs";

const median = (values) => values.toSorted((a, b) => a - b)[Math.floor(values.length / 2)];
const browser = await Browser.start();

const first = await browser.open();
await first.waitForSelector("html[data-python]");
const { load, start, ready } = await first.evaluate(() => ({ ...document.documentElement.dataset }));
console.log(`The first picture was there after ${ready}; Pyodide loaded in ${load}, then picotron's Python in ${start}`);
const choices = await first.$$eval("#a-schedule option", (all) => all.map((each) => each.value));
const schedules = choices.filter((name) => !["auto", "csv", "python"].includes(name));
await first.close();

// Move a slider back and forth; each time, wait for the redraw.
async function redraws(page, name, values) {
  const times = [];
  for (const value of values) {
    const count = await page.getAttribute("html", "data-count");
    await page.fill(`#${name}`, String(value));
    await page.waitForFunction((before) => document.documentElement.dataset.count !== before, count);
    times.push(Number(await page.getAttribute("html", "data-redraw")));
  }
  return times;
}

console.log("16 ranks, 64 micro-batches; median and longest time from a slider's move to the picture:");
for (const schedule of schedules) {
  const page = await browser.open(`#a=${schedule}&b=&pp=16&micro_batches=64`);
  await page.waitForTimeout(8000); // the search for the ranking is over
  await redraws(page, "F", [1.1, 1.2, 1.3]);
  const times = await redraws(page, "F", [1.4, 1.5, 1.6, 1.7, 1.8, 1.9, 2, 2.1, 2.2]);
  await page.waitForTimeout(8000);
  const sizes = await redraws(page, "micro_batches", [63, 62, 61, 60, 59, 58, 57]);
  const show = (all) => `${median(all).toFixed(0)} (${Math.max(...all).toFixed(0)})`;
  console.log(`  ${schedule.padEnd(18)} another time of F ${show(times)}, another number of micro-batches ${show(sizes)}`);
  await page.close();
}
await browser.stop();
