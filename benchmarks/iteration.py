"""Whole training iterations, phase by phase: AttnRL through `attnrl.train` at the shape of a real model.

Weights are random, so that no download is needed. Such a model ends no response by itself: every one runs to the limit,
which makes the iteration as long as it can be. Rewards are the parity of a response's hash, steps are 45 tokens long
(the median of the real transcripts), and the trees are those of the preset.

    python benchmarks/iteration.py --prompts 4 --limit 2048 --iterations 3 --tokenizer DIR --out iteration.json

writes seconds per phase, tokens, speeds and memory of each iteration as JSON.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attnrl
from attnrl.reward import declare
from attnrl.types import Attempt

SHAPES: dict[str, dict[str, int]] = {
    "1.5B": {
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
    },
    "tiny": {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
    },
}
KEPT = (
    "seconds/",
    "generate/",
    "train/",
    "score/",
    "device/",
    "policy/updates",
    "policy/behaviour_kl",
    "policy/ratio_max",
    "trees/",
    "batch/",
)


@declare(truncated=True)
def parity(attempts: Sequence[Attempt]) -> list[float]:
    """1 or 0 by the hash of the response: outcomes that differ between branches, whatever the model."""
    return [float(hashlib.sha256(a.response.encode()).digest()[0] & 1) for a in attempts]


def make_model(shape: str, tokenizer: str | None, folder: Path) -> None:
    """A model of that shape with random weights, and its tokenizer."""
    import torch
    from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

    from attnrl.data.task_tokenizer import task_tokenizer

    words: Any = task_tokenizer() if tokenizer is None else AutoTokenizer.from_pretrained(tokenizer)
    vocabulary = len(words) if tokenizer is None else 151_936
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=vocabulary,
        max_position_embeddings=32_768,
        tie_word_embeddings=True,
        eos_token_id=words.eos_token_id,
        **SHAPES[shape],
    )
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = Qwen2ForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(folder)
    words.save_pretrained(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="1.5B")
    parser.add_argument("--tokenizer", default=None, help="directory of a tokenizer; default: that of made-up tasks")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--limit", type=int, default=8192, help="response tokens")
    parser.add_argument("--iterations", type=int, default=2)
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--microbatch-tokens", type=int, default=16_384)
    parser.add_argument("--commit", default="")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    sys.path.insert(0, str(Path(__file__).parent))
    rows: list[dict[str, float]] = []

    def keep(metrics: dict[str, float]) -> None:
        rows.append({k: v for k, v in metrics.items() if k.startswith(KEPT)})
        record = {"arguments": {k: str(v) for k, v in vars(args).items()}, "iterations": rows}
        args.out.write_text(json.dumps(record, indent=1) + "\n")

    with tempfile.TemporaryDirectory() as folder:
        make_model(args.shape, args.tokenizer, Path(folder, "model"))
        attnrl.train(
            "attnrl_1p5b",
            Path(folder, "run"),
            overrides={
                "model.path": str(Path(folder, "model")),
                "data.train": ["tasks"],
                "data.train_tasks": 200,
                "data.decontaminate": [],
                "data.clean": False,
                "reward": "iteration:parity",
                "sampling.max_response_tokens": args.limit,
                "algo.segmenter": "every_n_tokens",
                "algo.segmenter_options": {"tokens": 45},
                "algo.prompts": args.prompts,
                "evaluation.every": 0,
                "engine.local.rows": args.rows,
                "update.microbatch_tokens": args.microbatch_tokens,
                "run.iterations": args.iterations,
                "run.checkpoint_every": 1000,
                "run.save_rollouts_every": 0,
            },
            observers=[keep],
        )


if __name__ == "__main__":
    main()
