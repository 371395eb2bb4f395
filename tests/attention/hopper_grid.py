"""The Hopper kernel, over pages and over packed keys, against dense attention; prints one JSON line a case.

python hopper_grid.py --cpu     # its source on a CPU, see `gluon_on_cpu`; without the option: compiled, on a Hopper GPU
"""

from __future__ import annotations

import json
import sys

import torch
from grids import dense

CPU = "--cpu" in sys.argv
if CPU:
    import gluon_on_cpu

    gluon_on_cpu.install()

from attnrl.attention import paths_hopper  # noqa: E402
from attnrl.attention.layout import query_blocks  # noqa: E402
from attnrl.attention.pages import PAGE, pages_for  # noqa: E402

DEVICE = "cpu" if CPU else "cuda"
Spans = list[tuple[int, int]]  # where a path's queries start and stop
EDGES: Spans = [(0, 1), (0, 33), (100, 230), (0, 290), (127, 128), (254, 257)]
LONG: Spans = [(0, n) for n in (1, 31, 32, 64, 65, 127, 128, 129, 255, 256, 257)] + [
    (60, 130),
    (1000, 1100),
    (333, 1777),
]


def worst(got: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((got.float() - wanted).abs().nan_to_num(torch.inf).max())


def draw(spans: Spans, heads: int, kv: int, dim: int) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """Packed queries, part of a wider product, their blocks, and each path's keys and values [2, S, K, D]."""
    torch.manual_seed(0)
    first, blocks, tokens = 0, [], []
    for path, (start, stop) in enumerate(spans):
        tokens.append(torch.randn(2, stop, kv, dim).to(DEVICE, torch.bfloat16))
        blocks.append(torch.from_numpy(query_blocks(first, start, stop, path)))
        first += stop - start
    blocks_B4 = torch.cat(blocks)
    blocks_B4 = blocks_B4[blocks_B4[:, 2].argsort(descending=True)].int().to(DEVICE)
    product = (1.5 * torch.randn(first, (heads + 2 * kv) * dim)).to(DEVICE, torch.bfloat16)
    return product[:, : heads * dim].view(first, heads, dim), blocks_B4, tokens


def wanted(q: torch.Tensor, spans: Spans, tokens: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """What dense attention gives for all paths: [T, H, D], and log-sum-exp [H, T]."""
    parts = q.split([stop - start for start, stop in spans])
    both = [dense(part.float(), *kv.float(), start) for part, kv, (start, _) in zip(parts, tokens, spans, strict=True)]
    return torch.cat([out for out, _ in both]), torch.cat([lse for _, lse in both], 1)


def paged(
    spans: Spans, heads: int, kv: int, dim: int, tile: tuple[int, int], programs: int | None
) -> dict[str, object]:
    """Paths in pages that lie in no order; every place without a token is NaN; queries are part of a wider product."""
    q, blocks_B4, tokens = draw(spans, heads, kv, dim)
    held = [pages_for(stop) for _, stop in spans]
    order = torch.split(torch.randperm(sum(held)) + 1, held)
    table = torch.zeros(len(spans), max(held), dtype=torch.int32)
    pools = q.new_full((2, sum(held) + 1, kv, PAGE, dim), torch.nan)
    for path, (mine, pages) in enumerate(zip(tokens, order, strict=True)):
        table[path, : len(pages)] = pages
        whole = q.new_full((2, len(pages) * PAGE, kv, dim), torch.nan)
        whole[:, : mine.shape[1]] = mine
        pools[:, pages.to(DEVICE)] = whole.unflatten(1, (len(pages), PAGE)).transpose(2, 3)
    out = paths_hopper.paths(
        q, *pools, table.to(DEVICE), blocks_B4, scale=dim**-0.5, programs=programs, tile=tile
    ).view_as(q)
    return {
        "error": worst(out, wanted(q, spans, tokens)[0]),
        "fits": paths_hopper.fits(q, *pools, None),
        "items": len(blocks_B4) * kv * ((heads // kv + 1) // 2),
    }


def packed(
    spans: Spans, heads: int, kv: int, dim: int, tile: tuple[int, int], programs: int | None
) -> dict[str, object]:
    """Paths end to end, rows of NaN between some of them and after the last; all are part of wider products."""
    q, blocks_B4, tokens = draw(spans, heads, kv, dim)
    starts, end = [], 3
    for path, (_, stop) in enumerate(spans):
        starts.append(end)
        end += stop + path % 3 * 5
    product = q.new_full((end + 7, 3 * kv * dim), torch.nan)
    k, v = (product[:, i * kv * dim : (i + 1) * kv * dim].view(-1, kv, dim) for i in (1, 2))
    for start, mine in zip(starts, tokens, strict=True):
        k[start : start + mine.shape[1]], v[start : start + mine.shape[1]] = mine
    starts_J = torch.tensor(starts, dtype=torch.int32, device=DEVICE)
    out, lse = paths_hopper.packed(q, k, v, starts_J, blocks_B4, scale=dim**-0.5, programs=programs, tile=tile)
    out_wanted, lse_wanted = wanted(q, spans, tokens)
    askew = product[:, 4 : 4 + kv * dim].view_as(k)
    return {
        "error": worst(out, out_wanted),
        "lse": worst(lse, lse_wanted),
        "fits": [paths_hopper.packed_fits(q, k, x) for x in (v, v.float(), v[:, :, : dim // 2], askew)],
        "items": len(blocks_B4) * kv * ((heads // kv + 1) // 2),
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    cases = [(EDGES, 4, 2, 128, (128, 2), 3), (EDGES[1:4], 6, 2, 64, (64, 3), 2), (EDGES[:2], 3, 1, 128, (128, 2), 1)]
    more = [(EDGES, 6, 2, 64, (128, 2), 3), (EDGES[2:], 6, 1, 128, (128, 2), 2), (EDGES[:3], 14, 2, 128, (64, 3), 5)]
    if not CPU:
        cases = [(LONG, heads, kv, 128, (128, 2), None) for heads, kv in ((12, 2), (32, 8), (28, 4))] + cases
        more = [
            (LONG, heads, kv, dim, (128, 2), None) for heads, kv, dim in ((12, 2, 128), (28, 4, 128), (14, 2, 64))
        ] + more
    for arguments in cases:
        print(json.dumps(paged(*arguments)))
    for arguments in more:
        print(json.dumps(packed(*arguments)))
