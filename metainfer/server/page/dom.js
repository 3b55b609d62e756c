// Elements, tables and figures in words. Text reaches the document as text nodes only.

const SVG = "http://www.w3.org/2000/svg";

function built(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  for (const child of children) node.append(child);
  return node;
}

export const el = (tag, attributes = {}, ...children) =>
  built(document.createElement(tag), attributes, children);

export const svg = (tag, attributes = {}, ...children) =>
  built(document.createElementNS(SVG, tag), attributes, children);

export const byId = (id) => document.getElementById(id);

// Makes `id` hold `nodes`, changing only what differs: focus, scrolling and open parts stay.
export function put(id, ...nodes) {
  become(byId(id), nodes);
}

function become(place, nodes) {
  while (place.childNodes.length > nodes.length) place.lastChild.remove();
  nodes.forEach((fresh, index) => {
    const old = place.childNodes[index];
    if (!old) place.append(fresh);
    else if (old.nodeName !== fresh.nodeName) old.replaceWith(fresh);
    else if (fresh.nodeType === Node.TEXT_NODE) {
      if (old.data !== fresh.data) old.data = fresh.data;
    } else {
      for (const { name, value } of fresh.attributes) {
        if (old.getAttribute(name) !== value) old.setAttribute(name, value);
      }
      become(old, [...fresh.childNodes]);
    }
  });
}

export function say(id, text) {
  const place = byId(id);
  if (place.textContent !== text) place.textContent = text;
}

// `heads`: texts, ending in "#" for a column of numbers. `rows`: lists of texts or nodes.
export function table(caption, heads, rows, style = "") {
  const numeric = heads.map((head) => head.endsWith("#"));
  const names = heads.map((head) => head.replace(/#$/, ""));
  const head = names.map((name, place) =>
    el("th", { scope: "col", class: numeric[place] ? "number" : "" }, name));
  const body = rows.map((row) =>
    el("tr", {}, ...row.map((cell, place) =>
      place === 0
        ? el("th", { scope: "row" }, cell)
        : el("td", { class: numeric[place] ? "number" : "" }, cell))));
  return el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": caption },
    el("table", { class: style }, el("caption", {}, caption),
      el("thead", {}, el("tr", {}, ...head)), el("tbody", {}, ...body)));
}

export const list = (items) => el("ul", {}, ...items.map((item) => el("li", {}, item)));

export const quiet = (text) => el("p", { class: "quiet" }, text);

export const UNKNOWN = "unknown";

export function count(value) {
  return value === null || value === undefined ? UNKNOWN : value.toLocaleString("en");
}

export function rate(value) {
  if (value === null || value === undefined) return UNKNOWN;
  return value >= 100 ? count(Math.round(value)) : value.toFixed(1);
}

export const share = (value) =>
  value === null || value === undefined ? UNKNOWN : `${(100 * value).toFixed(1)} %`;

export function seconds(value) {
  if (value === null || value === undefined) return UNKNOWN;
  if (value < 0.001) return `${(1e6 * value).toFixed(0)} µs`;
  if (value < 1) return `${(1e3 * value).toFixed(value < 0.1 ? 1 : 0)} ms`;
  return value < 120 ? `${value.toFixed(value < 10 ? 2 : 1)} s` : `${(value / 60).toFixed(1)} min`;
}

export function bytes(value) {
  if (value === null || value === undefined) return UNKNOWN;
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let power = 0;
  let scaled = Math.abs(value);
  while (scaled >= 1024 && power < units.length - 1) { scaled /= 1024; power += 1; }
  const shown = power === 0 ? count(scaled) : scaled.toFixed(1);
  return `${value < 0 ? "−" : ""}${shown} ${units[power]}`;
}

export const grade = (word) => el("span", { class: `grade ${word}` }, word);
