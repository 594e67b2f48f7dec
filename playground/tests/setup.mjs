// What the tests share: one browser per file, a page per test, and no errors on it.

import assert from "node:assert/strict";
import { after, afterEach, before } from "node:test";
import { Browser } from "./browser.mjs";

export let browser;
export let page;

before(async () => (browser = await Browser.start()));
after(() => browser.stop());
afterEach(async () => {
  assert.deepEqual(page.errors, []);
  await page.close();
});

// Open the page of a test, see `Browser.open`.
export async function open(hash, options) {
  page = await browser.open(hash, options);
}

export const text = (selector) => page.textContent(selector);

// Wait until an element's text matches.
export const until = (selector, pattern) =>
  page.waitForFunction(([selector, source]) => new RegExp(source).test(document.querySelector(selector).textContent), [selector, pattern.source]);
