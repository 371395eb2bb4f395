"""FCI kernels against dense float64 attention over a grid; run under TRITON_INTERPRET=1 on a CPU, or on a GPU.

`python tests/scoring/kernel_grid.py` prints one JSON object per case.
"""

from __future__ import annotations

import json
import sys

import numpy as np
import torch

from attnrl.attention.scores import with_sinks
from attnrl.scoring.fci_launch import LayerSums, row_lse
from attnrl.scoring.fci_triton import Tile
from attnrl.scoring.head_triton import row_stats
from attnrl.scoring.plan import Plan, make_plan

SMALL = Tile(32, 16, 4, 1)


def random_spans(rng: np.random.Generator, length: int, mean: float, gaps: bool = False) -> list[tuple[int, int]]:
    """Ragged steps after a random prompt; with gaps, some tokens between steps belong to none."""
    token = int(rng.integers(1, max(2, length // 3)))
    spans = []
    while token < length:
        stop = min(length, token + 1 + int(rng.poisson(mean)))
        spans.append((token, stop))
        token = stop + (int(rng.integers(0, 3)) if gaps else 0)
    return spans


def dense_oracle(
    q_THD: torch.Tensor,
    k_TKD: torch.Tensor,
    plan: Plan,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks_H: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores [H, S] and log-sum-exp [H, T] from the whole matrix in float64, steps one by one as Eq. 5 is written."""
    q, k = q_THD.double(), k_TKD.double()
    heads, groups = q.shape[1], q.shape[1] // k.shape[1]
    y_HS = torch.zeros(heads, len(plan.step_S), dtype=torch.float64, device=q.device)
    lse_HT = torch.zeros(heads, len(q), dtype=torch.float64, device=q.device)
    for start, stop, first, last in plan.sequences:
        row = torch.arange(stop - start, device=q.device)
        hidden = row[None, :] > row[:, None]
        if window is not None:
            hidden |= row[:, None] - row[None, :] >= window
        for h in range(heads):
            s = q[start:stop, h] @ k[start:stop, h // groups].T * scale
            s = s if softcap is None else softcap * torch.tanh(s / softcap)
            s = s.masked_fill(hidden, float("-inf"))
            if sinks_H is not None:
                s = torch.cat([s, sinks_H[h].double().expand(len(s), 1)], 1)
            lse_HT[h, start:stop] = s.logsumexp(-1)
            p = s.softmax(-1)[:, : stop - start]
            spans = plan.step_S[first:last] - start
            by_step = torch.stack([p[a:b].mean(0) for a, b in spans]) if len(spans) else None
            for index, (a, b) in enumerate(spans):
                later = _delta(plan, first, index, last)
                if by_step is not None and later is not None:
                    total = by_step[later:, a:b].sum()
                    y_HS[h, first + index] = total / float(plan.divisor_S[first + index])
    return y_HS, lse_HT


def _delta(plan: Plan, first: int, index: int, last: int) -> int | None:
    """The first step, within the sequence, that the step at `index` influences."""
    query = plan.qmin_T[plan.step_S[first + index, 0]]
    found = np.flatnonzero(plan.step_S[first:last, 0] == query)
    return int(found[0]) if found.size else None


def run_case(
    device: str,
    *,
    lengths: list[int],
    heads: int,
    groups: int,
    head: int,
    dtype: str = "float32",
    window: int | None = None,
    softcap: float | None = None,
    sinks: bool = False,
    delta: int = 4,
    mean: float = 4.0,
    key_reduce: str = "mean",
    gaps: bool = False,
    tile: Tile | None = None,
    seed: int = 0,
    own_lse: bool = True,
    heads_first: bool = False,
) -> dict[str, object]:
    """Relative errors of one case: of the scores against float64 on the same inputs, and of the log-sum-exp."""
    rng = np.random.default_rng(seed)
    generator = torch.Generator().manual_seed(seed)
    total, scale = sum(lengths), head**-0.5
    q = (torch.randn(total, heads, head, generator=generator) * 2).to(getattr(torch, dtype)).to(device)
    k = torch.randn(total, heads // groups, head, generator=generator).to(getattr(torch, dtype)).to(device)
    if heads_first:  # one head's queries after the other in memory, as some models have them
        q, k = (x.transpose(0, 1).contiguous().transpose(0, 1) for x in (q, k))
    spans = [random_spans(rng, n, mean, gaps) for n in lengths]
    plan = make_plan(lengths, spans, delta=delta, key_reduce=key_reduce)  # type: ignore[arg-type]
    sinks_H = torch.linspace(-2, 4, heads, device=device) if sinks else None
    want_HS, lse64_HT = dense_oracle(q, k, plan, scale, window, softcap, sinks_H)
    lse_HT = row_lse(q, k, tuple(lengths), scale=scale, window=window, softcap=softcap)
    lse_HT = lse_HT if sinks_H is None else with_sinks(lse_HT, sinks_H)
    sums = LayerSums(plan, torch.device(device), keep_heads=True, tile=tile)
    given = None if own_lse else lse64_HT.float()
    sums(q, k, given, scale=scale, window=window, softcap=softcap, sinks_H=sinks_H)
    sums(q, k, given, scale=scale, window=window, softcap=softcap, sinks_H=sinks_H)  # the running max must not grow
    got_HS = sums.heads_LHS[-1].double()
    norm = max(float(want_HS.norm()), 1e-30)
    best = float((sums.best_S.double() - want_HS.amax(0)).norm() / norm)
    return {
        "kinds": sorted(sums.kinds),
        "head": head,
        "heads": heads,
        "groups": groups,
        "dtype": dtype,
        "window": window,
        "softcap": softcap,
        "delta": delta,
        "key_reduce": key_reduce,
        "tokens": total,
        "steps": len(plan.step_S),
        "relative_error": float((got_HS - want_HS).norm()) / norm,
        "relative_error_max": best,
        "lse_error": float((lse_HT.double() - lse64_HT).abs().max()),
        "norm": float(want_HS.norm()),
    }


def run_head_case(device: str, dtype: str, vocabulary: int, temperature: float) -> dict[str, object]:
    """Largest errors of the fused log-probs and entropy against float64; one token has logit -inf."""
    generator = torch.Generator().manual_seed(vocabulary)
    logits = (torch.randn(5, vocabulary, generator=generator) * 6).to(getattr(torch, dtype)).to(device)
    logits[:, 3] = float("-inf")
    targets = torch.randint(4, vocabulary, (5,), generator=generator).to(device)
    logprobs, entropy = row_stats(logits, targets, temperature)
    log_p = (logits.double() / temperature).log_softmax(-1)
    want = -torch.where(log_p.isinf(), 0.0, log_p.exp() * log_p).sum(-1)
    return {
        "head_kernel": dtype,
        "logprob_error": float((logprobs - log_p.gather(-1, targets[:, None])[:, 0]).abs().max()),
        "entropy_error": float((entropy - want).abs().max()),
        "entropy": float(want.mean()),
    }


def run_broken_case(device: str) -> dict[str, object]:
    """What a NaN among the queries does: the steps it would score are NaN, not 0; and a row of -inf logits at first."""
    q, k = torch.ones(40, 2, 32, device=device), torch.ones(40, 1, 32, device=device)
    q[20] = float("nan")
    plan = make_plan([40], [[(0, 10), (10, 20), (20, 30), (30, 40)]], delta=1)
    sums = LayerSums(plan, torch.device(device), tile=SMALL)
    lse = torch.zeros(2, 40, device=device)
    sums(q, k, lse, scale=1.0, window=None, softcap=None)
    logits = torch.full((1, 9000), float("-inf"), device=device)
    logits[0, 8995:] = torch.arange(5.0, device=device)
    logprobs, entropy = row_stats(logits, torch.tensor([8999], device=device))
    want = torch.arange(5.0).double().log_softmax(-1)
    return {
        "nan_steps": sums.best_S.isnan().tolist(),
        "late_logprob_error": float((logprobs.cpu() - want[-1]).abs().max()),
        "late_entropy_error": float((entropy.cpu() + (want.exp() * want).sum()).abs().max()),
    }


SMALL_GRID: list[dict[str, object]] = [
    {"lengths": [50, 7, 33], "heads": 4, "groups": 2, "head": 32},
    {"lengths": [61], "heads": 2, "groups": 1, "head": 64, "dtype": "bfloat16"},
    {"lengths": [40, 41], "heads": 2, "groups": 2, "head": 128, "dtype": "float16", "delta": 1},
    {"lengths": [45], "heads": 1, "groups": 1, "head": 256, "key_reduce": "sum"},
    {"lengths": [70, 20], "heads": 2, "groups": 1, "head": 32, "window": 9, "mean": 1.0},
    {"lengths": [66], "heads": 2, "groups": 2, "head": 32, "window": 40, "softcap": 1.5},
    {"lengths": [52, 1, 2], "heads": 3, "groups": 3, "head": 80, "softcap": 5.0, "dtype": "bfloat16"},
    {"lengths": [66], "heads": 4, "groups": 2, "head": 32, "window": 40, "sinks": True},
    {"lengths": [50, 7], "heads": 2, "groups": 2, "head": 32, "sinks": True, "own_lse": False},
    {"lengths": [90], "heads": 2, "groups": 1, "head": 32, "mean": 0.4, "gaps": True},
    {"lengths": [48], "heads": 2, "groups": 1, "head": 32, "tile": Tile(16, 32, 4, 1)},
    {"lengths": [30], "heads": 2, "groups": 1, "head": 16, "mean": 30.0},
]

if __name__ == "__main__":
    for case in SMALL_GRID:
        print(json.dumps(run_case("cpu", **{"tile": SMALL, **case})), flush=True)  # type: ignore[arg-type]
    for dtype, vocabulary, temperature in (("float32", 61, 1.0), ("bfloat16", 9000, 0.6)):
        print(json.dumps(run_head_case("cpu", dtype, vocabulary, temperature)), flush=True)
    print(json.dumps(run_broken_case("cpu")), flush=True)
    sys.exit(0)
