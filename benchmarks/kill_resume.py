"""Kill -9 a run at random moments, resume it, and compare with the run that was left alone.

    python benchmarks/kill_resume.py [--kills 10] [--iterations 8] [--seed 0] [--output kill_resume.json]

Every killed run is resumed to its end. Metrics (all but clock readings), forests and final weights must be identical.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

SMALL = "--algo.prompts 4 --data.train_tasks 200 --evaluation.tasks 8 --evaluation.every 4 --run.checkpoint_every 1"
CLOCK = ("seconds/", "score/overhead", "score/seconds")


def start(run_dir: Path, iterations: int, *, resume: bool) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "attnrl", "train", "demo", "--run-dir", str(run_dir)]
    command += ["--iterations", str(iterations), *SMALL.split(), *(["--resume"] if resume else [])]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, start_new_session=True, **quiet)  # type: ignore[call-overload]


def finish(run_dir: Path, iterations: int, *, resume: bool) -> float:
    """Seconds a run took to its end; raises where it failed."""
    began = time.monotonic()
    process = start(run_dir, iterations, resume=resume)
    _, errors = process.communicate()
    if process.returncode != 0:
        raise RuntimeError(f"run in {run_dir} failed:\n{errors.decode()}")
    return time.monotonic() - began


def kill_after(run_dir: Path, iterations: int, seconds: float) -> None:
    process = start(run_dir, iterations, resume=False)
    try:
        process.wait(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


def fingerprint(run_dir: Path) -> dict[str, str]:
    """Hashes of what a run leaves behind, clock readings apart."""
    metrics = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    timeless = [{k: v for k, v in m.items() if not k.startswith(CLOCK)} for m in metrics]
    newest = max((run_dir / "checkpoints").glob("[0-9]*"))
    weights = b"".join(p.read_bytes() for p in sorted((newest / "model").glob("*.safetensors")))
    forests = b"".join(p.read_bytes() for p in sorted((run_dir / "forests").glob("*.parquet")))
    parts = {"metrics": json.dumps(timeless).encode(), "weights": weights, "forests": forests}
    return {name: hashlib.sha256(content).hexdigest()[:16] for name, content in parts.items()}


def iterations_done(run_dir: Path) -> int:
    file = run_dir / "metrics.jsonl"
    return file.read_text().count("\n") if file.exists() else 0


def measure(folder: Path, *, kills: int, iterations: int, seed: int = 0) -> list[dict[str, Any]]:
    """One row per killed and resumed run: when it was killed, and whether it left what the whole run left."""
    rng = random.Random(seed)
    whole = folder / "whole"
    length = finish(whole, iterations, resume=False)
    expected = fingerprint(whole)
    rows = []
    for i in range(kills):
        run_dir = folder / f"killed_{i}"
        share = rng.uniform(0.05, 0.95)
        kill_after(run_dir, iterations, share * length)
        recorded = iterations_done(run_dir)
        finish(run_dir, iterations, resume=True)
        same = {name: value == expected[name] for name, value in fingerprint(run_dir).items()}
        rows.append({"killed_at_share": round(share, 3), "metrics_lines_then": recorded, "identical": same})
        print(json.dumps(rows[-1]), flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--iterations", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows = measure(Path(folder), kills=args.kills, iterations=args.iterations, seed=args.seed)
    result = {"kills": rows, "all_identical": all(all(r["identical"].values()) for r in rows)}
    print(json.dumps({"all_identical": result["all_identical"], "kills": len(rows)}))
    if args.output:
        args.output.write_text(json.dumps(result, indent=2) + "\n")
    sys.exit(0 if result["all_identical"] else 1)


if __name__ == "__main__":
    main()
