// Service worker: after the first visit, the page works without a network. Each build has a cache of its own, so that
// files of two builds never meet: a newer build is installed in the background, and the next visit switches to it.

const CACHE = "playground {{version}}";
const FILES = ["{{files}}"]; // playground/build.py writes both

self.addEventListener("install", (event) => {
  event.waitUntil(caches.open(CACHE).then((cache) => cache.addAll(FILES)));
});

self.addEventListener("activate", (event) => {
  const remove = async () => {
    const old = (await caches.keys()).filter((name) => name.startsWith("playground ") && name !== CACHE);
    await Promise.all(old.map((name) => caches.delete(name)));
  };
  event.waitUntil(remove());
});

self.addEventListener("message", ({ data }) => data === "switch" && self.skipWaiting());

self.addEventListener("fetch", (event) => {
  const answer = async () => {
    const cache = await caches.open(CACHE);
    return (await cache.match(event.request, { ignoreSearch: event.request.mode === "navigate" })) ?? fetch(event.request);
  };
  event.respondWith(answer());
});
