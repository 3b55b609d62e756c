"""Weights from files or a seed, whole or a rank's part, to packed form."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from metainfer.core.errors import ModelError, RefusedError
from metainfer.executor.loading import (
    LoadedWeights,
    RankPart,
    Sharding,
    TensorSource,
    load_weights,
    tensor_source,
)
from metainfer.formats.block_codecs import BlockTensor
from metainfer.formats.export import export
from metainfer.formats.quant import RawTensor, Stored, dequantise, quantise
from metainfer.formats.random_source import RandomSource
from metainfer.kernels.impl import Layout
from metainfer.models.arch import WeightSpec
from metainfer.ops.linear.packed import PackedWeight
from metainfer.planner.opening import OpenedModel, open_model

FP4 = "random:tiny-deepseek-v4-fp4?layers=4&seed=5"
CPU = torch.device("cpu")
DENSE = Layout(id="dense@1", role="weight", pack="metainfer.ops.linear.packed:pack_dense")
LAYOUTS = {"weight": DENSE, "experts": DENSE}


def load(
    model: OpenedModel, source: TensorSource | None = None, dtype: torch.dtype = torch.float32,
    shard: Sharding | None = None,
) -> LoadedWeights:  # fmt: skip
    more = {} if shard is None else {"shard": shard}
    source = source or tensor_source(model, CPU)
    return load_weights(model.arch, source, LAYOUTS, dtype=dtype, device=CPU, **more)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = open_model(FP4)
    path = tmp_path_factory.mktemp("model") / "m"
    export(FP4, model.source.config, RandomSource(model.draws, 5), path, shard_bytes=1_000_000)
    return path


def same(a: LoadedWeights, b: LoadedWeights) -> bool:
    assert a.packed.keys() == b.packed.keys() and a.plain.keys() == b.plain.keys()
    pairs = [(a.packed[n].data["weight"], b.packed[n].data["weight"]) for n in a.packed]
    return all(torch.equal(x, y) and x.dtype == y.dtype
               for x, y in [*pairs, *((a.plain[n], b.plain[n]) for n in a.plain)])  # fmt: skip


def test_files_and_seed_give_the_same_weights(folder: Path) -> None:
    model = open_model(str(folder))
    loaded = load(model)
    assert same(loaded, load(open_model(FP4)))
    assert not same(loaded, load(open_model(FP4.replace("seed=5", "seed=6"))))
    source = tensor_source(model, CPU)
    parts = [source.read(f"layers.3.ffn.experts.{e}.{w}.weight") for e in (0, 1)
             for w in ("w1", "w3")]  # fmt: skip
    assert all(isinstance(part, BlockTensor) for part in parts)
    stacked = torch.cat([dequantise(part) for part in parts])
    assert torch.equal(loaded.packed["layers.3.w13"].data["weight"][: len(stacked)], stacked)


def test_small_parameters_keep_their_own_types(folder: Path) -> None:
    plain = load(open_model(str(folder)), dtype=torch.bfloat16).plain
    assert plain["layers.0.tid2eid"].dtype == torch.int64
    assert plain["layers.0.attn_norm"].dtype == torch.bfloat16
    for name in ("sinks", "hc_attn_fn", "hc_ffn_scale", "compress_norm", "ape"):
        assert plain[f"layers.3.{name}"].dtype == torch.float32, name
    ids = plain["layers.1.tid2eid"]
    assert all(len(set(row)) == 2 for row in ids.tolist()) and int(ids.min()) >= 0


@pytest.mark.parametrize("scheme", ["BF16", "F32"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_gate_is_narrow_only_where_its_numbers_are(scheme: str, dtype: torch.dtype) -> None:
    model, gate, wide = open_model(FP4), "layers.3.ffn.gate.weight", scheme == "F32"

    def stored(name: str, raw: Stored) -> Stored:
        if name != gate or not wide:
            return raw
        digits = dequantise(raw) * 1.001  # more than bfloat16 has
        return RawTensor("F32", tuple(digits.shape), digits)

    source = Recorder(tensor_source(model, CPU), stored)
    only = load_weights(model.arch, source, LAYOUTS, dtype=dtype, device=CPU,
                        only=lambda spec: spec.name == "layers.3.gate")  # fmt: skip
    found = only.plain["layers.3.gate"]
    narrow = not wide and dtype == torch.bfloat16
    assert found.dtype == (torch.bfloat16 if narrow else torch.float32)
    assert torch.equal(found.float(), dequantise(stored(gate, source.inner.read(gate))))


def test_progress_is_monotonic_and_complete(folder: Path) -> None:
    model, seen = open_model(str(folder)), []
    load_weights(model.arch, tensor_source(model, CPU), LAYOUTS, dtype=torch.float32, device=CPU,
                 progress=lambda done, total: seen.append((done, total)))  # fmt: skip
    assert seen == sorted(seen) and seen[-1][0] == seen[-1][1]
    specs = (*model.arch.packed_weights(), *model.arch.plain_weights())
    assert {total for _, total in seen} == {sum(math.prod(spec.shape) for spec in specs)}


class Recorder:
    """A source that notes what is asked of it, and may spoil one tensor."""

    def __init__(self, inner: TensorSource, spoil: Callable[[str, Stored], Stored] | None = None):
        self.inner, self.spoil = inner, spoil
        self.names: list[str] = []

    def read(self, name: str) -> Stored:
        self.names.append(name)
        raw = self.inner.read(name)
        return self.spoil(name, raw) if self.spoil else raw


CUTS = {
    "linear.wq_b": "rows", "out_group": "rows", "linear.wo_b": "columns",
    "linear.shared13": "rows", "linear.shared2": "columns", "linear.lm_head": "rows",
}  # fmt: skip


def shard_of(part: int, parts: int, experts: bool) -> Sharding:
    def shard(spec: WeightSpec) -> RankPart:
        if spec.role == "experts":
            cut = "experts" if experts else "rows" if spec.site.endswith("w13") else "columns"
        else:
            cut = CUTS.get(spec.site, "whole")
        return RankPart(cut, part, parts)  # type: ignore[arg-type]

    return shard


def joined(spec: WeightSpec, cut: str, parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """The whole matrix from the ranks' parts."""
    if cut == "columns":
        return torch.cat(list(parts), dim=1)
    if cut == "experts":
        return torch.cat(list(parts))
    rows = spec.rows or (spec.shape[0],)
    pieces = [part.split([r // len(parts) for r in rows]) for part in parts]
    return torch.cat([piece for group in zip(*pieces, strict=True) for piece in group])


@pytest.mark.parametrize("seeded", [False, True])
@pytest.mark.parametrize("experts", [False, True])
def test_ranks_together_hold_the_whole(folder: Path, experts: bool, seeded: bool) -> None:
    # With 128 rows or columns, two ranks would cut the FP8 blocks of these.
    uncut = {"linear.shared13", "linear.shared2", "out_group", "linear.wo_b"}
    model = open_model(FP4) if seeded else open_model(str(folder))

    def shard(rank: int) -> Sharding:
        inner = shard_of(rank, 2, experts)
        return lambda spec: RankPart() if spec.site in uncut else inner(spec)

    full = load(model)
    ranks = [load(model, shard=shard(rank)) for rank in (0, 1)]
    for spec in model.arch.packed_weights():
        want = full.packed[spec.name].data["weight"]
        parts = [rank.packed[spec.name].data["weight"] for rank in ranks]
        cut = shard(0)(spec).cut
        got = parts[0] if cut == "whole" else joined(spec, cut, parts)
        assert torch.equal(got, want), spec.name
        assert cut == "whole" or parts[0].numel() * 2 == want.numel()


def test_whole_experts_are_all_that_is_read(folder: Path) -> None:
    model = open_model(str(folder))
    recorder = Recorder(tensor_source(model, CPU))
    load(model, recorder, shard=lambda spec: RankPart("experts", 3, 4) if spec.role == "experts"
         else RankPart())  # fmt: skip
    asked = {name.split(".")[4] for name in recorder.names if ".ffn.experts." in name}
    assert asked == {"6", "7"}


def test_blocks_are_not_cut(folder: Path) -> None:
    model = open_model(str(folder))
    with pytest.raises(RefusedError, match=r"128 / 2 = 64 is not a multiple of the block of 128"):
        load(model, shard=shard_of(0, 2, True))


@pytest.mark.parametrize("scheme", ["BF16", "Q8_0"])
def test_parts_of_dense_and_ggml_tensors(scheme: str) -> None:
    values = torch.randn(12, 128, generator=torch.Generator().manual_seed(1))
    raw = RawTensor("BF16", (12, 128), values.bfloat16()) if scheme == "BF16" else quantise(
        values, scheme)  # fmt: skip

    class One:
        def read(self, name: str) -> Stored:
            return raw

    class Arch:
        def packed_weights(self) -> tuple[WeightSpec, ...]:
            return (WeightSpec("w", "linear.w", ("w",), (12, 128)),)

        def plain_weights(self) -> tuple[WeightSpec, ...]:
            return ()

    want = dequantise(raw)
    for cut, dim in (("rows", 0), ("columns", 1)):
        parts = [
            load_weights(Arch(), One(), LAYOUTS, dtype=torch.float32, device=CPU,  # type: ignore
                         shard=lambda spec, c=cut, r=r: RankPart(c, r, 4))
            .packed["w"].data["weight"]
            for r in range(4)
        ]  # fmt: skip
        assert torch.equal(torch.cat(parts, dim=dim), want)


def test_insane_scales_stop_the_load_by_name(folder: Path) -> None:
    inner = tensor_source(open_model(str(folder)), CPU)
    index = open_model(str(folder)).index
    assert index is not None
    info = index["layers.2.ffn.experts.4.w2.scale"]
    data = bytearray(info.file.read_bytes())
    copy = folder.with_name("spoiled")
    copy.mkdir()
    for path in folder.iterdir():
        copy.joinpath(path.name).write_bytes(path.read_bytes())
    data[info.offset + 3] = 255
    copy.joinpath(info.file.name).write_bytes(data)
    with pytest.raises(
        ModelError, match=r"1 of .* block scales of 'layers\.2\.ffn\.experts\.4\.w2"
    ):
        load(open_model(str(copy)))
    assert isinstance(inner.read("layers.2.ffn.experts.4.w2.weight"), BlockTensor)


def test_a_tensor_of_another_shape_is_named() -> None:
    model = open_model(FP4)

    def spoil(name: str, raw: Stored) -> Stored:
        if name != "layers.1.attn.wkv.weight" or isinstance(raw, RawTensor):
            return raw
        return RawTensor("F32", (63, 256), torch.zeros(63, 256))

    with pytest.raises(ModelError, match=r"layers\.1\.attn\.wkv\.weight has shape \[63, 256\]"):
        load(model, Recorder(tensor_source(model, CPU), spoil))


def test_a_loaded_model_does_not_hang_on_its_files(folder: Path) -> None:
    loaded = load(open_model(str(folder)), dtype=torch.bfloat16)  # as they are stored
    before = loaded.plain["norm"].clone(), loaded.packed["embed"].data["weight"].clone()
    kept = {path: path.read_bytes() for path in folder.glob("*.safetensors")}
    try:
        for path in kept:  # in place: a map would show it
            with path.open("r+b") as stream:
                stream.write(b"\xff" * len(kept[path]))
        assert torch.equal(loaded.plain["norm"], before[0])
        assert torch.equal(loaded.packed["embed"].data["weight"], before[1])
    finally:
        for path, data in kept.items():
            path.write_bytes(data)


def test_each_matrix_is_packed_by_its_role(folder: Path) -> None:
    model = open_model(str(folder))
    experts = Layout(id="mine@1", role="experts", pack="test_loading:pack_nothing")
    loaded = load_weights(
        model.arch, tensor_source(model, CPU), {"weight": DENSE, "experts": experts},
        dtype=torch.float32, device=CPU,
    )  # fmt: skip
    kinds = {weight.layout: weight.site for weight in loaded.packed.values()}
    assert set(kinds) == {"dense@1", "mine@1"} and kinds["mine@1"] == "experts.w2"
    assert json.loads((folder / "config.json").read_text())["expert_dtype"] == "fp4"


def pack_nothing(
    raws: Sequence[Stored], bias: torch.Tensor | None, *, dtype: torch.dtype,
    device: torch.device, site: str,
) -> PackedWeight:  # fmt: skip
    return PackedWeight("mine@1", (len(raws), 1), {}, None, site)
