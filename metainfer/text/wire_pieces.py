"""DeepSeek-V4's fixed prose pieces: taken from the publisher's files at run time, never kept here.

Two sources, in this order: the checkpoint's own ``encoding/encoding_dsv4.py``, read as text and
never executed (only literal assignments are looked at), and the publisher's package
`deepseek-recipe` (MIT), out of whose prompts the pieces are cut. A piece counts only with the
length and hash in `KNOWN`; `reasons` says why a source was not taken.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

from metainfer.core.errors import RequestError

ENCODER = Path("encoding") / "encoding_dsv4.py"
_MAX_BYTES = 2**20

#: piece -> (characters, first 16 hex digits of the SHA-256 of its UTF-8)
KNOWN: Mapping[str, tuple[int, str]] = {
    "tools_head": (854, "c7c9042638154a23"),
    "tools_tail": (99, "690702850fe25651"),
    "effort_high": (476, "f7a24f3b3050d4a8"),
    "effort_max": (526, "53fb31b8392ec5b4"),
}


@dataclass(frozen=True, slots=True)
class WirePieces:
    """`efforts` maps an effort to its prefix; one that is missing cannot be asked for.
    `source` is None when nobody had the pieces; `reasons` are those of sources not taken."""

    tools_head: str = ""
    tools_tail: str = ""
    efforts: Mapping[str, str] = field(default_factory=lambda: {"low": "", "high": ""})
    default_effort: str = "high"
    source: str | None = None
    reasons: tuple[str, ...] = ()

    def tools(self) -> tuple[str, str]:
        """(text before the schemas, text after them); `RequestError` without a source."""
        if not self.tools_head:
            raise self._missing("Tools")
        return self.tools_head, self.tools_tail

    def effort(self, effort: str | None) -> str:
        """The prefix of `effort`; `RequestError` when no source has it."""
        effort = effort or self.default_effort
        if effort not in self.efforts:
            raise self._missing(f"reasoning_effort {effort!r}")
        return self.efforts[effort]

    def _missing(self, what: str) -> RequestError:
        return RequestError(
            f"{what} cannot be asked for: the publisher's prompt text is not here "
            f"({'; '.join(self.reasons) or 'no source was looked at'}).",
            "Keep the checkpoint's encoding/encoding_dsv4.py in the model folder, or run "
            "'pip install deepseek-recipe', and start the server again.",
            code="prompt_text_missing",
            param="tools" if what == "Tools" else "reasoning_effort",
        )


class _Unusable(Exception):
    """Why a source was not taken."""


def find_pieces(
    folder: Path | None, recipe: Callable[[], Any] | None = None, *, ladder: bool = True
) -> WirePieces:
    """The pieces of a checkpoint. `folder` None: a model without files. `recipe` imports the
    package. Without `ladder` a recipe's effort prefixes are offered but none is the default:
    that is the April release's behaviour, and the only one that can be known without files."""
    reasons = []
    try:
        return _from_encoder(folder)
    except _Unusable as reason:
        reasons.append(str(reason))
    try:
        return replace(_from_recipe(recipe or _import_recipe, ladder), reasons=tuple(reasons))
    except _Unusable as reason:
        reasons.append(str(reason))
    return WirePieces(reasons=tuple(reasons))


def _check(name: str, text: str, where: str) -> str:
    size, digest = KNOWN[name]
    found = sha256(text.encode()).hexdigest()[:16]
    if len(text) != size or found != digest:
        raise _Unusable(f"{name} of {where} is not the known text: {len(text)} characters, {found}")
    return text


# -- the checkpoint's encoder ----------------------------------------------------------------------


def _from_encoder(folder: Path | None) -> WirePieces:
    if folder is None:
        raise _Unusable("the model has no folder")
    path = folder / ENCODER
    where = str(ENCODER)
    if not path.is_file():
        raise _Unusable(f"the folder has no {where}")
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise _Unusable(f"{where} exceeds {_MAX_BYTES} bytes")
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, SyntaxError, RecursionError, MemoryError) as error:
        raise _Unusable(f"{where} cannot be read: {error}") from error
    named = dict(_literals(tree))
    template = named.get("TOOLS_TEMPLATE")
    if not isinstance(template, str) or template.count("{tool_schemas}") != 1:
        raise _Unusable(f"{where} has no TOOLS_TEMPLATE")
    head, tail = (_fill(part, where) for part in template.split("{tool_schemas}"))
    efforts, default = _encoder_efforts(named, where)
    return WirePieces(
        _check("tools_head", head, where),
        _check("tools_tail", tail, where),
        efforts,
        default,
        where,
    )


def _literals(tree: ast.Module) -> list[tuple[str, object]]:
    """Module-level names that are assigned a literal."""
    found: list[tuple[str, object]] = []
    for node in tree.body:
        targets: list[ast.expr] = []
        if isinstance(node, ast.Assign):
            targets = node.targets
        elif isinstance(node, ast.AnnAssign) and node.value is not None:
            targets = [node.target]
        for target in targets:
            if isinstance(target, ast.Name):
                try:
                    found.append((target.id, ast.literal_eval(node.value)))  # type: ignore[attr-defined]
                except (ValueError, TypeError, RecursionError):
                    continue
    return found


_FIELDS = {
    "dsml_token": "｜DSML｜",
    "thinking_start_token": "<think>",
    "thinking_end_token": "</think>",
}


def _fill(template: str, where: str) -> str:
    """`template` with its three token fields; `str.format` would do more than is wanted."""

    def fill(found: re.Match[str]) -> str:
        if found.group(1) not in _FIELDS:
            raise _Unusable(f"TOOLS_TEMPLATE of {where} has the unknown field {found.group(1)!r}")
        return _FIELDS[found.group(1)]

    return re.sub(r"\{(\w+)\}", fill, template)


def _encoder_efforts(named: Mapping[str, object], where: str) -> tuple[dict[str, str], str]:
    """The April encoder has one prefix, for ``max``; later ones a table and a default."""
    table = named.get("REASONING_EFFORT_PROMPTS")
    if isinstance(table, dict) and {"low", "high", "max"} <= table.keys():
        low, high, highest = (str(table[name]) for name in ("low", "high", "max"))
        if low:
            raise _Unusable(f"{where} has a prefix for low effort, which is not known")
        default = named.get("DEFAULT_REASONING_EFFORT", "low")
        prompts = {
            "low": "",
            "high": _check("effort_high", high, where),
            "max": _check("effort_max", highest, where),
        }
        return prompts, default if isinstance(default, str) and default in prompts else "low"
    single = named.get("REASONING_EFFORT_MAX")
    if not isinstance(single, str):
        raise _Unusable(f"{where} has no reasoning effort text")
    return {"low": "", "high": "", "max": _check("effort_high", single, where)}, "high"


# -- the publisher's package -----------------------------------------------------------------------


def _import_recipe() -> Any:
    import deepseek_recipe

    return deepseek_recipe


def _from_recipe(load: Callable[[], Any], ladder: bool) -> WirePieces:
    try:
        recipe = load()
        encoding = recipe.DeepseekV4Encoding()

        def render(**options: Any) -> str:
            conversation = recipe.Conversation([recipe.UserMessage("Q")], **options)
            return str(encoding.render_conversation(conversation).prompt)

        tool = recipe.ToolDefinition("f", "d", {})
        with_tools = render(thinking_mode=False, tools=[tool])
        efforts = {
            name: render(reasoning_effort=name).partition("<｜User｜>")[0]
            for name in ("high", "max")
        }
        default = render().partition("<｜User｜>")[0]
    except ImportError:
        raise _Unusable("the package deepseek-recipe is not installed") from None
    except Exception as error:  # whatever another version of the package raises
        raise _Unusable(f"the package deepseek-recipe is not as expected: {error}") from error
    where = "deepseek-recipe"
    _, begin, rest = with_tools.partition("## Tools")
    head, _, rest = (begin + rest).partition('{"name": "f"')
    tail = rest.partition("}}")[2].partition("<｜User｜>")[0]
    bos = "<｜begin▁of▁sentence｜>"
    prompts = {"low": ""}
    for name, text in efforts.items():
        prompts[name] = _check(f"effort_{name}", text.removeprefix(bos), where)
    usual = next((name for name, text in efforts.items() if text == default), "low")
    if not ladder:
        prompts = {"low": "", "high": "", "max": prompts["high"]}
        usual = "high"
    return WirePieces(
        _check("tools_head", head, where), _check("tools_tail", tail, where), prompts, usual, where
    )
