// A headless Chromium with the built website, for the tests and the pictures.

import { execFileSync } from "node:child_process";
import fs from "node:fs";
import http from "node:http";
import path from "node:path";
import { fileURLToPath } from "node:url";
import { chromium } from "playwright-core";

const SITE = fileURLToPath(new URL("../../site/", import.meta.url));
const TYPES = { ".html": "text/html", ".js": "text/javascript", ".mjs": "text/javascript", ".css": "text/css", ".wasm": "application/wasm", ".json": "application/json", ".svg": "image/svg+xml" };
const FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking", "--disable-component-update", "--disable-sync"];

// The path of a program.
function program(name) {
  return execFileSync("sh", ["-c", 'command -v "$1"', "sh", name], { encoding: "utf8" }).trim();
}

// browser.folder: the part of the site that is served, "" for all of it.
// browser.edit(file, text): replaces the text of some files, for a test; null leaves them as they are.
function serve(browser) {
  const server = http.createServer((request, response) => {
    const name = decodeURIComponent(new URL(request.url, "http://localhost").pathname).replace(/\/$/, "/index.html");
    const file = path.join(SITE, browser.folder, name);
    if (!file.startsWith(SITE) || !fs.existsSync(file)) return response.writeHead(404).end();
    response.writeHead(200, { "content-type": TYPES[path.extname(file)] ?? "application/octet-stream" });
    const edited = browser.edit && /\.(html|js)$/.test(file) && browser.edit(path.basename(file), fs.readFileSync(file, "utf8"));
    if (edited) response.end(edited);
    else fs.createReadStream(file).pipe(response);
  });
  return new Promise((resolve) => server.listen(0, "localhost", () => resolve(server)));
}

export class Browser {
  static async start() {
    const self = new Browser();
    self.folder = "playground";
    self.server = await serve(self);
    self.url = `http://localhost:${self.server.address().port}/`;
    self.chromium = await chromium.launch({ executablePath: program(process.env.CHROMIUM ?? "chromium"), args: FLAGS });
    return self;
  }

  // Open the page, and wait until it shows its first view. Errors of the page are collected in page.errors.
  // prepare: called with the empty page. ready: an element of the first view.
  async open(hash = "", { width = 1280, height = 900, scheme = "light", scale = 1, prepare = () => {}, ready = "html[data-ready]" } = {}) {
    const page = await this.chromium.newPage({ viewport: { width, height }, colorScheme: scheme, deviceScaleFactor: scale });
    page.errors = [];
    page.on("pageerror", (error) => page.errors.push(error.message));
    page.on("console", (message) => message.type() === "error" && page.errors.push(message.text()));
    page.on("requestfailed", (request) => page.errors.push(`${request.url()} failed`));
    page.setDefaultTimeout(60_000);
    await prepare(page);
    await page.goto(this.url + hash);
    await page.waitForSelector(ready);
    return page;
  }

  async stop() {
    await this.chromium.close();
    this.server.close();
  }
}

// The key figures that a panel shows, by their names.
export function figures(page, panel = "a") {
  return page.$$eval(`#${panel} .figures > div`, (each) =>
    Object.fromEntries(each.map((one) => [one.querySelector("dt").textContent, one.querySelector("dd").textContent.replace("\u202f", " ")])));
}

// The colour of a panel's timeline at a fraction of its time and in the middle of a rank's row, as [r, g, b].
export function colourAt(page, panel, rank, fraction, ranks = 4) {
  return page.$eval(`#${panel} canvas`, (canvas, [rank, fraction, ranks]) => {
    const ratio = canvas.width / canvas.clientWidth;
    const [row, each] = ranks > 12 ? [18, 40] : [24, 56];
    const x = 52 + (canvas.clientWidth - 62) * fraction;
    const y = rank * each + row * 0.2; // above the number
    return [...canvas.getContext("2d").getImageData(Math.round(x * ratio), Math.round(y * ratio), 1, 1).data].slice(0, 3);
  }, [rank, fraction, ranks]);
}

// Set a field as a reader would, and wait until the page has been drawn again.
export async function set(page, name, value) {
  const before = await page.getAttribute("html", "data-count");
  await page.fill(`#${name}`, String(value));
  await page.waitForFunction((count) => document.documentElement.dataset.count !== count, before);
}
