"""What FCI costs: against plain attention, the dense way, and a scoring forward without it.

    python benchmarks/fci.py --out fci.json                      # everything, on one CUDA GPU, about 2 minutes
    python benchmarks/fci.py --out fci.json --sections model     # one part; others in the file stay
    python benchmarks/fci.py --out fci.json --table              # Markdown from the JSON, no GPU needed

Each section is written as soon as it is done. A section that fails is recorded with its error and the rest goes on.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from triton.runtime.errors import TritonError

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "scoring"))

from attnrl.attention import paths
from attnrl.attention.trie import apart
from attnrl.scoring.plan import Plan, make_plan

DTYPE = torch.bfloat16
SHAPES: dict[str, dict[str, int]] = {
    "0.5B": {"layers": 24, "heads": 14, "kv": 2, "head": 64, "width": 896, "inner": 4864},
    "1.5B": {"layers": 28, "heads": 12, "kv": 2, "head": 128, "width": 1536, "inner": 8960},
    "7B": {"layers": 28, "heads": 28, "kv": 4, "head": 128, "width": 3584, "inner": 18944},
}
LENGTHS = (1024, 2048, 4096, 8192, 16384, 32768)
VOCABULARY = 151936
PROMPT, STEP_TOKENS = 160, 45
# A kernel that does not compile or fit is a result, recorded with the others.
FAILURES = (RuntimeError, ValueError, TypeError, AttributeError, KeyError, AssertionError, ImportError, TritonError)


def spans_of(length: int, seed: int = 0, prompt: int = PROMPT) -> list[tuple[int, int]]:
    """Steps of 5 to 89 tokens, 45 on average, after a prompt of 160 tokens."""
    rng = np.random.default_rng(seed)
    token, spans = prompt, []
    while token < length:
        stop = min(length, token + int(rng.integers(5, 2 * STEP_TOKENS)))
        spans.append((token, stop))
        token = stop
    return spans


def layer(shape: dict[str, int], length: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, Plan]:
    generator = torch.Generator("cuda").manual_seed(seed)
    q, k, v = (
        torch.randn(length, n, shape["head"], device="cuda", dtype=DTYPE, generator=generator)
        for n in (shape["heads"], shape["kv"], shape["kv"])
    )
    return q, k, v, make_plan([length], [spans_of(length)])


def milliseconds(call: Callable[[], Any], runs: int = 7, warm: int = 3, inner: int = 10) -> float:
    """Median time of a call on the GPU, calls queued `inner` at a time so that the host's part is hidden."""
    for _ in range(warm):
        call()
    times = []
    for _ in range(runs):
        torch.cuda.synchronize()
        torch.cuda._sleep(20_000_000)  # about 10 ms for the host to run ahead
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(inner):
            call()
        stop.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(stop) / inner)
    return float(np.median(times))


def flash(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    out, lse, kind = paths.attend(q, k, v, apart((len(q),)), scale=q.shape[-1] ** -0.5)
    assert kind == paths.FLASH
    assert lse is not None
    return out, lse


def dense_way(q: torch.Tensor, k: torch.Tensor, plan: Plan) -> torch.Tensor:
    """The matrix in bfloat16, softmax, two products with the step matrix: scores [H, S]."""
    length, heads, head = q.shape
    key = k.repeat_interleave(heads // k.shape[1], 1).transpose(0, 1)
    scores = torch.matmul(q.transpose(0, 1), key.transpose(1, 2)) * head**-0.5
    mask = torch.full((length, length), float("-inf"), device=q.device, dtype=q.dtype).triu(1)
    p = torch.softmax(scores + mask, -1, dtype=torch.float32).to(q.dtype)
    del scores, mask
    steps = len(plan.step_S)
    owner = torch.from_numpy(np.repeat(np.arange(steps), plan.step_S[:, 1] - plan.step_S[:, 0])).to(q.device)
    matrix = torch.zeros(steps, length, device=q.device, dtype=q.dtype)
    at = torch.arange(int(plan.step_S[0, 0]), length, device=q.device)
    matrix[owner, at] = torch.from_numpy(plan.weight_T).to(q)[at]
    by_step = torch.einsum("qi,hij,kj->hqk", matrix, p, matrix)
    return torch.stack(
        [by_step[:, i + 4 :, i].sum(-1) if i + 4 < steps else by_step.new_zeros(heads) for i in range(steps)], -1
    )


def dense_float32(q: torch.Tensor, k: torch.Tensor, plan: Plan) -> torch.Tensor:
    """Scores [H, S] from the whole matrix in float32, head by head."""
    from attnrl.scoring.fci import _per_step

    length, heads, head = q.shape
    row = torch.arange(length, device=q.device)
    weight, qmin = (torch.from_numpy(x).to(q.device) for x in (plan.weight_T, plan.qmin_T))
    sums = []
    for h in range(heads):
        s = q[:, h].float() @ k[:, h * k.shape[1] // heads].float().T * head**-0.5
        p = s.masked_fill_(row[None, :] > row[:, None], float("-inf")).softmax(-1)
        sums.append((p * weight[:, None] * (row[:, None] >= qmin[None, :])).sum(0))
    return _per_step(torch.stack(sums), plan)


def tile_candidates() -> list[Any]:
    from attnrl.scoring.fci_triton import Tile

    sizes = [
        (128, 64, 8, 3, 0),
        (128, 64, 8, 2, 0),
        (128, 64, 8, 2, 80),
        (128, 64, 8, 3, 112),
        (128, 64, 8, 4, 0),
        (128, 128, 8, 2, 128),
        (128, 64, 4, 3, 0),
        (64, 128, 4, 2, 0),
        (64, 128, 4, 2, 128),
        (64, 128, 4, 3, 0),
        (64, 64, 4, 3, 0),
        (64, 64, 4, 3, 80),
        (64, 64, 4, 2, 96),
        (128, 32, 4, 4, 0),
        (256, 64, 8, 3, 128),
    ]
    hopper = [Tile(128, 64, 4, stages, kernel="gluon") for stages in (2, 3, 4)]
    return hopper + [Tile(n, m, w, s, registers=r) for n, m, w, s, r in sizes]


# Shape, tokens, and how many of the best tiles of that head size's first row to try (None: all).
TUNED = (
    ("1.5B", 8192, None),
    ("1.5B", 32768, 6),
    ("1.5B", 4096, 8),
    ("1.5B", 2048, 10),
    ("1.5B", 1024, 12),
    ("7B", 8192, 4),
    ("0.5B", 8192, None),
    ("0.5B", 32768, 6),
    ("0.5B", 1024, 10),
)


def tune(record: dict[str, Any]) -> None:
    """Every tile on one layer of each shape; the best by shape and length. What follows runs on the shipped tiles."""
    from attnrl.scoring.fci_launch import LayerSums
    from attnrl.scoring.fci_triton import Tile

    ranking: list[Tile] = []
    for name, length, keep in TUNED:
        shape = SHAPES[name]
        q, k, v, plan = layer(shape, length)
        _, lse = flash(q, k, v)
        args = {"scale": shape["head"] ** -0.5, "window": None, "softcap": None}
        want = LayerSums(plan, q.device).column_sums(q, k, lse, tile=Tile(), **args).clone()
        live = torch.from_numpy(plan.qmin_T < length).to(q.device)
        done: list[tuple[float, Tile]] = []
        rows: list[dict[str, Any]] = []
        for tile in tile_candidates() if keep is None else ranking[:keep]:
            sums = LayerSums(plan, q.device)
            started = time.perf_counter()
            try:
                got = sums.column_sums(q, k, lse, tile=tile, **args)
                error = float(((got - want)[:, live].norm() / want[:, live].norm()).item())
                compiled = time.perf_counter() - started
                ms = milliseconds(partial(sums.column_sums, q, k, lse, tile=tile, **args))
                rows.append({**asdict(tile), "ms": ms, "difference": error, "compile_s": compiled})
                done.append((ms, tile))
            except FAILURES as problem:  # a tile that does not fit is a result
                rows.append({**asdict(tile), "error": repr(problem)[:160]})
        done.sort(key=lambda row: row[0])
        if keep is None:
            ranking = [tile for _, tile in done]
        pairs = 2 * shape["head"] * shape["heads"] * float((length - plan.qmin_T[plan.qmin_T < length]).sum())
        record[f"{name}/{length}"] = {
            "tflops": pairs / done[0][0] / 1e9 if done else None,
            "rows": sorted(rows, key=lambda row: row.get("ms", float("inf"))),
        }


def correct(record: dict[str, Any]) -> None:
    """Relative errors against dense float64 over head layouts, dtypes, windows, soft-caps and ragged spans."""
    from kernel_grid import run_case, run_head_case

    from attnrl.scoring.fci_launch import HOPPER
    from attnrl.scoring.fci_triton import Tile

    ragged = [700, 33, 1, 260]
    cases: list[dict[str, Any]] = [
        {"heads": 12, "groups": 6, "head": 128, "dtype": "bfloat16"},
        {"heads": 14, "groups": 7, "head": 64, "dtype": "bfloat16", "delta": 1},
        {"heads": 4, "groups": 1, "head": 32, "dtype": "float16"},
        {"heads": 4, "groups": 4, "head": 256, "dtype": "bfloat16"},
        {"heads": 4, "groups": 2, "head": 80, "dtype": "float16", "key_reduce": "sum"},
        {"heads": 4, "groups": 2, "head": 128, "dtype": "float32"},
        {"heads": 4, "groups": 2, "head": 128, "dtype": "float32", "tile": Tile(64, 32, 4, 2, precision="tf32x3")},
        {"heads": 4, "groups": 2, "head": 256, "dtype": "float32", "window": 50},
        {"heads": 4, "groups": 2, "head": 64, "dtype": "bfloat16", "window": 100},
        {"heads": 4, "groups": 2, "head": 128, "dtype": "bfloat16", "softcap": 5.0, "window": 300},
        {"heads": 4, "groups": 2, "head": 128, "dtype": "bfloat16", "tile": Tile(128, 128, 8, 2, registers=128)},
        {"heads": 4, "groups": 2, "head": 128, "dtype": "bfloat16", "mean": 0.5, "gaps": True},
        {"heads": 12, "groups": 6, "head": 128, "dtype": "bfloat16", "tile": HOPPER},
        {"heads": 4, "groups": 2, "head": 128, "dtype": "float16", "tile": HOPPER, "delta": 1, "key_reduce": "sum"},
        {"heads": 4, "groups": 2, "head": 128, "dtype": "bfloat16", "tile": HOPPER, "window": 100},
        {"heads": 4, "groups": 2, "head": 128, "dtype": "bfloat16", "tile": HOPPER, "mean": 0.5, "gaps": True},
    ]
    record["head"] = [run_head_case("cuda", dtype, 151936, t) for dtype, t in (("float32", 1.0), ("bfloat16", 0.6))]
    record["cases"] = []
    for case in cases:
        try:
            tile = Tile(64, 32, 4, 2) if case["dtype"] == "float32" else Tile(128, 64, 8, 3)
            tile = Tile(32, 32, 4, 2) if case["head"] == 256 else tile
            record["cases"].append(run_case("cuda", **{"lengths": ragged, "mean": 12.0, "tile": tile, **case}))
        except FAILURES as problem:  # a failing case must not hide the others
            record["cases"].append({**{k: str(v) for k, v in case.items()}, "error": repr(problem)[:300]})


def attention(record: dict[str, Any]) -> None:
    """Packed attention on the GPU against eager one-by-one forwards, outputs and gradients, and its log-sum-exp."""
    generator = torch.Generator("cuda").manual_seed(1)
    lengths = (300, 1, 77, 512)
    for dtype, window, head in (
        (torch.bfloat16, None, 128),
        (torch.bfloat16, 64, 64),
        (torch.float32, None, 64),
        (torch.float32, 64, 64),
        (torch.float16, None, 80),
    ):
        q, k, v = (
            torch.randn(sum(lengths), n, head, device="cuda", generator=generator).to(dtype).requires_grad_()
            for n in (6, 2, 2)
        )
        out, lse, kind = paths.attend(q, k, v, apart(lengths), scale=head**-0.5, window=window)
        grads = torch.autograd.grad(out.float().square().sum(), (q, k, v))
        outs, lses = [], []
        q64, k64, v64 = (x.detach().double().requires_grad_() for x in (q, k, v))
        for start, stop in itertools.pairwise([0, *itertools.accumulate(lengths)]):
            key, value = (x[start:stop].repeat_interleave(3, 1).transpose(0, 1) for x in (k64, v64))
            s = paths.masked_scores(q64[start:stop].transpose(0, 1), key, 0, 0, head**-0.5, window, None)
            outs.append((s.softmax(-1) @ value).transpose(0, 1))
            lses.append(s.logsumexp(-1))
        want = torch.cat(outs)
        want_grads = torch.autograd.grad(want.square().sum(), (q64, k64, v64))
        record[f"{str(dtype)[6:]}/window{window}/d{head}"] = {
            "kind": kind,
            "out": float((out - want).norm() / want.norm()),
            "grads": [float((a - b).norm() / b.norm()) for a, b in zip(grads, want_grads, strict=True)],
            "lse": None if lse is None else float((lse - torch.cat(lses, 1)).abs().max()),
        }


def path(record: dict[str, Any]) -> None:
    """`attnrl.scoring.fci` and `score` of tiny float32 models, all on the GPU against all on the CPU."""
    from fci_oracle import CONFIGS, random_case, tiny

    from attnrl.scoring import fci, score
    from attnrl.types import ScoreRequest, Step, as_ids

    rng = np.random.default_rng(3)
    cases = [random_case(rng, n) for n in (150, 9, 67, 2)]
    ids, spans = [c[0] for c in cases], [c[1] for c in cases]
    requests = [
        ScoreRequest(as_ids(i[: s[0][0]]), as_ids(i[s[0][0] :]), tuple(Step(a - s[0][0], b - s[0][0]) for a, b in s))
        for i, s in cases
        if s
    ]
    for name in CONFIGS:
        net = tiny(name)
        want, want_scores = fci(net, ids, spans), score(net, requests)
        net = net.cuda()
        got, got_scores = fci(net, ids, spans), score(net, requests)
        pairs = list(zip(got_scores, want_scores, strict=True))
        record[name] = {
            "fci": max(float(np.abs(a - b).max(initial=0)) for a, b in zip(got, want, strict=True)),
            "score_fci": max(float(np.abs(a.fci - b.fci).max(initial=0)) for a, b in pairs),
            "logprobs": max(float(np.abs(a.logprobs - b.logprobs).max()) for a, b in pairs),
            "entropy": max(float(np.abs(a.entropy - b.entropy).max()) for a, b in pairs),
        }


def one_layer(name: str, length: int) -> dict[str, Any]:
    """Times, memory and errors of one attention layer."""
    from attnrl.scoring.fci_launch import LayerSums

    shape = SHAPES[name]
    q, k, v, plan = layer(shape, length)
    args = {"scale": shape["head"] ** -0.5, "window": None, "softcap": None}
    _, lse = flash(q, k, v)
    heads = LayerSums(plan, q.device, keep_heads=True)
    heads(q, k, lse, **args)
    run = LayerSums(plan, q.device)
    row: dict[str, Any] = {"steps": len(plan.step_S)}
    row["flash_ms"] = milliseconds(partial(flash, q, k, v))
    row["fci_ms"] = milliseconds(partial(run, q, k, lse, **args))
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    LayerSums(plan, q.device)(q, k, lse, **args)
    row["fci_MB"] = (torch.cuda.max_memory_allocated() - before) / 1e6
    want = dense_float32(q, k, plan) if length <= 8192 else None
    if want is not None:
        row["fci_error"] = float((heads.heads_LHS[0] - want).norm() / want.norm())
    if length <= (8192 if name == "7B" else 16384):
        row["dense_ms"] = milliseconds(partial(dense_way, q, k, plan), 3, 1, 1)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        dense = dense_way(q, k, plan).float()
        row["dense_MB"] = (torch.cuda.max_memory_allocated() - before) / 1e6
        if want is not None:
            row["dense_error"] = float((dense - want).norm() / want.norm())
        row["times_faster_than_dense"] = row["dense_ms"] / row["fci_ms"]
    return row


def layers(record: dict[str, Any]) -> None:
    """One layer: flash attention, FCI, and the dense way where it fits, for each shape and length."""
    from attnrl.scoring.fci_launch import _chosen

    for name in SHAPES:
        for length in LENGTHS:
            record[f"{name}/{length}"] = one_layer(name, length)
            torch.cuda.empty_cache()
    record["tiles"] = {key: asdict(tile) for key, tile in _chosen.items()}


def build(name: str) -> torch.nn.Module:
    """A Qwen2 of this shape with random weights."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    shape = SHAPES[name]
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=shape["width"],
        intermediate_size=shape["inner"],
        num_hidden_layers=shape["layers"],
        num_attention_heads=shape["heads"],
        num_key_value_heads=shape["kv"],
        max_position_embeddings=65536,
        tie_word_embeddings=name == "0.5B",
    )
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(DTYPE)
    try:
        with torch.device("cuda"):
            return Qwen2ForCausalLM(config).eval()
    finally:
        torch.set_default_dtype(before)


def one_model(net: torch.nn.Module, length: int) -> dict[str, Any]:
    """Scoring one response of this length with and without FCI, runs alternating; more of them where they are short."""
    from attnrl.scoring.scorer import ScoreReport, score
    from attnrl.types import ScoreRequest, Step, as_ids

    ids = np.random.default_rng(0).integers(0, VOCABULARY, length)
    steps = tuple(Step(a - PROMPT, b - PROMPT) for a, b in spans_of(length))
    requests = [ScoreRequest(as_ids(ids[:PROMPT]), as_ids(ids[PROMPT:]), steps)]
    run = partial(score, net, requests, token_budget=65536)
    ways: dict[str, dict[str, Any]] = {
        "plain": {"fci": False},
        "fci": {"fci": True},
    }
    times: dict[str, list[float]] = {way: [] for way in ways}
    row: dict[str, Any] = {}
    runs = 30 if length <= 8192 else 10
    for turn in range(2 + runs):
        for way, options in ways.items():
            torch.cuda.synchronize()
            report = ScoreReport()
            start = time.perf_counter()
            run(report=report, **options)
            if turn >= 2:
                times[way].append((time.perf_counter() - start) * 1000)
                row[f"{way}_reported_overhead"] = report.overhead
    for way, options in ways.items():
        row[f"{way}_ms"] = float(np.median(times[way]))
        row[f"{way}_ms_range"] = [min(times[way]), max(times[way])]
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run(**options)
        row[f"{way}_peak_MB"] = (torch.cuda.max_memory_allocated() - before) / 1e6
    row["ratio"] = row["fci_ms"] / row["plain_ms"]
    row["extra_MB"] = row["fci_peak_MB"] - row["plain_peak_MB"]
    row["kernels"] = profile(run)
    return row


def model(record: dict[str, Any]) -> None:
    """Whole-model scoring (body, log-probs, entropy) with and without FCI."""
    for name, lengths in (("1.5B", (8192, 32768)), ("0.5B", (8192,)), ("7B", (8192,))):
        net = build(name)
        for length in lengths:
            record[f"{name}/{length}"] = one_model(net, length)
        del net
        gc.collect()
        torch.cuda.empty_cache()


def profile(call: Callable[[], Any]) -> list[dict[str, Any]]:
    """GPU milliseconds by kernel of one call, the twelve largest."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as record_kernels

    with record_kernels(activities=[ProfilerActivity.CUDA]) as trace:
        call()
        torch.cuda.synchronize()
    rows = [
        {"kernel": e.key[:70], "calls": e.count, "ms": e.self_device_time_total / 1000} for e in trace.key_averages()
    ]
    return sorted(rows, key=lambda r: -r["ms"])[:12]


def branch(record: dict[str, Any], responses: int = 1000) -> None:
    """Branch points from the kernel on bfloat16 inputs against those of the dense float32 oracle."""
    from attnrl.algo.branching import fci as branch_rule
    from attnrl.scoring.fci_launch import HOPPER, LayerSums
    from attnrl.types import Prompt, Rollout, Scores, Step, Trunk, Verdict, as_floats, as_ids

    def points(values: np.ndarray, spans: list[tuple[int, int]], prompt_tokens: int, length: int) -> tuple[int, ...]:
        steps = tuple(Step(a - prompt_tokens, b - prompt_tokens) for a, b in spans)
        zeros = as_floats(np.zeros(length - prompt_tokens))
        rollout = Rollout(as_ids(np.zeros(length - prompt_tokens)), zeros, "stop", 0)
        trunk = Trunk(rollout, Verdict(1.0, "none"), steps, Scores(zeros, zeros, as_floats(values)))
        prompt = Prompt("p", as_ids(np.zeros(prompt_tokens)), ("1",))
        return branch_rule(prompt, trunk, np.random.default_rng(0))

    rng = np.random.default_rng(5)
    shape = {"heads": 4, "kv": 2, "head": 128}
    same, worst, layers_each = 0, 0.0, 2
    for index in range(0, responses, 20):
        lengths = [int(n) for n in rng.integers(300, 1500, min(20, responses - index))]
        prompts = [int(n) for n in rng.integers(20, 120, len(lengths))]
        spans = [spans_of(n, index + i, p) for i, (n, p) in enumerate(zip(lengths, prompts, strict=True))]
        plan = make_plan(lengths, spans)
        tile = HOPPER if index >= responses // 2 else None  # both kernels, half of the responses each
        sums = LayerSums(plan, torch.device("cuda"), tile=tile)
        oracle = torch.zeros(len(plan.step_S), device="cuda")
        for turn in range(layers_each):
            q, k, v, _ = layer(shape, sum(lengths), index * 10 + turn)
            q = q * (1 + turn)  # a flat and a peaked layer
            _, lse, _ = paths.attend(q, k, v, apart(lengths), scale=128**-0.5)
            sums(q, k, lse, scale=128**-0.5, window=None, softcap=None)
            want, at = [], 0
            for n, steps in zip(lengths, spans, strict=True):
                want.append(dense_float32(q[at : at + n], k[at : at + n], make_plan([n], [steps])).amax(0))
                at += n
            oracle = torch.maximum(oracle, torch.cat(want))
        got, dense = sums.best_S.cpu().numpy(), oracle.cpu().numpy()
        worst = max(worst, float(np.abs(got - dense).max() / dense.max()))
        at = 0
        for n, p, steps in zip(lengths, prompts, spans, strict=True):
            part = slice(at, at + len(steps))
            same += points(got[part], steps, p, n) == points(dense[part], steps, p, n)
            at += len(steps)
    record.update({"responses": responses, "equal": same / responses, "worst_error_of_max": worst})


SECTIONS: dict[str, Callable[[dict[str, Any]], None]] = {
    "correct": correct,
    "attention": attention,
    "path": path,
    "tune": tune,
    "model": model,
    "branch": branch,
    "layers": layers,
}


def environment() -> dict[str, Any]:
    import transformers
    import triton

    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return {
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "transformers": transformers.__version__,
        "commit": commit.stdout.strip() or None,
        "command": "python benchmarks/fci.py " + " ".join(Path(word).name for word in sys.argv[1:]),
    }


def table(results: dict[str, Any]) -> str:
    """The results as Markdown."""
    lines = ["| shape | tokens | scoring ms | with FCI ms | ratio | extra MB |", "|---|---|---|---|---|---|"]
    for key, row in results.get("model", {}).items():
        if isinstance(row, dict) and "ratio" in row:
            name, tokens = key.split("/")
            lines.append(
                f"| {name} | {int(tokens):,} | {row['plain_ms']:.1f} | {row['fci_ms']:.1f} | {row['ratio']:.3f} "
                f"| {row['extra_MB']:.1f} |"
            )
    lines += [
        "",
        "| one layer of | tokens | flash ms | FCI ms | dense ms | dense / FCI | FCI MB | dense MB | FCI error "
        "| dense error |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for key, row in results.get("layers", {}).items():
        if not isinstance(row, dict) or "fci_ms" not in row:
            continue
        name, tokens = key.split("/")
        cells = [
            f"{row['flash_ms']:.3f}",
            f"{row['fci_ms']:.3f}",
            f"{row['dense_ms']:.2f}" if "dense_ms" in row else "-",
            f"{row['times_faster_than_dense']:.0f}" if "dense_ms" in row else "-",
            f"{row['fci_MB']:.1f}",
            f"{row['dense_MB']:.0f}" if "dense_MB" in row else "-",
            f"{row['fci_error']:.1e}" if "fci_error" in row else "-",
            f"{row['dense_error']:.1e}" if "dense_error" in row else "-",
        ]
        lines.append(f"| {name} | {int(tokens):,} | " + " | ".join(cells) + " |")
    cases = [case for case in results.get("correct", {}).get("cases", []) if "relative_error" in case]
    if cases:
        worst = max(case["relative_error"] for case in cases)
        lines += ["", f"Largest relative error against float64 over {len(cases)} layouts: {worst:.1e}."]
    if "equal" in results.get("branch", {}):
        same, count = results["branch"]["equal"], results["branch"]["responses"]
        lines += ["", f"Branch points equal those of dense float32 on {same:.1%} of {count:,} random responses."]
    env = results.get("environment", {})
    lines += ["", f"`{env.get('command')}`, commit {env.get('commit')}, {env.get('gpu')}, torch {env.get('torch')}."]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write or extend")
    parser.add_argument("--sections", default=",".join(SECTIONS), help="comma list of " + ", ".join(SECTIONS))
    parser.add_argument("--commit", help="the commit under test, where the machine has no repository")
    parser.add_argument("--table", action="store_true", help="print Markdown from the file and stop")
    args = parser.parse_args()
    results: dict[str, Any] = json.loads(args.out.read_text()) if args.out.is_file() else {}
    if args.table:
        print(table(results))
        return
    if not torch.cuda.is_available():
        parser.error("a CUDA GPU is needed; --table works without")
    results["environment"] = environment()
    results["environment"]["commit"] = args.commit or results["environment"]["commit"]
    for name in args.sections.split(","):
        start = time.perf_counter()
        record: dict[str, Any] = {}
        try:
            SECTIONS[name](record)
        except FAILURES:  # one failing section must not lose the others
            record["error"] = traceback.format_exc()[-1500:]
        record["section_seconds"] = round(time.perf_counter() - start, 1)
        results[name] = record
        args.out.write_text(json.dumps(results, indent=1, default=str))
        print(name, json.dumps(record, default=str)[:3000], flush=True)
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
