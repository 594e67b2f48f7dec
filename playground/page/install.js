// Keep the page for visits without a network, see offline.js.

export async function install() {
  if (!navigator.serviceWorker) return; // on a page without https
  const kept = await navigator.serviceWorker.register("offline.js", { updateViaCache: "none" });
  if (!kept.waiting || !navigator.serviceWorker.controller) return;
  navigator.serviceWorker.addEventListener("controllerchange", () => location.reload(), { once: true });
  kept.waiting.postMessage("switch"); // a newer build, installed during the last visit
}
