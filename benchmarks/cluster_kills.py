"""End processes of a cluster run at random moments: does it always end by itself, with its cause, and leave nothing?

    .venv-verl/bin/python benchmarks/cluster_kills.py [--trials 6] [--seed 0] [--apart] [--output cluster_kills.json]

A run of tests/tiny_llama.py on a CPU (`make test-verl` makes the environment). Trial by trial a rank, a server, its
vLLM engine and that engine's worker are killed with -9, and the driver gets SIGTERM or SIGINT, up to eight seconds
after the first iteration. `--apart`: a server on a GPU of its own, drawing while a rank updates.
"""

from __future__ import annotations

import argparse
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

from psutil import Process

from attnrl.ranks.session import GRACE_S, family

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "verl_engine"))
import tiny

from tiny_llama import make_model

KILLED = ("ray::Worker", "vLLMHttpServer", "VLLM::EngineCore", "VLLM::Worker")  # by title
TOLD = {"SIGTERM": signal.SIGTERM, "SIGINT": signal.SIGINT}  # the driver
LIMIT_S = 150.0  # after it a run is called hanging


def trial(preset: Path, run: Path, what: str, flags: list[str], rng: random.Random) -> dict[str, Any]:
    """How a run ended after one of its processes was: exit code, seconds, last line, and what is left of it."""
    command = [sys.executable, "-m", "attnrl", "train", str(preset), "--run-dir", str(run), *flags]
    with run.with_suffix(".log").open("w+") as log:
        driver = subprocess.Popen(
            command, env=tiny.environment(), stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
        while driver.poll() is None and not (run / "metrics.jsonl").exists():
            time.sleep(0.2)
        if driver.returncode is not None:
            raise SystemExit(
                f"the run ended before its first iteration; its log:\n{Path(log.name).read_text()[-3000:]}"
            )
        time.sleep(rng.uniform(0, 8))
        every = family([Process(driver.pid)])
        target = (
            driver.pid if what in TOLD else rng.choice(sorted(p.pid for p in every if what in " ".join(p.cmdline())))
        )
        doing = " ".join(Process(target).cmdline()).strip()[:60] if what in KILLED else ""
        os.kill(target, TOLD.get(what, signal.SIGKILL))
        began = time.monotonic()
        try:
            code: int | None = driver.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            code = None
            driver.kill()
            driver.wait()
        seconds = round(time.monotonic() - began, 1)
        time.sleep(GRACE_S)
        log.seek(0)
        said = log.read().strip().splitlines()[-1][:200]
    left = len(family(every))
    return {"ended": what, "title": doing, "code": code, "seconds": seconds, "left": left, "last_line": said}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=6)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--apart", action="store_true", help="a server on a GPU of its own, the schedule overlapped")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    rng, rows = random.Random(args.seed), []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_model(folder / "model")
        algo = "delta = 1\nmax_prompts = 6" + ('\nschedule = "overlapped"' if args.apart else "")
        preset = tiny.write_preset(folder, "attnrl_1p5b", 1 if args.apart else 2, algo=algo)
        flags = ["--run.iterations", "1000", *(["--engine.verl.server_gpus", "1"] if args.apart else [])]
        for i in range(args.trials):
            rows.append(trial(preset, folder / f"run{i}", (*KILLED, *TOLD)[i % 6], flags, rng))
            print(json.dumps(rows[-1]), flush=True)
    sound = [r["code"] is not None and r["left"] == 0 and r["last_line"].startswith("attnrl train: ") for r in rows]
    result = {"apart": args.apart, "seed": args.seed, "trials": rows, "sound": sum(sound)}
    print(f"{sum(sound)} of {len(rows)} ended by themselves with their cause and left nothing")
    if args.output:
        args.output.write_text(json.dumps(result, indent=2) + "\n")
    sys.exit(0 if all(sound) else 1)


if __name__ == "__main__":
    main()
