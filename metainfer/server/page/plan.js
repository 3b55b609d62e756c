// What was decided before serving: kernels with their losers, layouts, the ledger, every decision.

import { bytes, count, el, grade, list, put, quiet, rate, table, UNKNOWN } from "./dom.js";

const reasons = (loser) => `${loser.value}: ${loser.reasons.map((reason) => reason.message).join("; ")}`;

function refused(losers) {
  if (!losers.length) return "none";
  return el("details", {}, el("summary", {}, `${losers.length} refused`), list(losers.map(reasons)));
}

// One row per place and kernel; phases that lost the same for the same reasons share a list.
export function kernelRows(ops, decisions) {
  const rows = new Map();
  for (const [place, op] of Object.entries(ops)) {
    const at = place.lastIndexOf("@");
    const [site, phase] = [place.slice(0, at), place.slice(at + 1)];
    const decision = decisions.get(`ops.${place}`);
    const name = [site, op.impl, op.quality, op.evidence].join("\n");
    const row = rows.get(name) ?? { site, op, phases: [], whys: new Set(), losers: new Map() };
    rows.set(name, row);
    row.phases.push(phase);
    if (decision) row.whys.add(decision.why);
    const lost = (decision?.losers ?? []).map(reasons);
    const same = JSON.stringify(lost);
    const group = row.losers.get(same) ?? { phases: [], lost };
    row.losers.set(same, group);
    group.phases.push(phase);
  }
  return [...rows.values()];
}

function kernels(document) {
  const ops = document.plan.ops ?? {};
  const decisions = new Map((document.decisions ?? []).map((each) => [each.key, each]));
  const places = Object.values(ops);
  if (!places.length) return put("kernels-body", quiet("The plan names none."));
  const grades = ["native", "compatible", "reference"]
    .map((word) => [word, places.filter((op) => op.quality === word).length])
    .filter(([, n]) => n).map(([word, n]) => `${n} ${word}`);
  const rows = kernelRows(ops, decisions).map((row) => {
    const groups = [...row.losers.values()].filter((group) => group.lost.length);
    const most = Math.max(0, ...groups.map((group) => group.lost.length));
    const told = groups.map((group) => el("div", {}, el("strong", {}, group.phases.join(", ")), list(group.lost)));
    const why = el("div", { class: "quiet" }, [...row.whys].join("; ") || UNKNOWN);
    return [row.site, row.phases.join(", "), el("div", {}, row.op.impl, why), grade(row.op.quality), row.op.evidence,
      most ? el("details", {}, el("summary", {}, `${most} refused`), ...told) : "none"];
  });
  return put("kernels-body", quiet(`${places.length} ops over all phases: ${grades.join(", ")}.`),
    table("Chosen kernels, and what was refused for which reasons.",
      ["Op", "Phases", "Kernel, and why", "Quality", "Evidence", "Refused"], rows, "kernels"));
}

function layouts(found) {
  if (!found?.length) return put("layouts-body", quiet("The plan names none."));
  const fits = (row) => (!row.feasible ? `no: ${row.reasons.map((r) => r.message).join("; ")}`
    : row.built ? "yes" : "yes, planned only");
  const speed = (value) => (value === null ? "not predicted" : rate(value));
  return put("layouts-body", table("Ways to spread the model over devices; the first is in use.",
    ["Layout", "Devices#", "Fits", "Cached tokens#", "Longest context#", "Prefill tokens/s#", "Decode tokens/s#"],
    found.map((row) => [row.name, count(row.ranks), fits(row), count(row.kv_tokens), count(row.max_context),
      speed(row.prefill_tok_s), speed(row.decode_tok_s)])));
}

function ledger(rows) {
  if (!rows?.length) return put("ledger-body");
  return put("ledger-body", el("details", {}, el("summary", {}, `The ledger, ${rows.length} lines`),
    table("The plan's memory ledger.", ["Item", "Pool", "Where", "Bytes#", "Needed of it#"],
      rows.map((row) => [row.item, row.kind, row.memory ?? UNKNOWN, bytes(row.bytes),
        row.logical_bytes === null || row.logical_bytes === undefined ? "all" : bytes(row.logical_bytes)]))));
}

function decisions(found) {
  const others = (found ?? []).filter((each) => !each.key.startsWith("ops."));
  if (!others.length) return put("decisions-body", quiet("The plan records none."));
  const text = (value) => (typeof value === "string" ? value : JSON.stringify(value));
  return put("decisions-body", table("Every other value, who set it and why.",
    ["Value of", "Is", "Set by", "Why", "Refused"],
    others.map((each) => [each.key, text(each.value), each.origin, each.why, refused(each.losers)]), "choices"));
}

// The verdict of `metainfer verify`, if there is one for this very plan.
function verification(verdict) {
  const text = verdict?.text ?? "Unknown.";
  const word = verdict?.verified ? "good" : "unknown";
  put("verification-body", el("p", { class: `verdict ${word}` }, text));
}

export function show(document) {
  verification(document.verification);
  kernels(document);
  layouts(document.layouts);
  ledger(document.ledger);
  decisions(document.decisions);
}
