"""`attnrl train attnrl_1p5b` itself, with random weights: 8 prompts, responses of 8,192 tokens, two iterations.

    python benchmarks/paper_length.py --tokenizer DIR --commit "$(git rev-parse --short HEAD)" --out paper.json

writes the metrics of each iteration as JSON. Rewards are the parity of a response's hash, steps are 45 tokens long. The
run is written below TMPDIR: 25 GB at the 1.5B shape.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from iteration import SETTINGS, SHAPES, free, make_model
from record import record, write

LENGTH = {
    "algo.prompts": 8,
    "algo.max_prompts": 12,
    "algo.group": 6,
    "update.microbatch_tokens": 16_384,
    "run.iterations": 2,
}


def said(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="1.5B")
    parser.add_argument("--tokenizer", required=True, help="its folder, such as that of DeepSeek-R1-Distill-Qwen")
    parser.add_argument("--limit", type=int, default=8192, help="response tokens")
    parser.add_argument("--commit", default="")
    parser.add_argument("--out", type=Path, default=Path("paper.json"), help="JSON")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model, run = f"{folder}/model", f"{folder}/run"
        make_model(args.shape, args.tokenizer, Path(model))
        free()
        settings = SETTINGS | LENGTH | {"sampling.max_response_tokens": args.limit}
        flags = [word for key, value in settings.items() for word in (f"--{key}", said(value))]
        command = ["train", "attnrl_1p5b", "--model.path", model, "--run-dir", run, *flags]
        status = subprocess.run([sys.executable, "-m", "attnrl", *command], check=False).returncode
        file = Path(run, "metrics.jsonl")
        rows = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
        write(args, record(args, command=["attnrl", *command], status=status, iterations=rows))
    sys.exit(status)


if __name__ == "__main__":
    main()
