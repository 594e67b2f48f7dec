// The website around the playground: search, copies, small screens, and visits without a network.

import assert from "node:assert/strict";
import { test } from "node:test";
import { browser, open, page, text } from "./setup.mjs";

function visit(address, options = {}) {
  browser.folder = "";
  return open(address, { ready: "main", ...options });
}

test("the search finds a section, and a link opens the playground with the schedule of a page", async () => {
  await visit("docs/first_hour.html");
  await page.keyboard.press("/");
  await page.keyboard.type("all-reduce ring");
  await page.waitForSelector("search li a:has-text('Collectives')");
  await page.keyboard.press("ArrowDown");
  await page.keyboard.press("Enter");
  await page.waitForURL(/docs\/.*#/);
  await page.goto(`${browser.url}docs/first_hour.html`);
  await page.click("main a[href*='playground/#']");
  await page.waitForSelector("html[data-ready]");
  assert.equal(await page.inputValue("#pp"), "3");
  assert.match(await text("#a .figures"), /Step time18/);
});

test("the button copies the command without its output", async () => {
  await visit("steps/index.html");
  await page.context().grantPermissions(["clipboard-read", "clipboard-write"]);
  await page.click(".block:has-text('python -m steps s2_tp') .copy");
  assert.equal(await page.evaluate(() => navigator.clipboard.readText()), "python -m steps s2_tp parallelize");
});

test("no page is wider than a phone, and its menu leads to the pages", async () => {
  await visit("index.html", { width: 390, height: 844 });
  const addresses = await page.$$eval("nav a", (all) => all.map((each) => each.href));
  for (const address of addresses) {
    await page.goto(address);
    const found = await page.evaluate(() => {
      const scrolls = (each) => each && (each.scrollWidth > each.clientWidth && getComputedStyle(each).overflowX === "auto" || scrolls(each.parentElement));
      const wide = [...document.querySelectorAll("img, table, pre")].filter((each) => each.getBoundingClientRect().right > innerWidth);
      return [document.documentElement.scrollWidth, wide.filter((each) => !scrolls(each)).length];
    });
    assert.deepEqual(found, [390, 0], address); // as wide as the screen, and nothing beyond the edge that cannot be reached
  }
  page.errors = page.errors.filter((each) => !each.endsWith(".svg failed")); // pictures that were still loading
  await page.click("#menu");
  await page.click("nav a:has-text('Collectives')");
  assert.equal(await text("h1"), "Collectives");
});

test("the first page is no wider than a window, and all code fits on paper", async () => {
  await visit("index.html");
  for (const width of [1280, 1024, 900]) {
    await page.setViewportSize({ width, height: 900 });
    assert.equal(await page.evaluate(() => document.documentElement.scrollWidth), width);
  }
  await page.emulateMedia({ media: "print" });
  await page.setViewportSize({ width: 718, height: 1000 }); // A4
  for (const address of ["index.html", "steps/index.html", "docs/pipeline_schedules.html"]) {
    await page.goto(browser.url + address);
    const cut = await page.$$eval("pre", (all) => all.filter((each) => each.scrollWidth > each.clientWidth || each.scrollHeight > each.clientHeight).length);
    assert.equal(cut, 0, address);
  }
});

test("a page opens at its top, and the list of pages at its place", async () => {
  await visit("docs/code.html", { width: 1440 });
  assert.deepEqual(await page.evaluate(() => [scrollY, document.querySelector("nav").scrollTop > 0]), [0, true]);
});

test("after the first visit, all pages work without a network", async () => {
  await visit("");
  await page.evaluate(() => navigator.serviceWorker.ready);
  await page.waitForFunction(async () => (await caches.keys()).some((name) => name.startsWith("picotron ")));
  await page.reload();
  await page.context().setOffline(true);
  page.errors.length = 0;
  await page.goto(`${browser.url}docs/zero.html`);
  await page.waitForFunction(() => [...document.images].every((image) => image.loading === "lazy" || image.naturalWidth));
  await page.click("[rel=next]");
  await page.fill("search input", "bubble");
  await page.waitForSelector("search li a");
  page.errors = page.errors.filter((each) => !each.includes("ERR_INTERNET_DISCONNECTED"));
});

test("a visitor of the playground that was once the first page gets the site, and its settings stay", async () => {
  browser.folder = "playground";
  await open("#a=zbv&b=");
  await page.waitForSelector("html[data-python]");
  await page.evaluate(() => navigator.serviceWorker.ready);
  browser.folder = "";
  await page.reload();
  assert.equal(page.url(), `${browser.url}#a=zbv&b=`);
  assert.equal(await text("h1"), "Playground", "the earlier worker answers");
  await page.waitForURL(`${browser.url}playground/#a=zbv&b=`);
  await page.waitForSelector("html[data-python]");
  await page.goto(browser.url);
  assert.equal(await page.title(), "4D parallelism, written to be read · picotron");
  const kept = await page.evaluate(() => caches.keys());
  assert.deepEqual(kept.map((name) => name.split(" ")[0]).sort(), ["picotron", "playground"]);
  page.errors = page.errors.filter((each) => !each.endsWith(" failed")); // requests that the change of pages ended
});
