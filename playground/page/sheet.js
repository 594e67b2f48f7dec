// On a narrow screen, the settings are a sheet at its lower edge, so that the picture stays in sight above them.

export function buildSheet(view) {
  const button = document.getElementById("sheet");
  const controls = document.getElementById("controls");
  const toggle = (open) => {
    button.setAttribute("aria-expanded", String(open));
    button.textContent = open ? "Close the settings" : "Settings";
    document.body.classList.toggle("sheet", open);
    fit();
    if (open) picture()?.scrollIntoView({ block: "start" });
  };
  const isOpen = () => document.body.classList.contains("sheet") && getComputedStyle(button).display !== "none";
  const picture = () => [...document.querySelectorAll("#a .figures, #bytes .figures")].find((each) => each.offsetParent);
  const fit = () => {
    const above = innerHeight - controls.offsetHeight - button.offsetHeight;
    view.fit(isOpen() ? above - (picture()?.offsetHeight ?? 0) - 24 : Infinity);
  };
  button.onclick = () => toggle(!isOpen());
  addEventListener("resize", fit);
  controls.addEventListener("keydown", (event) => {
    if (event.key !== "Escape" || !isOpen()) return;
    toggle(false);
    button.focus();
  });
}
