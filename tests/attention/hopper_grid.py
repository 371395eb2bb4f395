"""The Hopper kernel over pages against dense attention; prints one JSON line a case.

python hopper_grid.py --cpu     # its source on a CPU, see `gluon_on_cpu`; without the option: compiled, on a Hopper GPU
"""

from __future__ import annotations

import json
import sys

import torch

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


def dense(q_QHD: torch.Tensor, k_SKD: torch.Tensor, v_SKD: torch.Tensor, start: int) -> torch.Tensor:
    """Causal attention of queries from position `start` on, in float32: [Q, H, D]."""
    k, v = (x.float().repeat_interleave(q_QHD.shape[1] // x.shape[1], 1) for x in (k_SKD, v_SKD))
    scores = torch.einsum("qhd,shd->hqs", q_QHD.float(), k) * q_QHD.shape[2] ** -0.5
    positions = torch.arange(len(k), device=k.device)
    scores.masked_fill_(positions > positions[start : start + len(q_QHD), None], -torch.inf)
    return torch.einsum("hqs,shd->qhd", scores.softmax(-1), v)


def case(spans: Spans, heads: int, kv: int, dim: int, tile: tuple[int, int], programs: int | None) -> dict[str, object]:
    """Paths in pages that lie in no order; every place without a token is NaN; queries are part of a wider product."""
    torch.manual_seed(0)
    held = [pages_for(stop) for _, stop in spans]
    order = torch.split(torch.randperm(sum(held)) + 1, held)
    table = torch.zeros(len(spans), max(held), dtype=torch.int32)
    pools = torch.full((2, sum(held) + 1, kv, PAGE, dim), torch.nan)
    first, blocks, paths = 0, [], []
    for path, ((start, stop), pages) in enumerate(zip(spans, order, strict=True)):
        table[path, : len(pages)] = pages
        tokens = torch.full((2, len(pages) * PAGE, kv, dim), torch.nan)
        tokens[:, :stop] = torch.randn(2, stop, kv, dim)
        pools[:, pages] = tokens.unflatten(1, (len(pages), PAGE)).transpose(2, 3)
        paths.append((first, tokens[:, :stop].to(DEVICE, torch.bfloat16)))
        blocks.append(torch.from_numpy(query_blocks(first, start, stop, path)))
        first += stop - start
    blocks_B4 = torch.cat(blocks)
    blocks_B4 = blocks_B4[blocks_B4[:, 2].argsort(descending=True)].int().to(DEVICE)
    product = (1.5 * torch.randn(first, (heads + 2 * kv) * dim)).to(DEVICE, torch.bfloat16)
    q = product[:, : heads * dim].view(first, heads, dim)
    keys, values = pools.to(DEVICE, torch.bfloat16)
    fits = paths_hopper.fits(q, keys, values, None)
    out = paths_hopper.paths(
        q, keys, values, table.to(DEVICE), blocks_B4, scale=dim**-0.5, programs=programs, tile=tile
    ).view(first, heads, dim)
    worst = 0.0
    for (at, (k, v)), (start, stop) in zip(paths, spans, strict=True):
        mine = slice(at, at + stop - start)
        gap = (out[mine].float() - dense(q[mine], k, v, start)).abs()
        worst = max(worst, float(gap.nan_to_num(torch.inf).max()))
    return {"error": worst, "fits": fits, "items": len(blocks_B4) * kv * ((heads // kv + 1) // 2)}


if __name__ == "__main__":
    torch.set_num_threads(1)
    cases = [(EDGES, 4, 2, 128, (128, 2), 3), (EDGES[1:4], 6, 2, 64, (64, 3), 2), (EDGES[:2], 3, 1, 128, (128, 2), 1)]
    if not CPU:
        cases = [(LONG, heads, kv, 128, (128, 2), None) for heads, kv in ((12, 2), (32, 8), (28, 4))] + cases
    for arguments in cases:
        print(json.dumps(case(*arguments)))
