"""Named predicates. Each returns a `Verdict` whose reason carries both numbers compared.

Conditions test capabilities, never family names (a marketing family spans cards that share no
tensor instructions), and an unknown fact is a rejection: nothing is assumed about a card.
"""

from __future__ import annotations

from collections.abc import Callable

from metainfer.core.verdict import Verdict, reject, require
from metainfer.kernels.impl import Condition, Context


def device_kind(*kinds: str) -> Condition:
    """The device is one of `kinds`."""

    def check(context: Context) -> Verdict:
        kind = context.facts.device.kind
        return require(
            kind in kinds,
            "device",
            f"runs on {' or '.join(kinds)}, this device is {kind}",
            device=kind,
        )

    return check


def capability(low: tuple[int, int], high: tuple[int, int] | None = None) -> Condition:
    """``low <= capability`` and, when given, ``capability <= high``, compared as pairs."""

    def check(context: Context) -> Verdict:
        have = context.facts.device.capability
        if have is None:
            return reject("capability", f"needs capability {_dotted(low)}, this card's is unknown")
        inside = have >= low and (high is None or have <= high)
        bound = f"{_dotted(low)} to {_dotted(high)}" if high else f"{_dotted(low)} or newer"
        return require(
            inside,
            "capability",
            f"needs capability {bound}, this card has {_dotted(have)}",
            capability=_dotted(have),
        )

    return check


def shared_memory(tile_bytes: int) -> Condition:
    """The kernel's shared memory fits the card's opt-in limit per block."""

    def check(context: Context) -> Verdict:
        limit = context.facts.device.shared_bytes_per_block
        if limit is None:
            return reject(
                "shared-memory",
                f"needs {tile_bytes:,} B of shared memory per block, the limit is unknown",
            )
        return require(
            tile_bytes <= limit,
            "shared-memory",
            f"needs {tile_bytes:,} B of shared memory per block, this card allows {limit:,} B",
            needed=tile_bytes,
            limit=limit,
        )

    return check


def feature(name: str) -> Condition:
    """The device lists `name` among its features."""

    def check(context: Context) -> Verdict:
        features = context.facts.device.features
        state = "unknown" if features is None else "missing"
        return require(
            features is not None and name in features,
            "feature",
            f"needs {name}, which is {state} on {context.facts.device.name}",
            feature=name,
        )

    return check


def dot_type(element: str) -> Condition:
    """The device multiplies matrices of `element` natively."""

    def check(context: Context) -> Verdict:
        types = context.facts.device.dot_types
        return require(
            types is not None and element in types,
            "dot-type",
            f"no native {element} matrix instruction on {context.facts.device.name}",
            element=element,
        )

    return check


def package(name: str, minimum: tuple[int, ...] = ()) -> Condition:
    """A software package is present. Necessary, never sufficient."""

    def check(context: Context) -> Verdict:
        version = context.facts.software.get(name)
        if version is None:
            return reject("software", f"{name} is not installed", package=name)
        have = tuple(int(part) for part in version.split("+")[0].split(".")[:3] if part.isdigit())
        wanted = ".".join(map(str, minimum))
        return require(
            have >= minimum,
            "software",
            f"needs {name} {wanted} or newer, {version} is installed",
            package=name,
            version=version,
        )

    return check


def compiler() -> Condition:
    """A C compiler exists on this host."""

    def check(context: Context) -> Verdict:
        return require(
            context.facts.host.compiler is not None, "software", "no C compiler was found"
        )

    return check


def multiple_of(extent: str, step: int) -> Condition:
    """A named extent of the shape is a multiple of `step`."""

    def check(context: Context) -> Verdict:
        value = context.request.shape.get(extent)
        if value is None:
            return reject("shape", f"the request does not say {extent}", extent=extent)
        return require(
            value % step == 0,
            "shape",
            f"{extent} must be a multiple of {step}, it is {value}",
            extent=extent,
            value=value,
        )

    return check


def one_of(extent: str, values: tuple[int, ...]) -> Condition:
    """A named extent is one of a finite set that the kernel is instantiated for."""

    def check(context: Context) -> Verdict:
        value = context.request.shape.get(extent)
        listed = ", ".join(map(str, values))
        return require(
            value in values,
            "instantiation",
            f"{extent} is {value}; instantiated for {listed}",
            extent=extent,
            value=value,
        )

    return check


def at_most(extent: str, limit: int) -> Condition:
    """A named extent is known and not above `limit`."""

    def check(context: Context) -> Verdict:
        value = context.request.shape.get(extent)
        return require(
            value is not None and value <= limit,
            "shape",
            f"{extent} is {value}, the most is {limit}",
            extent=extent,
            value=value,
        )

    return check


def weight_schemes(*schemes: str) -> Condition:
    """Every weight at this site is stored in one of `schemes`."""

    def check(context: Context) -> Verdict:
        foreign = [scheme for scheme in context.request.schemes if scheme not in schemes]
        return require(
            not foreign,
            "weight-scheme",
            f"reads {', '.join(schemes)}, the checkpoint holds {', '.join(foreign)}",
            schemes=list(context.request.schemes),
        )

    return check


def custom(code: str, test: Callable[[Context], bool], message: str) -> Condition:
    """A predicate with its own test; `message` is the clause shown when it fails."""

    def check(context: Context) -> Verdict:
        return require(test(context), code, message)

    return check


def _dotted(pair: tuple[int, int] | None) -> str:
    return "unknown" if pair is None else f"{pair[0]}.{pair[1]}"
