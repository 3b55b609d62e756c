"""Ours beside the vendors' own kernels, on one card, on the same operands in one run.

    python benchmarks/vendors.py --out FOLDER [--libraries FOLDER ...]

FP8 products beside DeepGEMM (`fp8_gemm_nt`, block scales 1x128 and 128x128), routed experts beside
its grouped products (`m_grouped_fp8_gemm_nt_contiguous`), and sparse attention beside FlashMLA
(`flash_mla_sparse_fwd`, bf16 latents, 640 keys a query, sink). Each `--libraries`
folder holds packages to try, in order; one that cannot be imported, or that is wrong by its own
numbers, is told and not timed. Both sides are checked against float64, then timed in graphs,
interleaved, over rotated weights. Children compile every kernel beforehand, a matrix each, so that
timing waits for no compiler. ``vendors.json`` is written after each matrix; exit status 1 when
ours is wrong.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import json
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from v4_cases import MATRICES
from v4_kernels import ceilings

from metainfer.ops.attn_sparse import vendor_flash_mla
from metainfer.ops.linear.fp8 import chunk, quantise, stream
from metainfer.ops.moe_experts.choice import wgmma_for
from metainfer.ops.moe_experts.mxfp4 import experts, prepare

BAR = 0.01
"""Relative rms error that a bf16 result of FP8 operands stays well under."""

STREAMED = 32
"""Rows up to which our product quantises in the kernel that streams weights; the vendor's gets
its activations quantised, so at these sizes ours does more."""


def vendor(name: str, folders: list[Path]) -> tuple[Any, str]:
    """The module, or why there is none."""
    why = []
    for folder in [None, *folders]:
        if folder is not None:
            sys.path.insert(0, str(folder))
        try:
            return importlib.import_module(name), str(folder or "installed")
        except (ImportError, OSError, RuntimeError, AssertionError, AttributeError) as error:
            why.append(f"{folder or 'installed'}: {str(error).splitlines()[0][:160]}")
            for loaded in [key for key in sys.modules if key.partition(".")[0] == name]:
                del sys.modules[loaded]
            if folder is not None:
                sys.path.remove(str(folder))
    return None, "; ".join(why)


def paired(sides: dict[str, Callable[[int], object]], copies: int) -> dict[str, dict[str, float]]:
    """Median and MAD seconds of each side: one graph each over all copies, replayed in turn."""
    graphs = {}
    for name, call in sides.items():
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            call(0)
        torch.cuda.synchronize()
        graphs[name] = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graphs[name]):
            for i in range(2 * copies):
                call(i % copies)
        graphs[name].replay()
    times: dict[str, list[float]] = {name: [] for name in graphs}
    for _ in range(21):
        for name, graph in graphs.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            times[name].append(begin.elapsed_time(end) / 1e3 / (2 * copies))
    found = {}
    for name, seconds in times.items():
        median = statistics.median(seconds)
        mad = statistics.median(abs(s - median) for s in seconds)
        found[name] = {"median_s": median, "mad_s": mad}
    return found


def off(value: Tensor, truth: Tensor) -> float:
    return float((value[: len(truth)].double() - truth).norm() / truth.norm())


def products(
    deep_gemm: Any, rates: dict[str, float], names: Iterable[str]
) -> Iterator[dict[str, Any]]:
    for name in names:
        n, k = MATRICES[name]
        copies = max(2, min(8, -(-(200 << 20) // (n * k))))
        weights = []
        for _ in range(copies):
            data = (torch.randn(n, k, device="cuda") * 60).clamp(-448, 448)
            scale = torch.randint(110, 120, (-(-n // 128), k // 128), device="cuda")
            weights.append((data.to(torch.float8_e4m3fn), scale.to(torch.uint8)))
        wide = [torch.exp2(scale.float() - 127) for _, scale in weights]
        factor = wide[0].double().repeat_interleave(128, 0)[:n].repeat_interleave(128, 1)
        dense = weights[0][0].double() * factor
        for m in (1, 16, 128, 2048, 8192):
            x = torch.randn(m, k, device="cuda").to(torch.bfloat16)
            q, scales = quantise(x)
            rowwise = scales.T.contiguous()  # [m, k / 128]
            each = q[:512].double().view(-1, k // 128, 128) * rowwise[:512].double()[..., None]
            truth = each.flatten(1) @ dense.T
            sides: dict[str, Callable[[int], object]] = {}
            row: dict[str, Any] = {"op": f"fp8 product, {name}", "m": m, "n": n, "k": k}

            def ours(
                i: int,
                x: Tensor = x,
                q: Tensor = q,
                s: Tensor = scales,
                w: list[Any] = weights,
            ) -> Tensor:
                if len(x) <= STREAMED:
                    return stream(x, *w[i])
                return chunk(q, s, *w[i], dtype=torch.bfloat16)

            row["ours_error"] = off(ours(0), truth)
            if row["ours_error"] <= BAR:
                sides["ours"] = ours
            if deep_gemm is not None:
                out = torch.empty(m, n, device="cuda", dtype=torch.bfloat16)

                def theirs(
                    i: int,
                    q: Tensor = q,
                    a: Tensor = scales.T,  # neighbouring rows side by side, as it wants them
                    w: list[Any] = weights,
                    s: list[Tensor] = wide,
                    out: Tensor = out,
                ) -> Tensor:
                    deep_gemm.fp8_gemm_nt((q, a), (w[i][0], s[i]), out)
                    return out

                try:
                    row["deep_gemm_error"] = off(theirs(0), truth)
                    if row["deep_gemm_error"] <= BAR:
                        sides["deep_gemm"] = theirs
                except (RuntimeError, TypeError, AssertionError) as error:
                    row["deep_gemm_refused"] = str(error).splitlines()[0][:200]
            row["limit_s"] = max(
                (n * k + m * (k + 2 * n)) / rates["copy_bytes_s"],
                2.0 * m * n * k / rates["fp8_flops"],
            )
            yield finish(row, sides, copies)


def attention(flash_mla: Any, rates: dict[str, float]) -> Iterator[dict[str, Any]]:
    """640 keys a query: the vendor reads one list of rows; ours 128 of the window and 512 chosen,
    in pages, and turns the result back (inverse rope), which the vendor's leaves to others."""
    from v4_attention_cases import LATENT
    from v4_attention_cases import attention as works_of

    sparse = getattr(flash_mla, "flash_mla_sparse_fwd", None)
    # Releases of late 2026 keep Hopper's kernels in a second library.
    frozen = {}
    if sparse is not None and "use_legacy" in inspect.signature(sparse).parameters:
        frozen["use_legacy"] = torch.cuda.get_device_capability() < (10, 0)
    for queries, context in ((2048, 40_960), (8192, 40_960), (8192, 524_288)):
        row: dict[str, Any] = {"op": "sparse attention, bf16", "m": queries, "context": context}
        adapted = None if sparse is None else vendor_flash_mla.attn_sparse
        works = list(works_of(LATENT, queries, 1, context, 512, False, foreign=adapted))
        work = works[-1]  # as shapes choose
        mine = work.call(0)
        truth, recipe = work.truth()
        row["ours_error"], row["recipe_error"] = off(mine, truth), off(recipe, truth)
        sides: dict[str, Callable[[int], object]] = {}
        if row["ours_error"] <= max(1.25 * row["recipe_error"], BAR):
            sides["ours"] = work.call
        if sparse is not None:
            row["adapter_error"] = off(works[-2].call(0), truth)
            if row["adapter_error"] <= max(1.25 * row["recipe_error"], BAR):
                sides["adapter"] = works[-2].call
        if sparse is not None:
            entries = context // 4 + 128
            q = torch.randn(queries, 64, 512, device="cuda").to(torch.bfloat16)
            kv = torch.randn(entries, 1, 512, device="cuda").to(torch.bfloat16)
            picks = torch.randint(0, entries, (queries, 1, 640), device="cuda").int()
            sinks = torch.randn(64, device="cuda")

            def theirs(
                i: int, q: Tensor = q, kv: Tensor = kv, p: Tensor = picks, s: Tensor = sinks
            ) -> Tensor:
                out: Tensor = sparse(q, kv, p, 512**-0.5, 512, s, **frozen)[0]
                return out

            keys = kv[picks[:16, 0].long(), 0].double()  # [16, 640, 512]
            logits = torch.einsum("thd,tkd->thk", q[:16].double(), keys) * 512**-0.5
            full = torch.cat((logits, sinks.double().expand(16, -1)[..., None]), -1).softmax(-1)
            want = torch.einsum("thk,tkd->thd", full[..., :-1], keys)
            try:
                row["flash_mla_error"] = off(theirs(0), want)
                if row["flash_mla_error"] <= BAR:
                    sides["flash_mla"] = theirs
            except (RuntimeError, TypeError, AssertionError) as error:
                row["flash_mla_refused"] = str(error).splitlines()[0][:200]
        row["limit_s"] = 4.0 * queries * 640 * 64 * 512 / rates["bf16_flops"]
        yield finish(row, sides, 1)


def grouped(deep_gemm: Any, rates: dict[str, float]) -> Iterator[dict[str, Any]]:
    """Routed experts: ours whole, over MXFP4 weights (sorting, both products, SwiGLU, quantisation,
    sum); the vendor's two grouped products alone, over FP8 weights, rows sorted and padded."""
    from v4_cases import TOP, D, E, F, _experts_truth, _mx, _routes, _tokens

    up, down = _mx(E * 2 * F, D), _mx(E * D, F)
    packed, limit = (prepare(*up), prepare(*down)), 4.0
    gemm = getattr(deep_gemm, "m_grouped_fp8_gemm_nt_contiguous", None)
    held = []
    for n, k in ((2 * F, D), (D, F)) if gemm is not None else ():
        one = (torch.randn(n, k, device="cuda") * 60).clamp(-448, 448).to(torch.float8_e4m3fn)
        scale = torch.full((E, n // 128, k // 128), 2.0**-9, device="cuda")
        held.append((one.expand(E, n, k).contiguous(), scale))
    for tokens in (2048, 8192):
        x, (ids, routes) = _tokens(tokens, D), _routes(tokens)
        row: dict[str, Any] = {"op": "routed experts", "m": tokens}
        tile = wgmma_for(tokens * TOP, E, D, F)

        def ours(
            i: int, x: Tensor = x, ids: Tensor = ids, routes: Tensor = routes, tile: Any = tile
        ) -> Tensor:
            return experts(x, ids, routes, *packed, experts=E, limit=limit, tile=tile)

        truth, recipe = _experts_truth(x[:64], ids[:64], routes[:64], up, down, limit, True)
        row["ours_error"], row["recipe_error"] = off(ours(0), truth), off(recipe, truth)
        sides: dict[str, Callable[[int], object]] = {}
        if row["ours_error"] <= max(1.25 * row["recipe_error"], BAR):  # rounded between products
            sides["ours"] = ours
        if gemm is not None:
            counts = torch.bincount(ids.flatten().long(), minlength=E)
            padded = -(-counts // 128) * 128
            rows = int(padded.sum())
            of = torch.repeat_interleave(torch.arange(E, device="cuda"), padded).int()
            given = [
                quantise(torch.randn(rows, w.shape[2], device="cuda").to(torch.bfloat16))
                for w, _ in held
            ]
            outs = [
                torch.empty(rows, w.shape[1], device="cuda", dtype=torch.bfloat16) for w, _ in held
            ]

            def theirs(
                i: int, given: Any = given, outs: list[Tensor] = outs, of: Tensor = of
            ) -> list[Tensor]:
                for (q, scales), (w, s), out in zip(given, held, outs, strict=True):
                    gemm((q, scales.T), (w, s), out, of)
                return outs

            try:
                first = theirs(0)[0]
                q, scales = given[0]
                wide = scales.T[:64].double().repeat_interleave(128, 1)
                want = (q[:64].double() * wide) @ (held[0][0][0].double() * 2.0**-9).T
                row |= {"deep_gemm_error": off(first, want), "padded_pairs": rows}
                if row["deep_gemm_error"] <= BAR:
                    sides["deep_gemm"] = theirs
            except (RuntimeError, TypeError, AssertionError) as error:
                row["deep_gemm_refused"] = str(error).splitlines()[0][:200]
        row["limit_s"] = 6.0 * tokens * TOP * D * F / rates["fp8_flops"]
        yield finish(row, sides, 1)


def finish(
    row: dict[str, Any], sides: dict[str, Callable[[int], object]], copies: int
) -> dict[str, Any]:
    row |= paired(sides, copies) if sides else {}
    told = "  ".join(
        f"{name} {seconds * 1e6:.1f} us ({row['limit_s'] / seconds:.0%} of the limit)"
        for name in sides
        for seconds in [row[name]["median_s"]]
    )
    print(f"{row['op']:32s} m={row['m']:<6d} {told or row}", flush=True)
    return row


def compiled(libraries: list[Path]) -> None:
    """Every kernel of both sides in its cache on disk: a child for each matrix, all at once."""
    command = [sys.executable, __file__, "--libraries", *map(str, libraries), "--out", "."]
    children = [
        subprocess.Popen([*command, "--compile", name], stdout=subprocess.DEVNULL)
        for name in MATRICES
    ]
    for child in children:
        child.wait()


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--libraries", type=Path, nargs="*", default=[])
    parser.add_argument("--only", choices=("attention", "grouped", "products"))
    parser.add_argument("--compile", metavar="MATRIX", help="launch what its rows need, time none")
    args = parser.parse_args()
    deep_gemm, gemm_from = vendor("deep_gemm", args.libraries)
    if args.compile:
        idle = {"copy_bytes_s": 1.0, "fp8_flops": 1.0}
        list(products(deep_gemm, idle, [args.compile]))
        return 0
    args.out.mkdir(parents=True, exist_ok=True)
    if args.only in (None, "products"):
        compiled(args.libraries)
    flash_mla, mla_from = vendor("flash_mla", args.libraries)
    print(f"deep_gemm: {gemm_from}\nflash_mla: {mla_from}")
    rates = ceilings()
    report: dict[str, Any] = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "command": "python " + " ".join(sys.argv),
        "ceilings": rates,
        "deep_gemm": [getattr(deep_gemm, "__version__", None), gemm_from],
        "flash_mla": [getattr(flash_mla, "__version__", None), mla_from],
        "rows": [],
    }
    # Attention first: its rows are few, and nobody has seen them.
    parts = {
        "attention": attention(flash_mla, rates),
        "grouped": grouped(deep_gemm, rates),
        "products": products(deep_gemm, rates, MATRICES),
    }
    for row in chain(*(part for name, part in parts.items() if args.only in (None, name))):
        report["rows"].append(row)
        (args.out / "vendors.json").write_text(json.dumps(report, indent=1))
    return int(any("ours" not in row for row in report["rows"]))


if __name__ == "__main__":
    sys.exit(main())
