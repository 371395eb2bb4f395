"""Updates by layers that run again and by optimizer: tokens a second and peak memory of the learner, and the forecast.

    python benchmarks/learner_memory.py --sections all,layers,optimizers --commit HASH --out learner_memory.json
    python benchmarks/learner_memory.py --sections all --no-fused --commit HASH --out learner_memory_plain.json
    python benchmarks/learner_memory.py --sections 7b --commit HASH --out learner_memory_7b.json
    python benchmarks/learner_memory.py --tiny --out learner_memory.json        # a rehearsal, also on a CPU

Models have random weights in the shapes of docs/own_model.md; samples are random tokens, a prompt of 128 included, that
share nothing; microbatches hold 16,384 tokens. A case is one update to warm up, some that are measured (the median
counts), and one optimizer step by itself; a case that runs out of memory says so. Written after each case as JSON.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from attnrl.config import Config, load_config
from attnrl.launch.forecast import GB, host_memory, memory, shape_of
from attnrl.local.learner import Learner
from attnrl.local.models import pick_device, pick_dtype, prepare_model
from attnrl.policy.packing import input_length
from attnrl.types import Sample, as_floats, as_ids
from forecast import SIZES
from record import record, write

TINY = {
    "hidden_size": 64, "num_hidden_layers": 28, "num_attention_heads": 2, "num_key_value_heads": 1,
    "intermediate_size": 128, "vocab_size": 300, "tie_word_embeddings": False,
}  # fmt: skip
PROMPT, SCALE = 128, 64
PRESETS = {"1.5B": "attnrl_1p5b", "7B": "attnrl_7b_one_gpu"}  # the second is the documented setting
Case = tuple[str, int, Any, str]  # shape, tokens of a sample, update.gradient_checkpointing, update.optimizer
CASES: dict[str, list[Case]] = {
    "all": [("1.5B", n, "all", "adamw") for n in (2048, 8192)],
    "layers": [("1.5B", n, layers, "adamw") for n in (2048, 8192) for layers in ("none", "auto")],
    "optimizers": [("1.5B", 8192, "all", optimizer) for optimizer in ("adamw_8bit", "adamw_offloaded")],
    "7b": [("7B", 8192, "all", "adamw_offloaded")],
    "7b_more": [("7B", 8192, "auto", "adamw_offloaded"), ("7B", 8192, "all", "adamw_8bit")],
}


def config_of(case: Case, args: argparse.Namespace) -> Config:
    """The preset of the case's shape with its length, layers and optimizer."""
    shape, length, layers, optimizer = case
    scale = SCALE if args.tiny else 1
    keys = {
        "data.max_prompt_tokens": PROMPT // scale,
        "sampling.max_response_tokens": (length - PROMPT) // scale,
        "update.microbatch_tokens": 16_384 // scale,
        "update.gradient_checkpointing": layers,
        "update.optimizer": optimizer,
        "update.fused": args.fused,
    }
    return load_config(PRESETS[shape], keys)


def samples(config: Config, tokens: int, vocabulary: int) -> list[Sample]:
    """So many tokens in rows of full length, one prompt each."""
    rng = np.random.default_rng(0)
    prompt, response = config.data.max_prompt_tokens, config.sampling.max_response_tokens
    rows = []
    for i in range(max(2, tokens // (prompt + response))):
        ids = as_ids(rng.integers(0, vocabulary, prompt + response))
        advantages = as_floats(rng.normal(size=response))
        drawn = as_floats(np.full(response, -np.log(vocabulary)))
        rows.append(Sample(ids[:prompt], ids[prompt:], advantages, drawn, str(i)))
    return rows


@contextmanager
def measured(found: dict[str, Any], name: str, device: torch.device) -> Iterator[None]:
    """Seconds of what is inside, the device's work included."""
    cuda = device.type == "cuda"
    if cuda:
        torch.cuda.synchronize(device)
    begin = time.perf_counter()
    yield
    if cuda:
        torch.cuda.synchronize(device)
    found[name] = time.perf_counter() - begin


def run(case: Case, args: argparse.Namespace) -> dict[str, Any]:
    """What one case takes, and what it was forecast to."""
    config, device = config_of(case, args), pick_device(args.device)
    dtype = pick_dtype("auto", device)
    made = Qwen2Config(**(TINY if args.tiny else SIZES[case[0]]), max_position_embeddings=16_384)
    made.tie_word_embeddings |= args.tied
    shape = shape_of(made, config.model)
    items = memory(shape, config, weight_bytes=dtype.itemsize)
    found: dict[str, Any] = dict(zip(("shape", "tokens", "layers", "optimizer"), case, strict=True))
    found |= {"forecast_gb": sum(items.values()) / GB, "forecast_host_gb": host_memory(shape, config) / GB}
    torch.manual_seed(0)
    with torch.device(device):
        model = prepare_model(Qwen2ForCausalLM._from_config(made, dtype=dtype, attn_implementation="eager"))
    learner = Learner(model, copy.deepcopy(model).requires_grad_(False), options=config.update)
    rows = samples(config, args.tokens, made.vocab_size)
    with measured(found, "first_seconds", device):
        learner.update(rows, version=0)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    each = []
    for version in range(1, 1 + args.updates):
        with measured(found, "seconds", device):
            metrics = learner.update(rows, version=version)
        each.append(found["seconds"])
    found |= {"seconds": sorted(each)[len(each) // 2], "each_seconds": each}
    kept = ("train/recomputed_layers", "train/layer_token_bytes", "train/microbatches", "policy/updates", "policy/loss")
    found |= {key: metrics[key] for key in kept if key in metrics}
    found["tokens_per_second"] = sum(map(input_length, rows)) / found["seconds"]
    if device.type == "cuda":
        found["peak_gb"] = torch.cuda.max_memory_allocated(device) / GB
    learner.accumulate(rows, [[0]])
    with measured(found, "step_seconds", device):
        learner.optimizer.step(learner.learning_rate(), learner.optimizer.gradient_norm())
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sections", default=",".join(CASES), help="of " + ", ".join(CASES))
    parser.add_argument("--device", default="auto")
    parser.add_argument("--tokens", type=int, default=65_536, help="of an update, prompts included")
    parser.add_argument("--updates", type=int, default=3, help="that are measured; the median counts")
    parser.add_argument("--fused", action=argparse.BooleanOptionalAction, default=True, help="update.fused")
    parser.add_argument("--tied", action="store_true", help="one matrix for embeddings and head, as Qwen2 of 1.5B")
    parser.add_argument("--tiny", action="store_true", help=f"a tiny shape, and lengths divided by {SCALE}")
    parser.add_argument("--commit", default="")
    parser.add_argument("--out", type=Path, default=Path("learner_memory.json"), help="JSON")
    args = parser.parse_args()
    args.tokens //= SCALE if args.tiny else 1
    cases: list[dict[str, Any]] = []
    found = record(args, cases=cases)
    for case in (case for section in args.sections.split(",") for case in CASES[section]):
        try:
            cases.append(run(case, args))
        except torch.cuda.OutOfMemoryError as error:
            cases.append({"case": list(case), "out_of_memory": str(error).split(".")[0]})
        print(json.dumps(cases[-1]), flush=True)
        write(args, found)
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
