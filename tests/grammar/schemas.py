"""Random JSON schemas of the kinds that people write, for tests and for the benchmark program."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

NAMES = st.text(
    st.characters(codec="utf-8", exclude_categories=["Cs"], exclude_characters="\x7f"),
    min_size=1,
    max_size=6,
) | st.sampled_from(["name", "né", "日本", "😀", 'say "hi"', "a\\b", "a/b", "\n", "$ref"])
TEXTS = st.text(max_size=6)


@st.composite
def strings(draw: st.DrawFn) -> dict[str, Any]:
    low = draw(st.integers(0, 4))
    bounds = {"minLength": low, "maxLength": low + draw(st.integers(0, 8))}
    pattern = draw(st.sampled_from([None, None, None, "^[a-c]{1,4}$", "^é+x?$", "^(yes|no)$"]))
    shape = draw(st.sampled_from([None, None, None, "date", "uuid", "ipv4", "time"]))
    if shape is not None:
        return {"type": "string", "format": shape}
    return {"type": "string", **(bounds if pattern is None else {"pattern": pattern})}


@st.composite
def numbers(draw: st.DrawFn) -> dict[str, Any]:
    kind = draw(st.sampled_from(["integer", "number"]))
    low = draw(st.integers(-1000, 1000))
    schema: dict[str, Any] = {"type": kind, "minimum": low}
    schema["maximum"] = low + draw(st.integers(0, 5000))
    if kind == "integer" and draw(st.booleans()):
        schema["exclusiveMaximum"] = schema.pop("maximum") + 1
    return schema


def fixed() -> st.SearchStrategy[dict[str, Any]]:
    values = st.none() | st.booleans() | st.integers(-99, 99) | TEXTS
    enums = st.lists(values, min_size=1, max_size=4)
    return st.builds(lambda found: {"enum": found}, enums) | st.builds(
        lambda value: {"const": value}, values
    )


def leaves() -> st.SearchStrategy[dict[str, Any]]:
    return (
        strings() | numbers() | fixed() | st.sampled_from([{"type": "boolean"}, {"type": "null"}])
    )


@st.composite
def arrays(draw: st.DrawFn, inner: st.SearchStrategy[Any]) -> dict[str, Any]:
    low = draw(st.integers(0, 2))
    schema: dict[str, Any] = {"type": "array", "items": draw(inner), "minItems": low}
    return schema | {"maxItems": low + draw(st.integers(0, 2))}


@st.composite
def objects(draw: st.DrawFn, inner: st.SearchStrategy[Any]) -> dict[str, Any]:
    names = draw(st.lists(NAMES, max_size=3, unique=True))
    properties = {name: draw(inner) for name in names}
    required = [name for name in names if draw(st.booleans())]
    return {
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": False,
    }


def schemas() -> st.SearchStrategy[dict[str, Any]]:
    """Schemas that the back end can enforce and whose texts are short enough to finish."""
    return st.recursive(
        leaves(),
        lambda inner: (
            arrays(inner)
            | objects(inner)
            | st.builds(lambda found: {"anyOf": found}, st.lists(inner, min_size=1, max_size=3))
        ),
        max_leaves=6,
    )
