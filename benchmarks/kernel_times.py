"""Times of the sampler's kernels alone, decode attention by tile; `generation.py` runs it as one of its sections."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch
import triton

from attnrl.attention import paged_triton, paths_triton
from attnrl.attention.paged import hopper
from attnrl.attention.pages import PAGE, cut, pages_for
from attnrl.attention.trie import QUERY_BLOCK, Runs, query_blocks
from attnrl.local import fused_triton, products_triton

if hopper is not None:
    from attnrl.attention import back_hopper
    from attnrl.local import gated_hopper

HEADS, KV_HEADS, DIM = 12, 2, 128


def timed(run: Any, device: str) -> float:
    """Milliseconds of one call, the median."""
    if device == "cpu":
        run()
        return float("nan")
    return float(triton.testing.do_bench_cudagraph(run, rep=8, return_mode="median"))


def _pool(pages: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    keys = torch.randn(pages, KV_HEADS, PAGE, DIM, dtype=torch.bfloat16, device=device)
    return keys, torch.randn_like(keys)


TILES = ((1, 3), (1, 2), (1, 4), (2, 3), (2, 4), (4, 3), (4, 4))  # warps, stages


def _decode_all(pools: Any, q: Any, table: Any, lengths: Any, items: Any, tile: Any) -> None:
    for keys, values in pools:
        paged_triton.decode(q, keys, values, table, lengths, *items, scale=0.09, window=None, tile=tile)


def decode_times(tiny: bool, device: str) -> list[dict[str, Any]]:
    """Rows of one length, pages in random order, several layers' caches in turn so that the L2 holds none of them.

    The last case has groups of five rows that share 1,984 tokens.
    """
    out = []
    cases = ((2, 70, 0),) if tiny else ((256, 4224, 0), (64, 4096, 0), (8, 4096, 0), (256, 256, 0), (320, 2240, 62))
    for rows, length, shared in cases:
        columns = pages_for(length)
        table = torch.randperm(rows * columns, device=device).int().view(rows, columns)
        if shared:
            table[:, :shared] = table[::5, :shared].repeat_interleave(5, 0)
        pools = [_pool(rows * columns, device) for _ in range(1 if tiny else 4)]
        q = torch.randn(rows, HEADS, DIM, dtype=torch.bfloat16, device=device)
        lengths = torch.full((rows,), length - 1, device=device)
        groups = [(i, 5, shared) for i in range(0, rows, 5)] if shared else [(i, 1, 0) for i in range(rows)]
        for chunk in (64,) if tiny else (128, 256, 512, 832, 1024, 2112, 4224):
            if not tiny and (rows * length / chunk * KV_HEADS < 200 or (rows >= 64 and chunk < 256)):
                continue
            items = cut(groups, np.full(rows, length), chunk)
            single, splits = torch.from_numpy(items.single_I5).to(device), torch.from_numpy(items.splits_R).to(device)
            both = torch.from_numpy(items.shared_I5).to(device) if shared else None
            most = 1 << (int(items.splits_R.max()) - 1).bit_length()
            part = torch.empty(rows, most, HEADS, DIM, device=device)
            scratch = (part, torch.empty_like(part[..., 0]))
            for tile in TILES[: 1 if tiny else None]:
                call = partial(_decode_all, pools, q, table, lengths, (single, both, splits, scratch), tile)
                ms = timed(call, device) / len(pools)
                tokens = rows * length - sum((n - 1) * pages * PAGE for _, n, pages in groups)
                gbs = 4 * tokens * KV_HEADS * DIM / ms / 1e6
                out.append({"rows": rows, "length": length, "chunk": chunk, "tile": tile, "us": 1e3 * ms, "GB_s": gbs})
    return sorted(out, key=lambda row: (row["rows"], row["us"]))


def prefill_times(tiny: bool, device: str) -> list[dict[str, Any]]:
    """Contexts of one length, all new, by each kernel; aten's flash attention over as many keys, packed."""
    out: list[dict[str, Any]] = []
    for count, length in ((2, 70),) if tiny else ((4, 4096), (16, 1024), (2, 8192)):
        columns = pages_for(length)
        order = torch.randperm(count * columns, device=device).int().view(count, columns)
        keys, values = _pool(count * columns, device)
        q = torch.randn(count * length, HEADS, DIM, dtype=torch.bfloat16, device=device)
        blocks = np.concatenate([query_blocks(i * length, 0, length, i) for i in range(count)])
        blocks = blocks[np.argsort(-blocks[:, 2], kind="stable")].astype(np.int32)
        table = torch.from_numpy(blocks).to(device)
        kernels: dict[str, Any] = {
            "triton": partial(paths_triton.paths, q, keys, values, order, table, QUERY_BLOCK, scale=0.09, window=None)
        }
        if hopper is not None and hopper.fits(q, keys, values, None):
            kernels["hopper"] = partial(hopper.paths, q, keys, values, order, table, scale=0.09)
        if device == "cuda":
            k, v = (torch.randn(count * length, KV_HEADS, DIM, dtype=torch.bfloat16, device=device) for _ in range(2))
            cu = torch.arange(0, count * length + 1, length, dtype=torch.int32, device=device)
            packed = (q, k, v, cu, cu, length, length, 0.0, True, False)
            kernels["aten flash"] = partial(torch.ops.aten._flash_attention_forward, *packed, scale=0.09)
        for name, run in kernels.items():
            ms = timed(run, device)
            operations = 2 * count * HEADS * DIM * length * length
            out.append(
                {"contexts": count, "length": length, "kernel": name, "ms": ms, "TFLOP_s": operations / ms / 1e9}
            )
    return out


def path_times(tiny: bool, device: str) -> list[dict[str, Any]]:
    """Attention of learner and scorer, forward and back, by our kernels and by aten's: two packs, and a trunk with four
    branches; gradients count as two and a half times a forward's operations.
    """
    out: list[dict[str, Any]] = []
    heads, kv, dim = HEADS, KV_HEADS, DIM
    for name, fresh, lengths in (
        ("8 x 2,048", (2048,) * 8, (2048,) * 8),
        ("2 x 8,192", (8192,) * 2, (8192,) * 2),
        ("8,192 and 4 x 2,048 after 4,096", (8192, *[2048] * 4), (8192, *[6144] * 4)),
    ):
        runs = Runs(fresh, lengths)
        q = torch.randn(sum(fresh), heads, dim, dtype=torch.bfloat16, device=device)
        k, v = torch.randn(2, sum(lengths), kv, dim, dtype=torch.bfloat16, device=device)
        if tiny or hopper is None or not hopper.packed_fits(q, k, v):
            return out
        tables, most = runs.blocks(q.device), (*runs.ends(q.device), max(fresh), max(lengths))
        how = {"scale": dim**-0.5}
        result, lse, *rest = torch.ops.aten._flash_attention_forward(q, k, v, *most, 0.0, True, False, **how)
        gradient = torch.randn_like(result)
        known = (gradient, q, k, v, result, lse)
        calls = {
            "forward": partial(hopper.packed, q, k, v, *tables[:2], **how),
            "aten forward": partial(torch.ops.aten._flash_attention_forward, q, k, v, *most, 0.0, True, False, **how),
            "back": partial(back_hopper.back, *known, *tables, **how),
            "aten back": partial(torch.ops.aten._flash_attention_backward, *known, *most, 0.0, True, *rest[:2], **how),
        }
        operations = 4 * heads * dim * sum(new * (length - new / 2) for new, length in zip(fresh, lengths, strict=True))
        line: dict[str, Any] = {"paths": name}
        for kind, call in calls.items():
            ms = float(triton.testing.do_bench(call, return_mode="median"))
            times = 2.5 if kind.endswith("back") else 1.0
            line |= {f"{kind}, us": 1e3 * ms, f"{kind}, TFLOP/s": times * operations / ms / 1e9}
        out.append(line)
    return out


GATED = (products_triton.GATED, (32, 64, 8), (32, 128, 6), (16, 128, 6), (16, 256, 5))  # columns, inputs, stages


def product_times(tiny: bool, device: str) -> list[dict[str, Any]]:
    """Products of few tokens with a layer's weights beside the library's, over several layers' weights in turn; gate
    and up by tile.
    """
    out: list[dict[str, Any]] = []
    for name, width, inputs in (("output", 1536, 1536), ("gate, up", 8960, 1536), ("down", 1536, 8960)):
        n, k = (64, 64) if tiny else (width, inputs)
        gated = name == "gate, up"
        sizes = (n * (1 + gated), k)
        weights = [torch.randn(sizes, device=device).bfloat16() / k**0.5 for _ in range(1 if tiny else 8)]
        for rows in (8,) if tiny else (8, 32, 64, 128, 256):
            x = torch.randn(rows, k, device=device).bfloat16()

            def each(run: Any, x: Any = x, weights: Any = weights) -> float:
                """Microseconds of a product."""
                return 1e3 * timed(lambda: [run(x, weight) for weight in weights], device) / len(weights)

            ours: dict[str, Any] = {"": products_triton.summed_apart}
            if gated:
                ours = {f" {tile}": partial(products_triton.gated, tile=tile) for tile in GATED}
            line: dict[str, Any] = {"product": name, "rows": rows}
            line |= {f"us{tile}": each(run) for tile, run in ours.items()}
            out.append(line | {"library_us": each(_library_gated if gated else torch.nn.functional.linear)})
    return out


def _library_gated(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Gate and up by the library's product, then our activation."""
    return fused_triton.gate(*torch.nn.functional.linear(x, weight).chunk(2, -1))


def gated_times(tiny: bool, device: str) -> list[dict[str, Any]]:
    """Gate and up of many tokens: the library's product and our activation after it, and both in one kernel."""
    width, inner = (64, 64) if tiny else (1536, 8960)
    weight = (torch.randn(2 * inner, width, device=device) / width**0.5).bfloat16()
    out = []
    for tokens in (64,) if tiny else (16_384, 8192, 2048, 1024, 512, 384):
        x = torch.randn(tokens, width, device=device).bfloat16()
        line = {"tokens": tokens, "two kernels, us": 1e3 * timed(partial(_library_gated, x, weight), device)}
        if hopper is not None and gated_hopper.fits(x, weight):
            for wide in gated_hopper.STAGES:
                one = partial(gated_hopper.gated, x, weight, wide=wide)
                line[f"one kernel, {wide} columns, us"] = 1e3 * timed(one, device)
        out.append(line)
    return out
