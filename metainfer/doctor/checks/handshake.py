"""The layout handshake: who reads another layer's cache must mean the same bytes (B-09)."""

from __future__ import annotations

from metainfer.core.errors import InternalError
from metainfer.doctor.finding import Finding, blocker
from metainfer.doctor.inputs import Inputs
from metainfer.kv.book.form import agree
from metainfer.kv.book.spec import CacheSpec

REMEDY = "Tell us: a model's description contradicts itself. No setting makes this cache right."


def check(inputs: Inputs) -> list[Finding]:
    if inputs.model is None:
        return []
    return handshake(inputs.model.caches)


def handshake(caches: tuple[CacheSpec, ...]) -> list[Finding]:
    """Every borrower against the layer that it borrows from."""
    owners = {(spec.layer, spec.name): spec for spec in caches if not spec.borrows}
    found = []
    for spec in caches:
        source = spec.kv_source if spec.kv_source is not None else spec.index_source
        if source is None:
            continue
        place = f"layer {spec.layer}, cache {spec.name}"
        owner = owners.get((source, spec.name))
        if owner is None:
            what = f"it reads the cache of layer {source}, which keeps none of that name."
            proof = f"{place}: source layer {source}"
            found.append(blocker("cache.handshake", place, what, REMEDY, proof))
            continue
        try:
            agree(owner.form, spec.form, place)
        except InternalError as error:
            what = f"what layer {source} writes is not what this layer reads."
            found.append(blocker("cache.handshake", place, what, REMEDY, str(error)))
    return found
