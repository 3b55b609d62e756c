// What changes while serving: load, latencies, cache, drafts, memory, links, start-up, alarms.

import { bar, chart } from "./charts.js";
import { bytes, count, el, list, put, quiet, rate, say, seconds, share, table, UNKNOWN, byId } from "./dom.js";

function tile(name, value, more = "") {
  return el("div", { class: "tile" }, el("div", { class: "name" }, name),
    el("div", { class: "value" }, value), el("div", { class: "more" }, more));
}

function load(now, samples) {
  const last = samples.at(-1);
  const first = now.latency.first_token;
  put("tiles",
    tile("Running", count(now.running), `at most ${count(now.max_running)}`),
    tile("Waiting", count(now.waiting), `${count(now.pending)} of ${count(now.max_pending)} places taken`),
    tile("Tokens/s written", last ? rate(last.generated_tok_s) : "none yet", `${count(now.generated_tokens)} in all`),
    tile("Tokens/s read", last ? rate(last.prompt_tok_s) : "none yet", `${count(now.prompt_tokens)} in all, not from the cache`),
    tile("First token, median", first.count ? seconds(first.p50_s) : "none yet", "last 5 minutes"),
    tile("Cache in use", share(now.cache.used), `of ${count(now.cache.tokens)} tokens`),
    tile("Preemptions", count(now.preemptions), `${count(now.admission_rejections)} refused at the door`),
    tile("Longest gap", now.longest_decode_gap_s ? seconds(now.longest_decode_gap_s) : "none", "between two tokens, last minute"));
  const gap = 3.5 * now.sample_s;
  const draw = (title, curves, show, most) => chart(title, samples, now.now, gap, curves, show, most);
  put("charts",
    draw("Tokens/s written", [{ name: "", read: (s) => s.generated_tok_s }], rate),
    draw("Tokens/s read", [{ name: "", read: (s) => s.prompt_tok_s }], rate),
    draw("Sequences", [{ name: "running", read: (s) => s.running }, { name: "waiting", read: (s) => s.waiting }], count),
    draw("Cache in use", [{ name: "", read: (s) => s.kv_used }], (v) => `${(100 * v).toFixed(0)} %`, 1));
}

function latency(found) {
  const row = (name, p) => [name, ...[p.p50_s, p.p95_s, p.p99_s].map((v) => (p.count ? seconds(v) : "none yet")), count(p.count)];
  put("latency-body", table(`The last ${found.window_s / 60} minutes.`,
    ["Time", "p50#", "p95#", "p99#", "Seen#"],
    [row("To the first token", found.first_token), row("Between tokens", found.inter_token),
      row("In the queue", found.queue)]));
}

const facts = (pairs) =>
  el("dl", { class: "facts" }, ...pairs.flatMap(([name, text]) => [el("dt", {}, name), el("dd", {}, text)]));

function reuse(cache, drafts, requests) {
  const hit = cache.query_tokens ? `${share(cache.hit_rate)}: ${count(cache.hit_tokens)} of ${count(cache.query_tokens)} prompt tokens` : "nothing looked up yet";
  const kind = drafts.method === null ? UNKNOWN : drafts.method === "off" ? "off" : `${drafts.method}, up to ${drafts.depth} tokens`;
  const taken = drafts.drafted ? `${share(drafts.acceptance)}: ${count(drafts.accepted)} of ${count(drafts.drafted)}` : "none verified";
  const ended = Object.entries(requests).map(([name, n]) => `${count(n)} ${name}`).join(", ");
  put("reuse-body", facts([["Prefix cache hits", hit], ["Drafts", kind], ["Drafts accepted", taken], ["Requests", ended]]));
}

function memory(pools) {
  if (!pools.length) return put("memory-body", quiet("Known when the engine is ready."));
  const more = (pool) =>
    pool.planned_bytes === null || pool.held_bytes === null ? UNKNOWN : bytes(pool.held_bytes - pool.planned_bytes);
  return put("memory-body", table("Estimated by the plan's ledger, and counted after the start.",
    ["Pool", "Estimated#", "Held#", "Difference#"],
    pools.map((pool) => [pool.pool, bytes(pool.planned_bytes), bytes(pool.held_bytes), more(pool)])));
}

function links(found) {
  if (found === null) return put("links-body", quiet("Known when the engine is ready."));
  if (!found.length) return put("links-body", quiet("None: no link lies between this device and its memory."));
  const lanes = (link) => link.width === null && link.max_width === null
    ? UNKNOWN : `x${link.width ?? "?"} of x${link.max_width ?? "?"}`;
  const generation = (link) => link.generation === null && link.max_generation === null
    ? UNKNOWN : `${link.generation ?? "?"} of ${link.max_generation ?? "?"}`;
  const peer = (value) => (value === null ? UNKNOWN : value ? "yes" : "no");
  const speed = (link) => (link.bytes_s === null ? UNKNOWN : `${(link.bytes_s / 1e9).toFixed(1)} GB/s`);
  return put("links-body", quiet("As read at the start; traffic is not measured yet."),
    table("Between devices, and between a device and the host.",
      ["From", "To", "Kind", "Lanes", "Generation", "Rate#", "Peer reads", "Peer writes"],
      found.map((link) => [link.source, link.target, link.kind ?? UNKNOWN, lanes(link), generation(link),
        speed(link), peer(link.peer_read), peer(link.peer_write)])));
}

function start(phases, phase, ready) {
  if (!phases.length) return put("start-body", quiet(`Now: ${phase}.`));
  const total = phases.reduce((sum, each) => sum + each.seconds, 0);
  const told = ready ? `Ready after ${total.toFixed(1)} s.` : `${total.toFixed(1)} s so far; now: ${phase}.`;
  return put("start-body", table(told, ["Phase", "Seconds#", "Share"],
    phases.map((each) => [each.name, each.seconds.toFixed(2), bar(each.seconds / total)]), "phases"));
}

function alarms(found) {
  if (!found.length) return put("alarms");
  const items = list(found.map((alarm) => alarm.text));
  items.className = "alarms";
  return put("alarms", items);
}

export function show(now, samples) {
  say("model", now.models[0]);
  document.title = `${now.models[0]} · Meta-Infer`;
  state(now.status);
  const also = now.models.length > 1 ? `also as ${now.models.slice(1).join(", ")}; ` : "";
  const limits = now.max_context === null ? now.phase : `context ${count(now.max_context)} tokens`;
  say("about", `${also}${limits}; up ${seconds(now.now - now.started)}; plan ${now.plan_fingerprint ?? "not decided yet"}`);
  say("version", `metainfer ${now.version}.`);
  alarms(now.alarms);
  load(now, samples);
  latency(now.latency);
  reuse(now.cache, now.drafts, now.requests);
  memory(now.memory);
  links(now.links);
  start(now.start_phases, now.phase, now.plan_fingerprint !== null);
}

export function state(word) {
  say("state", word.replace("_", " "));
  byId("state").className = `state ${word}`;
}
