// The page on a phone, a tablet and a desk: contrast and names by axe, layout, keyboard, the sheet of settings.

import assert from "node:assert/strict";
import { createRequire } from "node:module";
import { test } from "node:test";
import { figures, set } from "./browser.mjs";
import { open, page, text } from "./setup.mjs";

const AXE = createRequire(import.meta.url).resolve("axe-core/axe.min.js");
const WIDTHS = { phone: [390, 844], tablet: [768, 1024], desk: [1280, 900] };
const LINKS = ["", "#b=&critical=1", "#pp=500&pp=x&factors=1+2&nonsense=1", "#tab=memory", "#tab=memory&tp_size=3"];

// Let axe check the rules of WCAG 2.2, levels A and AA, of which contrast is one; return what it finds.
async function violations() {
  await page.addScriptTag({ path: AXE });
  return page.evaluate(async () => {
    const tags = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"];
    const { violations } = await globalThis.axe.run(document, { runOnly: tags });
    return violations.flatMap(({ id, nodes }) => nodes.map(({ target, failureSummary }) => `${id}: ${target.join(" ")}: ${failureSummary}`));
  });
}

for (const [name, [width, height]] of Object.entries(WIDTHS)) {
  for (const scheme of ["light", "dark"]) {
    test(`axe finds nothing, and nothing scrolls sideways: ${name}, ${scheme}`, async () => {
      for (const hash of LINKS) {
        if (hash) await page?.close();
        await open(hash, { width, height, scheme });
        await page.evaluate(() => document.querySelectorAll("details").forEach((each) => (each.open = true)));
        assert.deepEqual(await violations(), [], hash);
        assert.ok((await page.evaluate(() => document.documentElement.scrollWidth)) <= width, hash);
        if (width <= 900) {
          await page.click("#sheet");
          assert.deepEqual(await violations(), [], `${hash} with the settings`);
        }
        assert.deepEqual(page.errors, []);
      }
    });
  }

  test(`the settings can be reached and used with the keyboard: ${name}`, async () => {
    await open("#b=", { width, height });
    const focus = () => page.evaluate(() => document.activeElement.id);
    const tabTo = async (id) => {
      for (let i = 0; i < 80 && (await focus()) !== id; i++) {
        await page.keyboard.press("Tab");
        const hidden = await page.evaluate(() => {
          const box = document.activeElement.getBoundingClientRect();
          const at = document.elementFromPoint(box.x + box.width / 2, box.y + box.height / 2);
          return at && !document.activeElement.contains(at) && !at.contains(document.activeElement) ? document.activeElement.outerHTML : "";
        });
        assert.equal(hidden, "", "what has the focus is not covered");
      }
      assert.equal(await focus(), id);
    };
    if (width <= 900) {
      await tabTo("sheet");
      await page.keyboard.press("Enter");
    }
    await tabTo("pp-range");
    await page.keyboard.press("ArrowRight");
    await page.waitForFunction(() => document.querySelector("#a .figures dd").textContent === "36"); // (m + p - 1) (F + B)
    assert.equal(await page.inputValue("#pp"), "5");
    if (width > 900) return;
    await page.keyboard.press("Escape");
    assert.equal(await focus(), "sheet");
    assert.equal(await page.isVisible("#controls"), false);
  });
}

test("on a phone, the picture stays in sight while a setting changes", async () => {
  const inSight = (selector) => page.$eval(selector, (picture) => {
    const { top, bottom } = picture.getBoundingClientRect();
    return top >= 0 && bottom <= document.getElementById("controls").getBoundingClientRect().top;
  });
  await open("#b=", { width: 390, height: 844 });
  await page.click("#sheet");
  for (const ranks of [4, 8, 16]) {
    await set(page, "pp", ranks);
    await page.locator("#last-range").scrollIntoViewIfNeeded();
    const before = (await figures(page))["Step time"];
    await set(page, "last", ranks / 16);
    assert.notEqual((await figures(page))["Step time"], before);
    assert.ok(await inSight("#a canvas"), `${ranks} ranks`);
    assert.ok(await inSight("#a .figures"), `${ranks} ranks`);
  }
  await page.close();
  await open("#tab=memory", { width: 390, height: 844 });
  await page.click("#sheet");
  await set(page, "pp_size", 4);
  assert.ok(await inSight("#bars"));
});

test("on a phone, the settings are explained by touch", async () => {
  await open("", { width: 390, height: 844 });
  await page.click("#sheet");
  await page.click("#controls summary >> nth=1");
  assert.match(await text("#controls details[open]"), /TransferThe time|Transfertime in which a message occupies the link/);
  assert.ok(await page.isVisible("#controls details[open] dl"));
  const untold = await page.$$eval("#controls .setting label", (labels) => labels.filter((label) =>
    ![...document.querySelectorAll("#controls dt")].some((term) => term.textContent === label.textContent)).map((label) => label.textContent));
  assert.deepEqual(untold, []);
});
