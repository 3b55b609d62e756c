// Drives the live page in a headless Chromium: node live_page.mjs URL LOCKED_URL KEY OUT_FOLDER
// URL: a real server under load; LOCKED_URL: one that asks for KEY. Prints one JSON document.

import { readFileSync } from "node:fs";
import { createRequire } from "node:module";
import { chromium } from "playwright-core";

const [url, locked, key, out] = process.argv.slice(2);
const require = createRequire(`${process.cwd()}/`);
const axe = readFileSync(require.resolve("axe-core/axe.min.js"), "utf-8");
const axeVersion = require("axe-core/package.json").version;
const browser = await chromium.launch({
  executablePath: process.env.CHROMIUM ?? "/usr/bin/chromium",
  args: ["--no-sandbox"], // a container without user namespaces
});
const checks = [];

function check(name, good, seen = "") {
  checks.push({ check: name, passed: Boolean(good), ...(good ? {} : { seen: String(seen) }) });
}

// A page that notes what must not happen: faults, refusals by the policy, requests to others.
async function open(where, { width = 1360, height = 900, scheme = "light" } = {}) {
  const page = await browser.newPage({ viewport: { width, height }, colorScheme: scheme });
  const noted = [];
  page.on("pageerror", (error) => noted.push(`fault: ${error.message}`));
  page.on("console", (line) => {
    if (line.type() === "error" && !/status of 4|Failed to load resource/.test(line.text())) noted.push(line.text());
  });
  page.on("request", (request) => {
    if (new URL(request.url()).origin !== new URL(where).origin) noted.push(`asked ${request.url()}`);
  });
  await page.goto(where);
  return { page, noted };
}

const text = (page, id) => page.locator(`#${id}`).innerText();
const until = (page, test, argument) => page.waitForFunction(test, argument, { timeout: 60000 });
const says = (page, id, word) =>
  until(page, ([where, what]) => document.getElementById(where).textContent.includes(what), [id, word]);

async function ready(page) {
  await says(page, "state", "ready");
  await until(page, () => document.querySelectorAll("#kernels-body tbody tr").length > 0);
}

async function accessible(page, name) {
  await page.evaluate(axe);
  const found = await page.evaluate(() => window.axe.run(document, {
    runOnly: ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"],
  }));
  const told = found.violations.map((v) => `${v.id}: ${v.nodes.map((n) => n.target).join(" ")}`);
  check(`axe finds nothing: ${name} (${found.passes.length} rules passed)`, !told.length, told.join("; "));
}

async function looks() {
  for (const [name, shape] of [
    ["light", {}], ["dark", { scheme: "dark" }], ["narrow", { width: 390, height: 1160 }],
  ]) {
    const { page, noted } = await open(url, shape);
    await ready(page);
    await say(page, "What is the capital of France? Answer in one sentence.", 40);
    await says(page, "chat-note", "complete");
    await page.evaluate(() => { document.activeElement.blur(); window.scrollTo(0, 0); });
    await page.waitForTimeout(2500);
    const wide = await page.evaluate(() => document.documentElement.scrollWidth - window.innerWidth);
    check(`nothing is wider than the window: ${name}`, wide <= 0, wide);
    await accessible(page, name);
    await page.screenshot({ path: `${out}/page-${name}.png` });
    if (name === "light") await kernels(page);
    check(`no fault, no refusal, no other host: ${name}`, !noted.length, noted.join("; "));
    await page.close();
  }
}

async function kernels(page) {
  await page.locator("#kernels").scrollIntoViewIfNeeded();
  const details = page.locator("#kernels-body details").first();
  await details.locator("summary").focus();
  await page.keyboard.press("Enter");
  check("refused kernels open by keyboard", await details.evaluate((node) => node.open));
  await page.waitForTimeout(2500);
  check("and stay open while the page refreshes", await details.evaluate((node) => node.open));
  check("with reasons", /needs|runs on|predicted|reference/.test(await details.innerText()), await details.innerText());
  await page.evaluate(() => document.getElementById("kernels").scrollIntoView());
  await page.screenshot({ path: `${out}/page-kernels.png`, clip: { x: 0, y: 0, width: 1360, height: 740 } });
}

async function figures() {
  const { page } = await open(url);
  await ready(page);
  const status = await (await page.request.get(`${url}/page/status`)).json();
  const tiles = await text(page, "tiles");
  check("tiles tell the load", /Running/.test(tiles) && /Tokens\/s written/.test(tiles), tiles);
  check("four charts", (await page.locator("#charts svg.chart").count()) === 4);
  check("a chart has its figures in words", /peak [\d.]/.test(await page.locator("#charts figcaption").first().innerText()));
  const rows = await page.locator("#latency-body tbody tr").allInnerTexts();
  check("percentiles of three times", rows.length === 3 && /ms|s/.test(rows[0]), rows.join("|"));
  const memory = await text(page, "memory-body");
  check("a pool nobody counts is unknown", /transient[^]*unknown/.test(memory), memory);
  const start = await page.locator("#start-body tbody tr").allInnerTexts();
  check("every start-up phase", start.length === status.start_phases.length, start.join("|"));
  check("links: none or known", status.links.length > 0 || /^None/.test(await text(page, "links-body")));
  check("verified or not", /verified/.test(await text(page, "verification-body")), await text(page, "verification-body"));
  check("decisions with origins", /checkpoint|seed|probe/.test(await text(page, "decisions-body")));
  await page.close();
}

async function say(page, words, most) {
  await page.fill("#max-tokens", String(most));
  await page.fill("#temperature", "0");
  await page.fill("#message", words);
  await page.press("#message", "Enter");
}

async function chat() {
  const { page, noted } = await open(url);
  await ready(page);
  await say(page, "What is the capital of France? Answer in one sentence.", 40);
  await says(page, "chat-note", "complete");
  const pieces = await page.evaluate(() => document.querySelector(".turn:last-child .said").childNodes.length);
  check("text comes in pieces", pieces > 1, pieces);
  const told = await page.locator(".turn").last().innerText();
  check("an answer with its figures", /first token .* read/.test(told), told);
  const before = (await (await page.request.get(`${url}/page/status`)).json()).requests.cancelled;
  await say(page, "Write a very long story.", 900);
  await until(page, () => document.querySelector(".turn:last-child .said").textContent.length > 20);
  await page.keyboard.press("Escape");
  await says(page, "chat-note", "Stopped");
  let after = before;
  for (let turn = 0; turn < 50 && after === before; turn += 1) {
    await page.waitForTimeout(100);
    after = (await (await page.request.get(`${url}/page/status`)).json()).requests.cancelled;
  }
  check("stopping cancels in the server", after === before + 1, `${before} then ${after}`);
  await say(page, "Hello", 10_000_000);
  await says(page, "chat-note", "No answer");
  check("an error in the server's words", /maximum context length/.test(await page.locator(".turn .fault").last().innerText()));
  check("chat without a fault", !noted.length, noted.join("; "));
  await page.close();
}

const EVIL = '<img src=x onerror="document.title=1"><script>document.title=2</script>';
const event = (delta, more = {}) => `data: ${JSON.stringify({ choices: [{ index: 0, delta, ...more }] })}\n\n`;

async function hostile() {
  const { page, noted } = await open(url);
  await ready(page);
  const stream = [": keep-alive\n\n", event({ role: "assistant", reasoning: `think ${EVIL}` }), event({ content: `say ${EVIL}` })];
  const answers = [
    [...stream, event({}, { finish_reason: "stop" }), "data: [DONE]\n\n"].join(""),
    [...stream, `data: ${JSON.stringify({ error: { message: `broke ${EVIL}` } })}\n\n`].join(""),
    stream.join(""),
  ];
  await page.route("**/v1/chat/completions", (route) =>
    route.fulfill({ contentType: "text/event-stream", body: answers.shift() }));
  for (const [name, note] of [["whole", "complete"], ["failing", "broke"], ["cut", "cut off"]]) {
    await page.fill("#message", EVIL);
    await page.press("#message", "Enter");
    await says(page, "chat-note", note);
    const turn = page.locator(".turn").last();
    const shown = [await turn.locator(".reasoning").innerText(), await turn.locator(".said").last().innerText()];
    check(`markup is text, reasoning apart: ${name}`, shown[0] === `think ${EVIL}` && shown[1] === `say ${EVIL}`, shown.join("|"));
    check(`the end is told: ${name}`, (await text(page, "chat-note")).includes(note));
  }
  check("no element came of it", (await page.locator("#turns img, #turns script").count()) === 0);
  check("hostile text without a fault", !noted.length && !/^[12]$/.test(await page.title()), noted.join("; "));
  await page.close();
}

async function keyboard() {
  const { page } = await open(url);
  await ready(page);
  const seen = [];
  for (let turn = 0; turn < 200; turn += 1) {
    await page.keyboard.press("Tab");
    const now = await page.evaluate(() => {
      const node = document.activeElement;
      if (node === document.body) return null;
      return { name: node.id || node.textContent.slice(0, 20) || node.tagName, ring: getComputedStyle(node).outlineStyle };
    });
    if (now === null) break;
    seen.push(now);
  }
  const names = seen.map((each) => each.name);
  check("the first stop skips to the load", names[0] === "Skip to the load", names[0]);
  check("every control is reached", ["message", "max-tokens", "temperature", "send", "clear", "turns"].every((id) => names.includes(id)), names.join(","));
  check("focus is seen everywhere", seen.every((each) => each.ring !== "none"), seen.filter((each) => each.ring === "none").map((each) => each.name).join(","));
  await page.close();
}

async function keys() {
  const { page, noted } = await open(locked);
  await page.locator("#key-form").waitFor({ state: "visible" });
  await accessible(page, "asking for the key");
  await page.fill("#key", "wrong");
  await page.press("#key", "Enter");
  await says(page, "key-fault", "does not know");
  await page.fill("#key", key);
  await page.press("#key", "Enter");
  await says(page, "state", "ready");
  check("the right key opens", await page.locator("#key-form").isHidden());
  const kept = await page.evaluate(() => [Object.values(sessionStorage), Object.values(localStorage), document.cookie]);
  check("the key is in this tab only", JSON.stringify(kept) === JSON.stringify([[key], [], ""]), JSON.stringify(kept));
  await page.reload();
  await says(page, "state", "ready");
  check("a reload keeps it", await page.locator("#key-form").isHidden());
  await page.click("#forget");
  await page.locator("#key-form").waitFor({ state: "visible" });
  check("and forgetting forgets it", (await page.evaluate(() => sessionStorage.length)) === 0);
  check("keys without a fault", !noted.length, noted.join("; "));
  await page.close();
}

async function gone() {
  const { page } = await open(url);
  await ready(page);
  await page.route("**/page/status*", (route) => route.abort());
  await says(page, "state", "unreachable");
  check("a server that is gone is said to be", (await text(page, "about")).includes("does not answer"));
  await page.unroute("**/page/status*");
  await says(page, "state", "ready");
  check("and found again", true);
  await page.close();
}

for (const part of [looks, figures, chat, hostile, keyboard, keys, gone]) {
  try {
    await part();
  } catch (error) {
    check(`${part.name} ran to its end`, false, error.message);
  }
}
const version = browser.version();
await browser.close();
console.log(JSON.stringify({ chromium: version, axe: axeVersion, checks }));
