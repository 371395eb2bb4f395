"""Peak memory of the scorer by response length: it grows linearly.

    python benchmarks/scorer_memory.py --out scorer_memory.json        # CPU: peak resident memory, a process per length
    python benchmarks/scorer_memory.py --out scorer_memory.json --device cuda

Beside each length stands what one layer's dense attention matrix alone would take (float32, all heads).
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

LENGTHS = (1024, 2048, 4096, 8192)
HEADS = 8


def measure(length: int, device: str) -> dict[str, float]:
    """Megabytes above the loaded model at the peak of scoring one response of this length."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from attnrl.scoring import score
    from attnrl.types import ScoreRequest, Step, as_ids

    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=2048,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=HEADS,
        num_key_value_heads=2,
        max_position_embeddings=16384,
    )
    model = Qwen2ForCausalLM(config).to(device, torch.float32 if device == "cpu" else torch.bfloat16)
    ids = np.random.default_rng(0).integers(0, 2048, length)

    def run(tokens: int) -> None:
        steps = tuple(Step(a, min(a + 40, tokens - 64)) for a in range(0, tokens - 64, 40))
        score(model, [ScoreRequest(as_ids(ids[:64]), as_ids(ids[64:tokens]), steps)], token_budget=length, chunk=256)

    run(256)
    if device == "cpu":
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        run(length)
        return {"peak_MB": (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 / 1e6}
    torch.cuda.reset_peak_memory_stats()
    held = torch.cuda.memory_allocated()
    run(length)
    return {"peak_MB": (torch.cuda.max_memory_allocated() - held) / 1e6}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--length", type=int, help="measure one length and print it")
    args = parser.parse_args()
    if args.length:
        print(json.dumps(measure(args.length, args.device)))
        return
    rows: list[dict[str, Any]] = []
    for length in LENGTHS:
        command = [sys.executable, __file__, "--out", str(args.out), "--device", args.device, "--length", str(length)]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[-1]
        rows.append({"tokens": length, **json.loads(said), "one_dense_matrix_MB": HEADS * length**2 * 4 / 1e6})
    logs = np.log([[row["tokens"], row["peak_MB"]] for row in rows])
    slope = float(np.polyfit(logs[:, 0], logs[:, 1], 1)[0])
    result = {"device": args.device, "rows": rows, "growth_exponent": slope, "model": "4 layers, width 256, 8 heads"}
    args.out.write_text(json.dumps(result, indent=1))
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
