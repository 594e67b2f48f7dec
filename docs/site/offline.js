// Service worker: after the first visit, the pages work without a network. With one, they come from it, so that a reader
// sees the newest build. The playground in its own folder has its own worker.

const CACHE = "picotron {{version}}";
const FILES = ["{{files}}"]; // docs/site/build.py writes both

self.addEventListener("install", (event) => {
  self.skipWaiting();
  const requests = FILES.map((name) => new Request(name, { cache: "no-cache" }));
  event.waitUntil(caches.open(CACHE).then((cache) => cache.addAll(requests)));
});

self.addEventListener("activate", (event) => event.waitUntil(replace()));

// Delete earlier caches of this folder. The playground was once its first page, and its worker, which had this name, would
// show it forever: replace it in open windows, too.
async function replace() {
  for (const name of await caches.keys()) {
    if (name === CACHE || !(await (await caches.open(name)).match("./"))) continue;
    await caches.delete(name);
    if (!name.startsWith("playground ")) continue;
    await self.clients.claim();
    for (const client of await self.clients.matchAll({ type: "window" })) client.navigate(client.url);
  }
}

self.addEventListener("fetch", (event) => {
  const kept = async () => (await caches.match(event.request, { ignoreSearch: true })) ?? Response.error();
  if (event.request.method === "GET") event.respondWith(fetch(event.request).catch(kept));
});
