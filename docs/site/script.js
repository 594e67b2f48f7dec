// The menu of small screens, copy buttons, and the search. Pages can be read without any of it.

const { root } = document.documentElement.dataset;
if (location.protocol !== "file:") navigator.serviceWorker?.register(`${root}/offline.js`, { updateViaCache: "none" });
// The playground was once the first page, and its settings are in links that people have kept.
if (document.body.className === "landing" && location.hash.includes("=")) location.replace(`playground/${location.hash}`);

const menu = document.querySelector("#menu");
menu.addEventListener("click", () => menu.setAttribute("aria-expanded", document.body.classList.toggle("menu")));
const pages = document.querySelector("nav"), current = pages?.querySelector("[aria-current]");
if (current) pages.scrollTop = current.offsetTop - pages.clientHeight / 2; // `scrollIntoView` moves the page, too

for (const block of document.querySelectorAll(".block:not(.text)")) {
  const button = Object.assign(document.createElement("button"), { className: "copy", textContent: "Copy" });
  button.addEventListener("click", async () => {
    await navigator.clipboard.writeText((block.querySelector(".command") ?? block.querySelector("code")).textContent);
    button.textContent = "Copied";
    setTimeout(() => (button.textContent = "Copy"), 1500);
  });
  block.prepend(button);
}

// A picture is a link to its file, where a reader with a small screen can enlarge it.
for (const image of document.querySelectorAll("main img")) {
  const link = Object.assign(document.createElement("a"), { className: "picture", href: image.src });
  image.replaceWith(link);
  link.append(image);
}

const input = document.querySelector("search input");
const list = document.querySelector("search ol");
let loading; // SECTIONS of search.js: [page, heading, address, text] of each section

function load() {
  loading ??= new Promise((resolve) => {
    document.head.append(Object.assign(document.createElement("script"), { src: `${root}/search.js`, onload: () => resolve(SECTIONS) }));
  });
  return loading;
}

// Sections with all words, best first. Headings count more than text.
function find(sections, words) {
  const score = ([page, heading, , text], word) =>
    8 * heading.toLowerCase().includes(word) + 4 * page.toLowerCase().includes(word) + Math.min(3, text.toLowerCase().split(word).length - 1);
  return sections
    .map((section) => [words.map((word) => score(section, word)), section])
    .filter(([scores]) => scores.every(Boolean))
    .sort(([a], [b]) => Math.min(...b) - Math.min(...a))
    .slice(0, 12)
    .map(([, section]) => section);
}

function result([page, heading, address, text], word) {
  const item = document.createElement("li");
  const link = Object.assign(document.createElement("a"), { href: `${root}/${address}`, textContent: heading === page ? page : `${page}: ${heading}` });
  const start = Math.max(0, text.toLowerCase().indexOf(word) - 40);
  link.append(Object.assign(document.createElement("small"), { textContent: (start ? "…" : "") + text.slice(start, start + 130) }));
  item.append(link);
  return item;
}

async function show() {
  const words = input.value.toLowerCase().split(/\s+/).filter(Boolean);
  list.hidden = !words.length;
  if (list.hidden) return;
  const found = find(await load(), words).map((section) => result(section, words[0]));
  list.replaceChildren(...(found.length ? found : [Object.assign(document.createElement("li"), { textContent: "Nothing found." })]));
}

input.addEventListener("focus", load);
input.addEventListener("input", show);
document.addEventListener("click", (event) => (list.hidden = !event.target.closest("search") || !input.value));
document.addEventListener("keydown", (event) => {
  if (event.key === "/" && event.target.tagName !== "INPUT") {
    event.preventDefault();
    input.focus();
  }
  if (event.key === "Escape") list.hidden = true;
  const places = [input, ...list.querySelectorAll("a")];
  const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
  if (!step || list.hidden || !places.includes(event.target)) return;
  event.preventDefault();
  places[places.indexOf(event.target) + step]?.focus();
});
