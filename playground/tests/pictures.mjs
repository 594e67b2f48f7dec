// The pictures of docs/playground.md.

import { fileURLToPath } from "node:url";
import { Browser } from "./browser.mjs";

const FOLDER = fileURLToPath(new URL("../../docs/pictures/", import.meta.url));
const DEADLOCK = "0F0,0F1,0B0,0F2,0B1,0B2\n1F0,1B0,1F1,1F2,1B1,1B2\n2F0,2F1,2B1,2B0,2F2,2B2\n";
const SEVENTY = { hidden_size: 8192, intermediate_size: 28672, num_hidden_layers: 80, num_attention_heads: 64, tp_size: 8, pp_size: 4, pp_engine: "interleaved_1f1b", dp_size: 32, gradient_accumulation_steps: 32 };
const link = (state) => `#${new URLSearchParams(state)}`;
const ranked = (page) => page.waitForFunction(() => document.querySelectorAll("#ranking tbody tr").length === 9);

// The name of a picture, the state of the page, how it is opened, and what is done before the picture is taken.
const PICTURES = [
  ["playground", { critical: 1 }, { width: 1240, height: 760 }],
  ["playground_memory", { tab: "memory", ...SEVENTY }, { width: 1200, height: 620, scheme: "dark" }],
  ["playground_deadlock", { a: "csv", b: "", csv: DEADLOCK }, { width: 960, height: 400 }, (page) => page.$("#a")],
  ["playground_ranking", { memory: 4, message: 0.1 }, { width: 1280, height: 800 }, async (page) => (await ranked(page), page.$("#ranking"))],
  ["playground_phone", { b: "", last: 1 }, { width: 390, height: 844 }, async (page) => (await page.click("#sheet"), await page.waitForTimeout(1000), page)], // it scrolls
];

const browser = await Browser.start();
for (const [name, state, options, prepare] of PICTURES) {
  const page = await browser.open(link(state), options);
  await page.waitForSelector("#status", { state: "hidden" }); // Python runs
  const subject = prepare ? await prepare(page) : page;
  await subject.screenshot({ path: `${FOLDER}${name}.png` });
  if (page.errors.length) throw new Error(page.errors.join("\n"));
  await page.close();
}
await browser.stop();
