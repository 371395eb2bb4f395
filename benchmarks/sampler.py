"""The sampler against transformers' `generate`, and its checks and speed on a CUDA device. Writes and prints JSON.

    python benchmarks/sampler.py                # ratios to `generate` on this machine's CPU
    python benchmarks/sampler.py --device cuda  # graph, eager and CPU draw the same; tokens/s of a 25-60M model
    python benchmarks/sampler.py --device cuda --rows 2048 --output sampler.json

Both work on models with random weights: the cost of a token does not depend on them.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import platform
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from attnrl.local.sampler import Sampler
from attnrl.types import Request, Rollout, Sampling, as_ids

STOP = 1


def build(*, layers: int, width: int, heads: int, kv_heads: int, vocabulary: int, std: float = 0.05) -> Any:
    """A Qwen2 model with random weights."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=8 * width // 3 // 32 * 32,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=4096,
        initializer_range=std,
    )
    return Qwen2ForCausalLM(config).eval()


def workload(prompts: int, group: int, context: int, limits: tuple[int, int], vocabulary: int) -> list[Request]:
    """`group` requests for each of `prompts` contexts, with limits drawn evenly between the two."""
    rng = np.random.default_rng(0)
    contexts = [as_ids(rng.integers(2, vocabulary, context)) for _ in range(prompts)]
    drawn = rng.integers(limits[0], limits[1] + 1, prompts * group)
    return [Request(contexts[i // group], int(drawn[i]), seed=i) for i in range(prompts * group)]


def with_generate(model: Any, requests: list[Request], rows: int) -> None:
    """Runs `generate` over batches of `rows`, each as long as its longest request."""
    for start in range(0, len(requests), rows):
        batch = requests[start : start + rows]
        ids = torch.from_numpy(np.stack([r.context for r in batch])).long().to(model.device)
        most = max(r.max_tokens for r in batch)
        with torch.no_grad():
            model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=True,
                top_k=0,
                min_new_tokens=most,
                max_new_tokens=most,
                pad_token_id=0,
            )


def against_generate(model: Any, requests: list[Request], rows: int, repeats: int) -> dict[str, float]:
    """Seconds of `generate` over seconds of the sampler, by the wall and by CPU time (less disturbed by others).

    Both alternate in one process; the best of `repeats` counts.
    """
    sampler = Sampler(model, stop_ids=[], rows=rows)
    best: dict[str, list[float]] = {"generate": [math.inf, math.inf], "sampler": [math.inf, math.inf]}
    for _ in range(repeats):
        for name, times in best.items():
            begin = time.perf_counter(), time.process_time()
            if name == "generate":
                with_generate(model, requests, rows)
            else:
                sampler.generate(requests, Sampling(), version=0)
            times[0] = min(times[0], time.perf_counter() - begin[0])
            times[1] = min(times[1], time.process_time() - begin[1])
    return {
        "wall_ratio": best["generate"][0] / best["sampler"][0],
        "cpu_ratio": best["generate"][1] / best["sampler"][1],
        "tokens": sum(r.max_tokens for r in requests),
        "sampler_wall_seconds": best["sampler"][0],
        "generate_wall_seconds": best["generate"][0],
    }


def cpu_report(threads: int, rows: int, repeats: int) -> dict[str, Any]:
    """Ratios to `generate` for equal lengths (no row ever waits) and mixed lengths (its rows do)."""
    torch.set_num_threads(threads)
    model = build(layers=4, width=192, heads=6, kv_heads=2, vocabulary=100)
    equal = workload(rows // 8, 8, 64, (96, 96), 100)
    mixed = workload(rows // 4, 8, 64, (24, 192), 100)
    return {
        "parameters": sum(p.numel() for p in model.parameters()),
        "threads": threads,
        "rows": rows,
        "equal_lengths": against_generate(model, equal, rows, repeats),
        "mixed_lengths": against_generate(model, mixed, rows, repeats),
    }


def difference(a: list[Rollout], b: list[Rollout]) -> dict[str, float]:
    """Share of requests with the same tokens, and the largest log-prob difference up to the first that differs."""
    same, worst = 0, 0.0
    for x, y in zip(a, b, strict=True):
        n = min(len(x.ids), len(y.ids))
        split = int(np.argmax(np.append(x.ids[:n] != y.ids[:n], True)))
        same += split == len(x.ids) == len(y.ids)
        if split:
            worst = max(worst, float(np.abs(x.logprobs[:split] - y.logprobs[:split]).max()))
    return {"same_tokens": same / len(a), "largest_logprob_difference": worst}


def cuda_checks() -> dict[str, Any]:
    """A tiny float32 model: CUDA graphs, eager CUDA and CPU draw the same tokens with the same log-probs."""
    torch.backends.cuda.matmul.allow_tf32 = False
    model = build(layers=3, width=128, heads=4, kv_heads=2, vocabulary=97, std=0.2)
    requests = workload(12, 8, 40, (5, 90), 97)
    branches = [Request(as_ids(np.append(r.context, [5, 6, 7][: i % 4])), 60, 900 + i) for i, r in enumerate(requests)]
    requests += branches
    sampling = Sampling(temperature=0.8, top_p=0.95)
    on_cpu = Sampler(model, stop_ids=[STOP], rows=64).generate(requests, sampling, version=0)
    twin = copy.deepcopy(model).to("cuda")
    eager = Sampler(twin, stop_ids=[STOP], rows=64, cuda_graphs=False)
    graph = Sampler(twin, stop_ids=[STOP], rows=64, cuda_graphs=True)
    by_eager = eager.generate(requests, sampling, version=0)
    by_graph = graph.generate(requests, sampling, version=0)
    again = graph.generate(requests, sampling, version=0)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.mul_(1.05)  # in place: the graphs must see the new weights
    moved_eager = eager.generate(requests, sampling, version=1)
    moved_graph = graph.generate(requests, sampling, version=1)
    return {
        "graph_used": graph.stats.cuda_graph,
        "graph_vs_eager": difference(by_graph, by_eager),
        "graph_vs_cpu": difference(by_graph, on_cpu),
        "graph_twice": difference(by_graph, again),
        "graph_vs_eager_after_update": difference(moved_graph, moved_eager),
        "update_changed_tokens": difference(by_graph, moved_graph)["same_tokens"] < 1,
    }


def cuda_speed(rows: int, graphs: bool, layers: int, width: int) -> dict[str, Any]:
    """Tokens/s in bfloat16 with prompts of 128 tokens in groups of 8 and responses of 200 to 800 tokens."""
    model = build(layers=layers, width=width, heads=width // 64, kv_heads=width // 128, vocabulary=512)
    model = model.to("cuda", torch.bfloat16)
    requests = workload(rows // 8, 8, 128, (200, 800), 512)
    sampler = Sampler(model, stop_ids=[], rows=rows, cuda_graphs=graphs)
    sampler.generate(requests, Sampling(), version=0)
    first = sampler.stats.as_dict()
    sampler.generate(requests, Sampling(), version=0)
    torch.cuda.synchronize()
    second = sampler.stats.as_dict()
    return {
        "parameters": sum(p.numel() for p in model.parameters()),
        "first_call_seconds": first["seconds"],
        "graphs_captured": first["cuda_graphs_captured"],
        "peak_bytes": torch.cuda.max_memory_allocated(),
        **second,
    }


def cuda_report(rows: int) -> dict[str, Any]:
    """Checks and speeds; a part that fails is reported with its error, and the others still run."""
    parts = {
        "checks": cuda_checks,
        "speed_24M_graph": lambda: cuda_speed(rows, True, layers=8, width=512),
        "speed_24M_eager": lambda: cuda_speed(rows, False, layers=8, width=512),
        "speed_54M_graph": lambda: cuda_speed(rows, True, layers=8, width=768),
    }
    report: dict[str, Any] = {"device": torch.cuda.get_device_name(), "rows": rows}
    for name, part in parts.items():
        begin = time.perf_counter()
        try:
            report[name] = part()
        except (RuntimeError, ValueError, AssertionError) as error:
            report[name] = {"error": f"{type(error).__name__}: {error}"}
        report[f"{name}_seconds"] = time.perf_counter() - begin
        torch.cuda.empty_cache()
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--rows", type=int, help="requests that run at once (CPU 192, CUDA 1024)")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="CPU threads")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each, the best counts (CPU)")
    parser.add_argument("--output", type=Path, help="also write the JSON here")
    args = parser.parse_args()
    cuda = args.device == "cuda"
    report = cuda_report(args.rows or 1024) if cuda else cpu_report(args.threads, args.rows or 192, args.repeats)
    report = {"torch": torch.__version__, "python": platform.python_version(), **report}
    text = json.dumps(report, indent=2)
    print(text)
    if args.output:
        args.output.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
