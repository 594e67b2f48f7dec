// The tabs, and the page's links that set controls: the one whose settings are in use says what to look at.

import { el } from "./dom.js";

const sorted = (link) => [...new URLSearchParams(link.slice(1))].sort().join();

export function markQuestions(state) {
  const notice = el("p", { className: "fault", role: "alert", hidden: true });
  document.querySelector("header").append(notice);
  const tabs = [...document.querySelectorAll("nav button")];
  for (const tab of tabs) tab.onclick = () => state.set({ tab: tab.dataset.tab });
  const mark = () => {
    for (const link of document.querySelectorAll(".questions a")) link.setAttribute("aria-current", String(sorted(link.hash) === sorted(state.link)));
    for (const tab of tabs) tab.setAttribute("aria-pressed", String(tab.dataset.tab === state.values.tab));
    notice.hidden = !state.unknown.length;
    notice.textContent = `The link has settings that this page does not know: ${state.unknown.join(", ")}`;
  };
  mark();
  return mark;
}
