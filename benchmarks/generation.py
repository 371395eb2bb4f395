"""Generation over short and long contexts at the 1.5B Qwen2 shape: speed, decode steps, memory and exactness. JSON.

    python benchmarks/generation.py --out generation.json                       # every section, one CUDA device
    python benchmarks/generation.py --out x.json --sections steps,work --work 0,3
    python benchmarks/generation.py --out x.json --tiny --device cpu            # a rehearsal: no number means anything

Random weights in bfloat16; no response ends early. Sections:
exact    a tiny float32 model: graph, eager and CPU draw the same; log-probs in bfloat16 are `agreement.py`'s
kernels  decode and prefill attention alone, by tile, and the learner's: time, bytes/s, operations/s
steps    milliseconds of one decode step (the second call: graphs are captured)
profile  kernels of one decode step
vllm     the calls of `work` by vLLM, where it is installed, dummy weights, prefix caching on; give it before `work`
work     tokens/s of whole calls in a fresh sampler each: prefill and capture included, compiling not; against vLLM's
         where it ran before in this run
trained  the last call of `work` by a trained model (--trained DIR), beside the same shape with random weights: whether
         the fused forward is taken, and what is said where it is not
remembering  a model of Qwen3.5's layers (0.8B, random weights): 256 x (128 + 256) and 64 x (2,048 + 128), over pages
         with captured steps, over pages without, and over slots
mixed    1,024 requests of mixed length, 512 at a time: speed against equal lengths, pages held against tokens alive;
         lengths as those of the real transcripts (`iteration.py`), scaled to the limit
A section that fails is reported with its error, and the others still run.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import tempfile
import time
import traceback
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
)

from attnrl.local.models import prepare_model
from attnrl.local.sampler import Sampler
from attnrl.types import Request, Rollout, Sampling, as_ids
from iteration import MEAN, SIGMA
from record import record, write

SHAPE = {
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "num_hidden_layers": 28,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "vocab_size": 151936,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": True,
}
SMALL = {**SHAPE, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9}
SMALL |= {"num_key_value_heads": 3, "vocab_size": 49152}
TINY = {**SHAPE, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
TINY |= {"vocab_size": 199}
# name, requests, context, new tokens, tokens of the context that each five requests share
WORK = [
    ("256x(128+256)", 256, 128, 256, 0),
    ("1024x(128+512)", 1024, 128, 512, 0),
    ("256x(128+2048)", 256, 128, 2048, 0),
    ("64x(4096+512)", 64, 4096, 512, 0),
    ("256x(4096+256)", 256, 4096, 256, 0),
    ("320 branches, 5 share 2000, +512", 320, 2001, 512, 2000),
    ("8x(4096+256)", 8, 4096, 256, 0),
    ("135M 2048x(64+256)", 2048, 64, 256, 0),
]
REMEMBERING = {  # three layers of four carry a state
    "vocab_size": 248_320,
    "hidden_size": 1024,
    "intermediate_size": 3584,
    "num_hidden_layers": 24,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 16,
    "max_position_embeddings": 131_072,
    "tie_word_embeddings": True,
}
TINY_REMEMBERING = REMEMBERING | {"vocab_size": 199, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4}
TINY_REMEMBERING |= {"head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 2}
REMEMBERED = [("256x(128+256)", 256, 128, 256), ("64x(2048+128)", 64, 2048, 128)]
WAYS: dict[str, dict[str, Any]] = {"pages": {"paged": True}, "slots": {"paged": False}}
STEPS = [(64, 4096), (8, 4096), (256, 128)]
# requests, context and shared tokens of the calls that compile what any number of rows takes
COMPILED = ((10, 64, 0), (10, 640, 600), (10, 640, 0), (30, 64, 0), (60, 64, 0))


def build(shape: dict[str, Any], device: str, dtype: torch.dtype = torch.bfloat16, wide: bool = True) -> Any:
    """A Qwen2 model with random weights; `wide`: `engine.local.float32_logits`."""
    torch.manual_seed(0)
    with torch.device(device):
        return prepare_model(Qwen2ForCausalLM(Qwen2Config(**shape)).to(dtype), float32_logits=wide)


def contexts(count: int, length: int, shared: int, vocabulary: int, rng: np.random.Generator) -> list[Any]:
    rows, base = [], None
    for i in range(count):
        if shared and i % 5 == 0:
            base = rng.integers(2, vocabulary, shared)
        fresh = rng.integers(2, vocabulary, length - shared)
        rows.append(as_ids(fresh if base is None else np.concatenate([base, fresh])))
    return rows


class Bench:
    """The sections, over one model."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.device, self.tiny, self.folder = args.device, args.tiny, args.trained
        self.cuda = args.device == "cuda"
        self.wide = args.float32_logits
        self.paged = {"paged": True} if not self.cuda else {}
        self.only = [int(i) for i in args.work.split(",")] if args.work else range(len(WORK))
        self.scale = 16 if args.tiny else 1
        self.shape = TINY if args.tiny else SHAPE
        self.vocabulary = self.shape["vocab_size"]
        self.rng = np.random.default_rng(0)
        self.models: dict[str, Any] = {}
        self.compiled: set[str] = set()  # of the models
        self.rival: dict[int, float] = {}  # tokens/s of vLLM in this run, by row of the table

    def model(self, name: str = "1.5B") -> Any:
        if name not in self.models:
            self.models.clear()
            self.free()
            shape = TINY if self.tiny else {"1.5B": SHAPE, "135M": SMALL}[name]
            self.models[name] = build(shape, self.device, wide=self.wide)
        return self.models[name]

    def free(self) -> None:
        gc.collect()
        if self.cuda:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

    def wait(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()

    def requests(self, count: int, context: int, new: int, shared: int, vocabulary: int) -> list[Request]:
        count, context, new, shared = (-(-n // self.scale) for n in (count, context, new, shared))
        rows = contexts(count, context + bool(shared), shared, vocabulary, self.rng)
        return [Request(row, new, seed=i) for i, row in enumerate(rows)]

    def exact(self) -> dict[str, Any]:
        torch.backends.cuda.matmul.allow_tf32 = False
        shape = {**TINY, "hidden_size": 128, "num_attention_heads": 6, "initializer_range": 0.2}
        tiny = build({**shape, "head_dim": 32}, "cpu", torch.float32)
        rows = contexts(40, 330, 300, 199, self.rng) + contexts(20, 40, 0, 199, self.rng)
        requests = [Request(row, 20 + i, seed=i) for i, row in enumerate(rows)]
        report: dict[str, Any] = {}
        for name, sampling in (
            ("plain", Sampling(temperature=0.8)),
            ("top-p", Sampling(0.6, 0.95)),
            ("top-k", Sampling(1.0, 1.0, 40)),
        ):
            on_cpu = Sampler(tiny, stop_ids=[1], rows=16).generate(requests, sampling, version=0)
            twin = build({**shape, "head_dim": 32}, self.device, torch.float32)
            twin.load_state_dict(tiny.state_dict())
            graph = Sampler(twin, stop_ids=[1], rows=32, **self.paged)
            eager = Sampler(twin, stop_ids=[1], rows=64, cuda_graphs=False, **self.paged)
            by_graph = graph.generate(requests, sampling, version=0)
            report[name] = {
                "fused": graph.stats.fused,
                "graph": graph.stats.cuda_graph,
                "graph_vs_cpu": difference(by_graph, on_cpu),
                "graph_vs_eager": difference(by_graph, eager.generate(requests, sampling, version=0)),
                "graph_twice": difference(by_graph, graph.generate(requests, sampling, version=0)),
            }
            with torch.no_grad():
                for parameter in twin.parameters():
                    parameter.mul_(1.05)  # in place: graphs and copies must see the new weights
            moved = graph.generate(requests, sampling, version=1)
            report[name]["after_update"] = difference(moved, eager.generate(requests, sampling, version=1))
            report[name]["update_changed_tokens"] = difference(by_graph, moved)["same_tokens"] < 1
        return report

    def kernels(self) -> dict[str, Any]:
        from kernel_times import decode_times, gated_times, path_times, prefill_times, product_times

        times = {"decode": decode_times, "prefill": prefill_times, "products": product_times, "gated": gated_times}
        times["paths"] = path_times
        return {name: measure(self.tiny, self.device) for name, measure in times.items()}

    def steps(self) -> list[dict[str, Any]]:
        out = []
        for rows, context, sampling in [(*step, Sampling()) for step in STEPS] + [(256, 128, Sampling(0.6, 0.95))]:
            requests = self.requests(rows, context, 80 * self.scale, 0, self.vocabulary)
            sampler = Sampler(self.model(), stop_ids=[], rows=rows, **self.paged)
            sampler.generate(requests, sampling, version=0)
            sampler.generate(requests, sampling, version=0)
            stats = sampler.stats
            taken = stats.seconds - stats.prefill_seconds
            line = {"rows": rows, "context": context, "top_p": sampling.top_p, "ms": 1e3 * taken / stats.steps}
            line |= {"prefill_tokens_s": stats.prefilled_tokens / stats.prefill_seconds}
            line |= {"fused": stats.fused, "graph": stats.cuda_graph, "shape": str(sampler.batch._state.shape)}  # type: ignore[attr-defined]
            out.append(line)
            print(line, flush=True)
            sampler.close()
            self.free()
        return out

    def profile(self) -> dict[str, Any]:
        from torch.profiler import ProfilerActivity, profile

        tables = {}
        for rows, context, shared in ((64, 4096, 0), (8, 4096, 0), (256, 128, 0), (320, 2001, 2000)):
            sampler = Sampler(self.model(), stop_ids=[], rows=rows, **self.paged)
            short = self.requests(rows, context, 33 * self.scale, shared, self.vocabulary)
            sampler.generate(short, Sampling(), version=0)
            kinds = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if self.cuda else [])
            with profile(activities=kinds) as run:
                sampler.generate(short, Sampling(), version=0)
            table = [
                (e.key[:90], e.count, round(e.self_device_time_total / 1e3, 3))
                for e in run.key_averages()
                if e.self_device_time_total > 0
            ]
            tables[f"{rows}x{context}, 32 steps and the prefill"] = sorted(table, key=lambda row: -row[2])[:32]
            sampler.close()
            self.free()
        return tables

    def vllm(self) -> list[dict[str, Any]]:
        """A warm call first; the time to start does not count."""
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"  # in this process it would keep its memory from `work`
        from vllm import LLM, SamplingParams

        out: list[dict[str, Any]] = []
        for size, shape in (("1.5B", TINY if self.tiny else SHAPE), ("135M", TINY if self.tiny else SMALL)):
            mine = [i for i in self.only if WORK[i][0].startswith("135M") == (size == "135M")]
            if not mine:
                continue
            with tempfile.TemporaryDirectory() as folder:
                config = Qwen2Config(**shape, architectures=["Qwen2ForCausalLM"], dtype="bfloat16", eos_token_id=1)
                config.save_pretrained(folder)
                how = {"enable_prefix_caching": True, "max_num_seqs": 2048 if size == "135M" else 1024}
                how |= {"gpu_memory_utilization": 0.85} if self.cuda else {}
                engine = LLM(
                    folder, skip_tokenizer_init=True, load_format="dummy", dtype="bfloat16", max_model_len=8192, **how
                )
                for i in [-1, *mine]:
                    name, *work = ("warm", 64, 128, 64, 0) if i < 0 else WORK[i]
                    requests = self.requests(*work, shape["vocab_size"])
                    new = {"max_tokens": requests[0].max_tokens, "min_tokens": requests[0].max_tokens}
                    asked = SamplingParams(temperature=1.0, ignore_eos=True, logprobs=0, detokenize=False, **new)
                    begin = time.perf_counter()
                    engine.generate([{"prompt_token_ids": r.context.tolist()} for r in requests], asked, use_tqdm=False)
                    took = time.perf_counter() - begin
                    tokens = len(requests) * requests[0].max_tokens
                    if i >= 0:
                        out.append({"work": name, "s": round(took, 3), "tok_s": round(tokens / took)})
                        self.rival[i] = out[-1]["tok_s"]
                        print("vllm", out[-1], flush=True)
            del engine
            self.free()
        return out

    def work(self) -> list[dict[str, Any]]:
        """A call of a fresh sampler, which allocates and captures its graphs in it, and one more with new contexts."""
        out = []
        for i in self.only:
            name, count, context, new, shared = WORK[i]
            size = "135M" if name.startswith("135M") else "1.5B"
            model = self.model(size)
            if size not in self.compiled:
                self.compile(model)
                self.compiled.add(size)
            self.compile(model, [(-(-count // self.scale), 40, 0)])  # what so many rows take
            line, stats = self.timed(model, count, context, new, shared)
            line = {"work": name, **line}
            if rival := self.rival.get(i):
                ratios = (round(line[speed] / rival, 2) for speed in ("tok_s", "again_tok_s"))
                line |= dict(zip(("over_vllm", "again_over"), ratios, strict=True))
            print(line, round(stats.prefill_seconds, 2), flush=True)
            out.append(line | {"stats": stats.as_dict()})
        return out

    def timed(
        self, model: Any, count: int, context: int, new: int, shared: int, **way: Any
    ) -> tuple[dict[str, Any], Any]:
        """Seconds and tokens/s of the first and the second call of a fresh sampler, and its record of the latter."""
        sampler = Sampler(model, stop_ids=[], rows=count, **(way or self.paged))
        took, speeds = [], []
        for _ in range(2):
            requests = self.requests(count, context, new, shared, model.config.vocab_size)
            self.wait()
            begin = time.perf_counter()
            sampler.generate(requests, Sampling(), version=0)
            self.wait()
            took.append(time.perf_counter() - begin)
            speeds.append(round(sampler.stats.drawn_tokens / took[-1]))
        line = {"s": round(took[0], 3), "tok_s": speeds[0], "again_tok_s": speeds[1]}
        sampler.close()
        self.free()
        return line, sampler.stats

    def trained(self) -> dict[str, Any]:
        if self.folder is None:
            raise ValueError("--trained names the folder of the model")
        config = AutoConfig.from_pretrained(self.folder)
        _, *work = WORK[-1]
        found: dict[str, Any] = {}
        for name in ("trained", "random"):
            self.models.clear()
            self.free()
            torch.manual_seed(0)
            made = AutoModelForCausalLM.from_pretrained if name == "trained" else AutoModelForCausalLM.from_config
            model = made(self.folder if name == "trained" else config, dtype=torch.bfloat16).to(self.device)
            model = prepare_model(model, float32_logits=self.wide)
            with warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always")
                self.compile(model)
                line, stats = self.timed(model, *work)
            found[name] = line | {"fused": stats.fused, "said": sorted({str(w.message) for w in said})}
            print(name, found[name], flush=True)
        return found

    def remembering(self) -> list[dict[str, Any]]:
        torch.manual_seed(0)
        self.models.clear()
        config = Qwen3_5TextConfig(**(TINY_REMEMBERING if self.tiny else REMEMBERING))
        with torch.device(self.device):
            model = prepare_model(Qwen3_5ForCausalLM(config).to(torch.bfloat16), float32_logits=self.wide)
        ways = WAYS | ({"pages, not captured": {"paged": True, "cuda_graphs": False}} if self.cuda else {})
        out = []
        for name, count, context, new in REMEMBERED:
            for way, given in ways.items():
                with warnings.catch_warnings(record=True) as said:
                    warnings.simplefilter("always")
                    line, stats = self.timed(model, count, context, new, 0, **given)
                line = {"work": name, "way": way, **line, "said": sorted({str(w.message) for w in said})}
                out.append(line | {"stats": stats.as_dict()})
                print(line, flush=True)
        return out

    def compile(self, model: Any, calls: Sequence[tuple[int, int, int]] = COMPILED) -> None:
        """Runs every kernel once, over few tokens: Triton compiles at the first use on a machine."""
        sampler = Sampler(model, stop_ids=[], rows=max(count for count, *_ in calls), **self.paged)
        for count, context, shared in calls:
            rows = contexts(count, context, shared, model.config.vocab_size, self.rng)
            sampler.generate([Request(row, 20, i) for i, row in enumerate(rows)], Sampling(), version=0)
        sampler.close()

    def mixed(self) -> dict[str, Any]:
        """Lengths drawn like long-tailed responses, scaled so that the longest reach the limit."""
        limit, count = 8192 // self.scale, 1024 // self.scale
        self.compile(self.model())
        drawn = self.rng.lognormal(np.log(MEAN * limit) - SIGMA**2 / 2, SIGMA, count)
        drawn = np.clip(drawn, 64 // self.scale, limit).astype(int)
        rows = contexts(count, 128 // self.scale, 0, self.vocabulary, self.rng)
        report: dict[str, Any] = {"mean_tokens": float(drawn.mean()), "longest": int(drawn.max())}
        for name, lengths in (("mixed", drawn), ("equal", np.full(count // 2, int(drawn.mean())))):
            sampler = Sampler(self.model(), stop_ids=[], rows=count // 2, **self.paged)
            requests = [Request(row, int(n), i) for i, (row, n) in enumerate(zip(rows, lengths, strict=False))]
            sampler.generate(requests, Sampling(), version=0)
            report[name] = sampler.stats.as_dict()
            sampler.close()
            self.free()
        report["speed_ratio"] = report["mixed"]["tokens_per_second"] / report["equal"]["tokens_per_second"]
        report["pages_over_tokens"] = report["mixed"]["cache_peak_bytes"] / report["mixed"]["cache_live_bytes"]
        return report


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("generation.json"), help="JSON")
    parser.add_argument("--sections", default="exact,kernels,steps,profile,work,mixed")
    parser.add_argument("--work", default="", help="rows of the table, by number; all without it")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument(
        "--float32-logits", action=argparse.BooleanOptionalAction, default=True, help="engine.local.float32_logits"
    )
    parser.add_argument("--trained", help="folder or hub name of the model of section `trained`")
    parser.add_argument("--commit", default="")
    args = parser.parse_args()
    bench = Bench(args)
    report = record(args)
    for section in args.sections.split(","):
        begin = time.perf_counter()
        try:
            report[section] = getattr(bench, section)()
        except (RuntimeError, ValueError, AssertionError, LookupError, TypeError, AttributeError, ImportError):
            report[section] = {"error": traceback.format_exc()[-3000:]}
            print(section, report[section]["error"][-1500:], flush=True)
        report[f"{section}_seconds"] = round(time.perf_counter() - begin, 1)
        print(section, report[f"{section}_seconds"], "s", flush=True)
        if section in ("exact", "mixed", "profile"):
            print(json.dumps(report[section]), flush=True)
        if section == "kernels" and "decode" in report[section]:
            for rows in {line["rows"] for line in report[section]["decode"]}:
                print(*[line for line in report[section]["decode"] if line["rows"] == rows][:6], sep="\n", flush=True)
            print(*(report[section][name] for name in ("prefill", "products", "gated", "paths")), sep="\n", flush=True)
        write(args, report)


if __name__ == "__main__":
    main()
