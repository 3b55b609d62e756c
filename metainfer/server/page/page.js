// Asks the server every two seconds, and shows what it says.

import { ask, key, useKey } from "./api.js";
import * as chat from "./chat.js";
import { SPAN_S } from "./charts.js";
import { byId, put, say } from "./dom.js";
import * as now from "./now.js";
import * as plan from "./plan.js";

const EVERY_MS = 2000;
let samples = [];
let shownPlan = null;
let timer = null;
let asking = false;

function askForKey(fault) {
  byId("key-form").hidden = false;
  say("key-fault", fault);
  now.state("locked");
}

async function refresh() {
  const since = samples.at(-1)?.t ?? 0;
  const status = await (await ask(`page/status?since=${since}`)).json();
  samples = [...samples, ...status.history].filter((s) => s.t > status.now - SPAN_S);
  now.show(status, samples);
  chat.serve(status.models[0]);
  byId("key-form").hidden = true;
  byId("forget").hidden = !key();
  if (status.plan_fingerprint && status.plan_fingerprint !== shownPlan) {
    plan.show(await (await ask("plan")).json());
    shownPlan = status.plan_fingerprint;
  }
}

async function turn() {
  if (asking) return null;
  clearTimeout(timer);
  asking = true;
  try {
    await refresh();
  } catch (error) {
    if (error.status === 401) return askForKey(key() ? "The server does not know this key." : "");
    now.state("unreachable");
    say("about", error.status ? error.message : "The server does not answer; asking again.");
    put("alarms");
  } finally {
    asking = false;
  }
  if (!document.hidden) timer = setTimeout(turn, EVERY_MS);
  return null;
}

byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  useKey(byId("key").value);
  byId("key").value = "";
  turn();
});
byId("forget").addEventListener("click", () => { useKey(""); window.location.reload(); });
document.addEventListener("visibilitychange", () => { if (!document.hidden) turn(); });
chat.start();
turn();
