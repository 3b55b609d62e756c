"""A small JSON-schema validator: what `docs/plan.schema.json` uses; other keywords are errors."""

from __future__ import annotations

import re
from typing import Any

_TYPES = {
    "object": dict, "array": list, "string": str, "boolean": bool, "null": type(None),
    "integer": int, "number": (int, float),
}  # fmt: skip
_IGNORED = {"$schema", "title", "description", "$defs"}


def faults(value: Any, schema: dict[str, Any], root: dict[str, Any], at: str = "$") -> list[str]:
    """Every way in which `value` breaks `schema`."""
    if "$ref" in schema:
        schema = root["$defs"][schema["$ref"].removeprefix("#/$defs/")]
    found = [f"{at}: {text}" for text in _type(value, schema.get("type", list(_TYPES)))]
    if found:
        return found
    for keyword, wanted in schema.items():
        if keyword not in _IGNORED:
            found += [f"{at}: {text}" for text in _CHECKS[keyword](value, wanted)]
    if isinstance(value, dict) and not found:
        known = schema.get("properties", {})
        rest = schema.get("additionalProperties", True)
        for key, each in value.items():
            if key in known:
                found += faults(each, known[key], root, f"{at}.{key}")
            elif rest is False:
                found.append(f"{at}: {key} is not known")
            elif isinstance(rest, dict):
                found += faults(each, rest, root, f"{at}.{key}")
    if isinstance(value, list) and "items" in schema:
        for index, each in enumerate(value):
            found += faults(each, schema["items"], root, f"{at}[{index}]")
    if "oneOf" in schema:
        ways = [faults(value, way, root, at) for way in schema["oneOf"]]
        if sum(not way for way in ways) != 1:
            found += min((way for way in ways if way), key=len, default=[f"{at}: several ways"])
    return found


def _type(value: Any, wanted: Any) -> list[str]:
    names = [wanted] if isinstance(wanted, str) else wanted
    for name in names:
        truth = isinstance(value, bool) and name != "boolean"
        if isinstance(value, _TYPES[name]) and not truth:
            return []
    return [f"{value!r} is no {'/'.join(names)}"]


def _when(condition: bool, text: str) -> list[str]:
    return [text] if condition else []


def _number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


_CHECKS: dict[str, Any] = {
    "type": lambda v, w: [],
    "enum": lambda v, w: _when(v not in w, f"{v!r} is none of {w}"),
    "pattern": lambda v, w: _when(not re.search(w, v), f"{v!r} does not match {w}"),
    "minimum": lambda v, w: _when(_number(v) and v < w, f"{v} < {w}"),
    "exclusiveMinimum": lambda v, w: _when(_number(v) and v <= w, f"{v} <= {w}"),
    "minItems": lambda v, w: _when(len(v) < w, f"{len(v)} items"),
    "maxItems": lambda v, w: _when(len(v) > w, f"{len(v)} items"),
    "required": lambda v, w: [f"lacks {key}" for key in w if key not in v],
    "properties": lambda v, w: [],
    "additionalProperties": lambda v, w: [],
    "items": lambda v, w: [],
    "oneOf": lambda v, w: [],
}
