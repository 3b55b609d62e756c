"""The audit: which of a stock engine's fast paths this machine and model lose, and why."""

from __future__ import annotations

import string
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from metainfer.doctor.checks import foreign_environment
from metainfer.doctor.data_files import load, rows
from metainfer.doctor.finding import Finding, Severity, information, unknown
from metainfer.doctor.stock.command_line import StockLine, read_line, table
from metainfer.doctor.stock.conditions import fact_of, holds, unknown_facts
from metainfer.doctor.stock.models import recognise
from metainfer.doctor.stock.moe_tables import package_folder, search
from metainfer.doctor.stock.subject import Subject, subject
from metainfer.platform.facts import Facts
from metainfer.platform.origins import PROBED

OUTCOMES = {"fails": Severity.BLOCKER, "loses": Severity.SLOWS, "note": Severity.INFORMATION}
UNKNOWN = "unknown"
#: Marks of the tables, as a reader needs them.
MARKS = {
    "[S]": "(read in its source)",
    "[V]": "(read in its source or documentation)",
    "[P]": "(public report)",
    "[D]": "(deduced)",
}
#: Facts that are computed, and the flags without which there is nothing to compute.
FROM_FLAGS = {
    "chunk_per_rank": ("chunk",),
    "prefill_payload": ("chunk",),
    "indexer_bytes": ("chunk", "context"),
}
PHASES = (("dsa_prefill", "sparse attention, prefill"), ("dsa_decode", "sparse attention, decode"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One path of the engine. `outcome`: fails, loses, note or unknown. `ours`: what we do there,
    `built` whether this release does it."""

    id: str
    path: str
    outcome: str
    what: str
    evidence: str
    origin: str
    ours: str
    built: bool

    def to_json(self) -> dict[str, object]:
        return {name: getattr(self, name) for name in self.__dataclass_fields__}


@dataclass(frozen=True, slots=True)
class StockRequest:
    """An engine and its command line; `model`: a reference that overrules the command line's."""

    engine: str
    text: str
    model: str = ""


def audit(
    machine: Facts, asked: StockRequest, environ: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Audit a command line. `environ`: this process's variables, None for a described machine.

    Returns ``{"engine", "read", "installed", "model", "command", "not_understood", "chosen",
    "rows", "findings", "summary"}``; `findings` are `Finding` objects for the report.

    Raises:
        UsageError: no table for the engine, or its command line cannot be read.
    """
    engine, text = asked.engine, asked.text
    line = read_line(engine, text)
    traits = recognise(asked.model or str(line.given.get("model", "")))
    about = subject(machine, line, traits)
    found = [
        *_attention(about, line),
        *_paths(about, engine),
        *_experts(about, machine, engine),
        *_variables(engine, environ or {}),
    ]
    head = load(table(engine))["engine"]
    installed = machine.software.get(head["package"])
    chosen = {key: about.facts[key] for key in ("kv", *dict(PHASES)) if about.facts.get(key)}
    counts = {name: sum(row.outcome == name for row in found) for name in (*OUTCOMES, UNKNOWN)}
    summary = (
        f"{engine}: {counts['fails']} paths fail, {counts['loses']} are lost silently, "
        f"{counts['note']} notes, {counts['unknown']} not decided"
    )
    if line.not_understood:
        summary += f"; {len(line.not_understood)} flags not understood"
    return {
        "engine": engine,
        "read": head["read"],
        "installed": installed,
        "model": {"reference": traits.reference, "how": traits.how, "facts": dict(traits.facts)},
        "command": {"text": text, "given": dict(line.given), "neutral": list(line.neutral)},
        "not_understood": list(line.not_understood),
        "chosen": chosen,
        "rows": [row.to_json() for row in found],
        "findings": [
            *_notes(line, head, installed, traits.how, model=bool(traits.facts)),
            *(_finding(engine, row, head["read"]) for row in found),
        ],
        "summary": summary,
    }


def _paths(about: Subject, engine: str) -> Iterable[Row]:
    for row in rows(table(engine), "path"):
        verdict = holds(row["when"], about.facts)
        if verdict is False or _silent(row["when"], about):
            continue
        names = [fact_of(key) for key in row["when"]]
        if verdict is None:
            missing = ", ".join(dict.fromkeys(unknown_facts(row["when"], about.facts)))
            what = f"not decided: {missing} unknown"
            yield _row(row, UNKNOWN, what, about.evidence(names))
        else:
            yield _row(row, row["outcome"], fill(row["what"], about.facts), about.evidence(names))


def _silent(when: Mapping[str, Any], about: Subject) -> bool:
    """A condition on a flag that was not given: the path is not in question."""
    names = {name for key in when for name in (fact_of(key), *FROM_FLAGS.get(fact_of(key), ()))}
    return any(about.origins[name] == "not given" and about.facts[name] is None for name in names)


def _attention(about: Subject, line: StockLine) -> Iterable[Row]:
    """The engine's attention choice against the capabilities that its kernels exist for."""
    if about.facts.get("sparse") is False:
        return
    if line.engine == "sglang":
        yield from _resolved_attention(about)
    else:
        yield from _candidate_attention(about, line.engine)


def _resolved_attention(about: Subject) -> Iterable[Row]:
    kernels = rows(table("sglang"), "kernel")
    base = {"ours": "an operation is resolved before weights are read, or refused with all reasons"}
    for key, path in PHASES:
        backend = about.facts[key]
        names = ["capability", "family", "kv", key]
        listed = [row for row in kernels if row["name"] == backend]
        row = {**base, "id": f"attention-{key[4:]}", "path": path, "built": True}
        if backend is None or not listed or about.facts["capability"] is None:
            row["origin"] = "platforms 1.2 [S]"
            what = f"not decided: {backend or 'the backend'} on this card"
            yield _row(row, UNKNOWN, what, about.evidence(names))
            continue
        row["origin"] = listed[0]["origin"]
        pair = tuple(int(part) for part in about.facts["capability"].split("."))
        if any(tuple(each["from"]) <= pair <= tuple(each["to"]) for each in listed):
            continue
        what = f"it chooses {backend}, which has no kernel here: {listed[0]['why']}"
        yield _row(row, "fails", what, about.evidence(names))


def _candidate_attention(about: Subject, engine: str) -> Iterable[Row]:
    row = {
        "id": "attention",
        "path": "sparse attention",
        "origin": "platforms 1.4 [V]",
        "ours": "every refused kernel is listed with all its reasons; a reference is named",
        "built": True,
    }
    names = ["capability", "family", "kv", "index_topk"]
    refused = []
    if about.facts["family"] is None or about.facts["capability"] is None:
        yield _row(row, UNKNOWN, "not decided: the class on this card", about.evidence(names))
        return
    for candidate in rows(table(engine), "candidate"):
        listed = holds(candidate["listed"], about.facts)
        against = [
            fill(each["what"], about.facts)
            for each in candidate["objections"]
            if holds(each["when"], about.facts)
        ]
        if listed and not against:
            return
        if listed:
            refused.append(f"{candidate['name']}: {', '.join(against)}")
    if not refused:
        what = f"not decided: how it chooses for {about.facts['family']} is not in our facts"
        yield _row(row, UNKNOWN, what, about.evidence(names))
        return
    what = "no attention class without an objection, so it refuses to start: " + "; ".join(refused)
    yield _row(row, "fails", what, about.evidence(names))


def _experts(about: Subject, machine: Facts, engine: str) -> Iterable[Row]:
    head = load(table(engine))["engine"]
    known_name = machine.origins.get("devices.0.name", "").startswith(f"{PROBED}:")
    known_name |= machine.origins.get("devices.0", "").startswith(f"{PROBED}:")
    folder = package_folder(head["package"]) if known_name else None
    looked = search(about.facts, str(about.facts["device_name"]), folder)
    if looked is None or looked.found is not None:
        return
    row = {
        "id": "expert-tables",
        "path": "tuned tables of expert kernels",
        "origin": "field-cases B-07",
        "ours": "tables by capability and size, a borrowed one named as borrowed",
        "built": False,
    }
    proof = about.evidence(["device_name", "experts", "moe_intermediate", "tp"])
    if looked.known:
        near = f"; there is one for {', '.join(looked.near)}" if looked.near else ""
        what = f"no table {looked.wanted}: the default tiles are taken with a line in the log{near}"
        yield _row(row, "loses", what, proof)
        return
    why = (
        f"{head['package']} is not installed here"
        if known_name
        else "the driver's name of the card is not in a machine file"
    )
    what = f"not decided: whether there is a table {looked.wanted} ({why})"
    yield _row(row, UNKNOWN, what, proof)


def _variables(engine: str, environ: Mapping[str, str]) -> Iterable[Row]:
    """Environment variables that only this engine reads."""
    for name, value in sorted(environ.items()):
        variable = foreign_environment.table().get(name)
        if variable is None or variable.engine != engine:
            continue
        what = foreign_environment.effect(variable, value)
        if what:
            outcome = "loses" if variable.severity == Severity.SLOWS.value else "note"
            row = {
                "id": f"env-{name.lower().replace('_', '-')}",
                "path": f"environment variable {name}",
                "ours": "no variable of another engine is read",
                "built": True,
                "origin": variable.origin,
            }
            yield _row(row, outcome, what, f"{name}={value}")


def _notes(
    line: StockLine, head: Mapping[str, Any], installed: str | None, how: str, *, model: bool
) -> Iterable[Finding]:
    engine = line.engine
    what = f"the facts of {engine} were read in {head['read']}; "
    what += f"{installed} is installed." if installed else "which version runs is not known."
    proof = f"data/{table(engine)}"
    remedy = "Compare the origins of the rows with that version."
    yield information(f"stock.{engine}.version", engine, what, remedy, proof)
    if not model:
        what = f"what the model needs: {how}"
        remedy = "Name it: --model-path FOLDER in --engine-args, with its config.json."
        yield unknown(f"stock.{engine}.model", engine, what, remedy, how)
    for word in line.not_understood:
        what = f"not understood: {word}; what it changes is not in this audit"
        yield unknown(f"stock.{engine}.flag", word, what, "", f"--engine-args: {word}")


def _finding(engine: str, row: Row, read: str) -> Finding:
    finding_id = f"stock.{engine}.{row.id}"
    state = "" if row.built else " (designed, not built yet)"
    remedy = f"Instead, we: {row.ours}{state}."
    proof = f"{row.evidence}; origin: {engine} {read}, {row.origin}"
    if row.outcome == UNKNOWN:
        return unknown(finding_id, f"{engine}: {row.path}", row.what, remedy, proof)
    severity = OUTCOMES[row.outcome]
    return Finding(finding_id, severity, f"{engine}: {row.path}", f"{row.what}.", remedy, proof,
                   "another engine, with its own limits: see doctor --model")  # fmt: skip


def _row(row: Mapping[str, Any], outcome: str, what: str, evidence: str) -> Row:
    return Row(
        id=row["id"],
        path=row["path"],
        outcome=outcome,
        what=what,
        evidence=evidence,
        origin=spelled(row["origin"]),
        ours=row["ours"],
        built=row["built"],
    )


def spelled(origin: str) -> str:
    """An origin with its marks in words."""
    for mark, words in MARKS.items():
        origin = origin.replace(mark, words)
    return origin


def fill(template: str, facts: Mapping[str, Any]) -> str:
    """A row's text with its numbers; whole numbers from 10,000 on with separators."""
    names = [name for _, name, _, _ in string.Formatter().parse(template) if name]
    shown = {
        name: f"{facts[name]:,}"
        if isinstance(facts[name], int) and not isinstance(facts[name], bool)
        and facts[name] >= 10_000 and name != "advised_chunk"
        else facts[name]
        for name in names
    }  # fmt: skip
    return template.format(**shown)
