"""The tables of docs/own_model.md, and of memory in docs/performance.md: what `attnrl check` would forecast for three
sizes of Qwen2 models.

    python benchmarks/forecast.py

Arithmetic only (attnrl.launch.forecast): no weights are loaded and no GPU is needed.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

from attnrl.config import ModelConfig, load_config
from attnrl.launch.forecast import GB, MOMENT_BYTES, host_memory, memory, shape_of, work

SIZES: dict[str, dict[str, Any]] = {  # of Qwen2.5-0.5B, DeepSeek-R1-Distill-Qwen-1.5B and -7B
    "0.5B": {
        "hidden_size": 896, "num_hidden_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2,
        "intermediate_size": 4864, "vocab_size": 151936, "tie_word_embeddings": True,
    },
    "1.5B": {
        "hidden_size": 1536, "num_hidden_layers": 28, "num_attention_heads": 12, "num_key_value_heads": 2,
        "intermediate_size": 8960, "vocab_size": 151936, "tie_word_embeddings": False,
    },
    "7B": {
        "hidden_size": 3584, "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4,
        "intermediate_size": 18944, "vocab_size": 152064, "tie_word_embeddings": False,
    },
}  # fmt: skip
SETTINGS: dict[str, dict[str, Any]] = {
    "as preset": {},
    "kl_weight 0": {"update.kl_weight": 0.0},
    "8 bits": {"update.optimizer": "adamw_8bit"},
    "offloaded": {"update.optimizer": "adamw_offloaded"},
    "offloaded, kl_weight 0": {"update.optimizer": "adamw_offloaded", "update.kl_weight": 0.0},
    "LoRA 32": {"model.lora_rank": 32},
}
RESPONSES = 64  # of full length in the sampler's cache
GPUS = (80, 141)  # GB
TREES = 4  # of six trunks, half of them right (Eq. 9)
# Tokens a second of sampler and learner by response length, 1.5B shape, one H200, commit 4ea5c35 (docs/performance.md):
# 256 requests of 128 + 2,048 tokens; 64 of 4,096 + 512; learner with all layers again and reference, microbatches of
# 16,384.
MEASURED = {2048: (58_353, 33_940), 8192: (10_481, 29_840)}
LEARNER_7B = 4_208  # the same of 7B with its optimizer on the host, responses of 8,192 tokens, commit 4ea5c35
FORWARD_MS = {"0.5B": 39.4, "1.5B": 81.3, "7B": 264.2}  # scoring 8,192 tokens, one H200, commit eb78a4f


def rows() -> list[dict[str, Any]]:
    """One row a size and setting: weights, trained ones, GB by item, GB in all without the cache, GB of the host."""
    from transformers import Qwen2Config

    found = []
    for size, numbers in SIZES.items():
        for name, overrides in SETTINGS.items():
            config = load_config("attnrl_1p5b", overrides)
            shape = shape_of(Qwen2Config(**numbers), ModelConfig(lora_rank=config.model.lora_rank))
            items = {
                key: size_ / GB for key, size_ in memory(shape, config, weight_bytes=2, cached_rows=RESPONSES).items()
            }
            cache = items.pop("cache")
            found.append(
                {
                    "size": size,
                    "setting": name,
                    "weights": shape.weights,
                    "trained": shape.trained,
                    "gb": items,
                    "total_gb": sum(items.values()),
                    "cache_gb": cache,
                    "host_gb": host_memory(shape, config) / GB,
                }
            )
    return found


def table(found: list[dict[str, Any]]) -> str:
    """The rows as Markdown."""
    columns = [*found[0]["gb"]]
    head = ["model", "setting", *columns, "in all", f"cache of {RESPONSES} responses", "host"]
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    for row in found:
        cells = [f"{row['gb'][c]:.1f}" if row["gb"][c] else "-" for c in columns]
        cells += [f"**{row['total_gb']:.1f}**", f"{row['cache_gb']:.1f}"]
        cells.append(f"{row['host_gb']:.1f}" if row["host_gb"] else "-")
        lines.append(f"| {' | '.join([row['size'], row['setting'], *cells])} |")
    return "\n".join(lines)


def fits(found: list[dict[str, Any]]) -> str:
    """Which setting fits which GPU, as Markdown: GB that are left, and responses of full length at a time in half of
    them, which is what the local sampler takes.
    """
    lines = [
        "| model | setting | " + " | ".join(f"{gpu} GB GPU" for gpu in GPUS) + " |",
        "|" + "---|" * (2 + len(GPUS)),
    ]
    for row in found:
        cells = []
        for gpu in GPUS:
            left = gpu - row["total_gb"]
            at_once = int(left / 2 / (row["cache_gb"] / RESPONSES))
            cells.append(f"{left:.0f} GB left, {at_once} responses" if left > 0 else "does not fit")
        lines.append(f"| {' | '.join([row['size'], row['setting'], *cells])} |")
    return "\n".join(lines)


def layers() -> str:
    """GB in all without the cache by layers that run again in backward, as Markdown."""
    again = (28, 21, 14, 7, 0)
    lines = [f"| model | optimizer | {' | '.join(map(str, again))} |", "|" + "---|" * (2 + len(again))]
    for (size, optimizer), needs in by_layers().items():
        lines.append(f"| {size} | `{optimizer}` | {' | '.join(f'{needs[count]:.0f}' for count in again)} |")
    return "\n".join(lines)


def kept() -> str:
    """Which optimizer fits which GPU, and how many of 28 layers need not run again where a tenth is left free, as
    Markdown."""
    heads = ["all layers again", *(f"{gpu} GB GPU" for gpu in GPUS)]
    lines = [f"| model | optimizer | {' | '.join(heads)} |", "|" + "---|" * (2 + len(heads))]
    for (size, optimizer), needs in by_layers().items():
        cells = [f"{needs[-1]:.1f}"]
        for gpu in GPUS:
            again = next((count for count, need in enumerate(needs) if need <= 0.9 * gpu), None)
            cells.append(
                "does not fit" if again is None else f"{gpu - needs[-1]:.0f} GB left, {28 - again} of 28 layers kept"
            )
        lines.append(f"| {size} | `{optimizer}` | {' | '.join(cells)} |")
    return "\n".join(lines)


def by_layers() -> dict[tuple[str, str], list[float]]:
    """GB in all without the cache by model and optimizer, for 0 to 28 layers that run again."""
    from transformers import Qwen2Config

    found = {}
    for size in ("1.5B", "7B"):
        shape = shape_of(Qwen2Config(**SIZES[size]), ModelConfig())
        for optimizer in MOMENT_BYTES:
            keys = [{"update.optimizer": optimizer, "update.gradient_checkpointing": n} for n in range(29)]
            configs = [load_config("attnrl_1p5b", one) for one in keys]
            needs = [sum(memory(shape, config, weight_bytes=2).values()) / GB for config in configs]
            found[size, optimizer] = needs
    return found


def hours() -> str:
    """Minutes of an iteration of `attnrl_1p5b` and hours of its 500, as Markdown: tokens by `work`, over what one H200
    was measured to do at the 1.5B shape, and the learner at that of 7B; the rest by the ratio of scoring forwards.
    """
    config = load_config("attnrl_1p5b")
    lines = [
        "| responses of | tokens drawn | tokens trained on | " + " | ".join(FORWARD_MS) + " |",
        "|" + "---|" * (3 + len(FORWARD_MS)),
    ]
    for length, (sampler, learner) in MEASURED.items():
        ahead = work(config, prompt=100, length=length, trees=TREES, points=config.algo.points)
        cells = []
        for size, forward in FORWARD_MS.items():
            times = forward / FORWARD_MS["1.5B"]
            update = ahead.trained / LEARNER_7B if size == "7B" else ahead.trained / learner * times
            seconds = ahead.generated / sampler * times + update
            cells.append(f"{seconds / 60:.1f} min, {seconds * config.run.iterations / 3600:.0f} h")
        drawn, trained = f"{ahead.generated / 1e6:.1f} M", f"{ahead.trained / 1e6:.1f} M"
        lines.append(f"| {length:,} tokens | {drawn} | {trained} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", help="write the rows as JSON")
    out = parser.parse_args().out
    found = rows()
    print(table(found), fits(found), layers(), kept(), hours(), sep="\n\n")
    if out:
        with open(out, "w") as file:
            json.dump(found, file, indent=2)


if __name__ == "__main__":
    main()
