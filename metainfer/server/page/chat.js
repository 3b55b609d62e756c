// The chat box: streams an answer, reasoning apart, and can be stopped.

import { ask } from "./api.js";
import { byId, el, rate, say, seconds } from "./dom.js";
import { EventReader } from "./events.js";

const turns = [];
let running = null;
let model = "";

export function serve(name) { model = name; }

function addTurn(who) {
  const said = el("div", { class: "said" });
  const node = el("div", { class: "turn" }, el("div", { class: "who" }, who), said);
  byId("turns").append(node);
  return { node, said };
}

function reasoningOf(turn) {
  if (!turn.reasoning) {
    turn.reasoning = el("div", { class: "said reasoning" });
    const box = el("details", { open: "" }, el("summary", {}, "Reasoning"), turn.reasoning);
    turn.node.insertBefore(box, turn.said);
  }
  return turn.reasoning;
}

function follow() {
  const box = byId("turns");
  if (box.scrollHeight - box.scrollTop - box.clientHeight < 120) box.scrollTop = box.scrollHeight;
}

// Adds what one event brought; true at the last one.
function take(data, turn, seen) {
  if (data === "[DONE]") return true;
  const event = JSON.parse(data);
  if (event.error) throw new Error(event.error.message);
  if (event.usage) seen.usage = event.usage;
  for (const choice of event.choices ?? []) {
    const { content, reasoning } = choice.delta;
    if (content || reasoning) seen.first ??= performance.now();
    if (reasoning) reasoningOf(turn).append(reasoning);
    if (content) { turn.said.append(content); seen.text += content; }
    seen.finish = choice.finish_reason ?? seen.finish;
  }
  return false;
}

async function stream(body, turn, seen, signal) {
  const answer = await ask("v1/chat/completions", {
    method: "POST", signal, headers: { "Content-Type": "application/json" }, body: JSON.stringify(body),
  });
  const reader = answer.body.getReader();
  const text = new TextDecoder();
  const events = new EventReader();
  for (;;) {
    const { value, done } = await reader.read();
    if (done) throw new Error("The answer was cut off.");
    for (const data of events.push(text.decode(value, { stream: true }))) {
      if (take(data, turn, seen)) return;
    }
    follow();
  }
}

function figures(seen, began) {
  const tokens = seen.usage?.completion_tokens;
  if (!tokens || !seen.first) return "";
  const spent = (performance.now() - seen.first) / 1000;
  const speed = tokens > 1 && spent > 0 ? `, then ${rate((tokens - 1) / spent)} tokens/s` : "";
  const cut = seen.finish === "length" ? "; cut at the most tokens" : "";
  const { prompt_tokens: read, prompt_tokens_details: details } = seen.usage;
  return `first token ${seconds((seen.first - began) / 1000)}${speed}; ${tokens} tokens for ${read} read, `
    + `${details?.cached_tokens ?? 0} of them cached${cut}`;
}

async function send() {
  const message = byId("message").value.trim();
  if (!message || running) return;
  byId("message").value = "";
  turns.push({ role: "user", content: message });
  addTurn("You").said.append(message);
  const turn = addTurn(model);
  const body = { model, messages: turns, stream: true, stream_options: { include_usage: true } };
  const most = byId("max-tokens").valueAsNumber;
  const heat = byId("temperature").valueAsNumber;
  if (!Number.isNaN(most)) body.max_tokens = most;
  if (!Number.isNaN(heat)) body.temperature = heat;
  const seen = { text: "", first: null, usage: null, finish: null };
  const began = performance.now();
  running = new AbortController();
  busy(true);
  say("chat-note", "The answer is coming.");
  try {
    await stream(body, turn, seen, running.signal);
    turn.node.append(el("div", { class: "figures" }, figures(seen, began)));
    say("chat-note", "The answer is complete.");
  } catch (error) {
    const stopped = error.name === "AbortError";
    turn.node.append(el("div", { class: stopped ? "figures" : "fault" }, stopped ? "stopped" : error.message));
    say("chat-note", stopped ? "Stopped." : `No answer: ${error.message}`);
  } finally {
    if (seen.text) turns.push({ role: "assistant", content: seen.text });
    else turns.pop();
    running = null;
    busy(false);
    follow();
  }
}

function busy(yes) {
  byId("stop").disabled = !yes;
  byId("send").disabled = yes;
  byId("clear").disabled = yes;
}

export function start() {
  byId("chat-form").addEventListener("submit", (event) => { event.preventDefault(); send(); });
  byId("message").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); send(); }
  });
  byId("talk").addEventListener("keydown", (event) => { if (event.key === "Escape") running?.abort(); });
  byId("stop").addEventListener("click", () => running?.abort());
  byId("clear").addEventListener("click", () => {
    turns.length = 0;
    byId("turns").replaceChildren();
    say("chat-note", "");
  });
}
