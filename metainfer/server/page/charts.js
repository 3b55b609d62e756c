// Small line charts over the last one to ten minutes, as SVG. The caption tells the figures in words.

import { el, svg } from "./dom.js";

const WIDTH = 320;
const HEIGHT = 120;
const LEFT = 40;
const BOTTOM = 18;
const TOP = 8;
export const SPAN_S = 600;

// The least of 1, 2, 2.5, 5 times a power of ten that is not below `value`.
export function ceiling(value) {
  if (!(value > 0)) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 2.5, 5, 10].map((step) => step * power).find((step) => step >= value * 0.999);
}

// `curves`: [{name, read(sample)}], at most two; `show(value)`: how a value is written.
export function chart(title, samples, now, gapS, curves, show, most = null) {
  const peak = Math.max(0, ...samples.flatMap((s) => curves.map((curve) => curve.read(s))));
  const top = most ?? ceiling(peak);
  const spanS = Math.min(Math.max(now - (samples[0]?.t ?? now), 60), SPAN_S);
  const x = (t) => LEFT + (WIDTH - LEFT - 4) * (1 - (now - t) / spanS);
  const y = (value) => TOP + (HEIGHT - BOTTOM - TOP) * (1 - Math.min(value / top, 1));
  const shown = samples.filter((s) => s.t >= now - spanS);
  const floor = HEIGHT - BOTTOM;
  const parts = [
    svg("path", { class: "frame", d: `M${LEFT} ${TOP}V${floor}H${WIDTH - 4}` }),
    svg("text", { x: LEFT - 5, y: TOP + 9, "text-anchor": "end" }, show(top)),
    svg("text", { x: LEFT - 5, y: floor, "text-anchor": "end" }, "0"),
    svg("text", { x: LEFT, y: HEIGHT - 4 }, spanS < 120 ? `${Math.round(spanS)} s ago` : `${Math.round(spanS / 60)} min ago`),
    svg("text", { x: WIDTH - 4, y: HEIGHT - 4, "text-anchor": "end" }, "now"),
  ];
  curves.forEach((curve, number) => {
    for (const run of runs(shown, gapS)) {
      const points = run.map((s) => `${x(s.t).toFixed(1)} ${y(curve.read(s)).toFixed(1)}`);
      const line = `M${points.join("L")}`;
      if (number === 0) {
        const area = `${line}L${x(run.at(-1).t).toFixed(1)} ${floor}L${x(run[0].t).toFixed(1)} ${floor}Z`;
        parts.push(svg("path", { class: "area", d: area }));
      }
      parts.push(svg("path", { class: number === 0 ? "curve" : "curve second", d: line }));
    }
  });
  const last = shown.at(-1);
  const told = curves.map((curve, number) =>
    `${curve.name ? `${curve.name}${number ? " (dashed)" : ""} ` : ""}${last ? show(curve.read(last)) : "none yet"}`);
  const words = `${told.join(", ")}; peak ${show(peak)}`;
  return el("figure", {},
    el("figcaption", {}, `${title} `, el("span", { class: "quiet" }, words)),
    svg("svg", { class: "chart", viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": `${title}: ${words}` }, ...parts));
}

// Samples in runs without a gap: where the page or the server slept, no line is drawn.
export function runs(samples, gapS) {
  const found = [];
  let before = -Infinity;
  for (const sample of samples) {
    if (sample.t - before > gapS) found.push([]);
    found.at(-1).push(sample);
    before = sample.t;
  }
  return found;
}

export function bar(part) {
  return svg("svg", { class: "bar", viewBox: "0 0 100 4", preserveAspectRatio: "none", "aria-hidden": "true" },
    svg("rect", { x: 0, y: 0, height: 4, width: Math.max(100 * part, 0.4).toFixed(2) }));
}
