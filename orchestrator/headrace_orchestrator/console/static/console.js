// Follows the service. Each section of the page has an id; only those that changed are replaced, so that focus and
// selection stay.
"use strict";

const RETRY_MS = 3000;
const main = document.getElementById("main");
const live = document.getElementById("live");

function show(content) {
  const next = new DOMParser().parseFromString(content, "text/html").body;
  const ids = (root) => [...root.children].map((part) => part.id).join();
  if (ids(next) !== ids(main)) { main.innerHTML = next.innerHTML; return; }
  for (const part of next.children) {
    const old = document.getElementById(part.id);
    if (old.innerHTML === part.innerHTML) continue;
    const open = old.querySelector("details")?.open;
    old.innerHTML = part.innerHTML;
    if (open) old.querySelector("details").open = true;
  }
}

// A browser gives up a stream whose response is not 200: the service starts, or the session ended.
async function retry() {
  const response = await fetch("./", { method: "HEAD" }).catch(() => null);
  if (response?.status === 401) { location.reload(); return; }
  setTimeout(follow, RETRY_MS);
}

function follow() {
  const stream = new EventSource("events");
  stream.onopen = () => { live.textContent = "This page follows the service."; };
  stream.onmessage = (event) => show(event.data);
  stream.onerror = () => {
    live.textContent = "The service does not answer; trying again.";
    if (stream.readyState === EventSource.CLOSED) retry();
  };
}

follow();
