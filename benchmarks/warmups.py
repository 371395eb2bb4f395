"""Whether a warm-up recipe reaches its target: its phases, one model after the other, for each of its cases.

    python benchmarks/warmups.py benchmarks/warmups_m.toml --at-once 5 --out docs/results/warmups.json

A case is a set of flags of `attnrl warmup` over those of every case and of the phase. A phase starts from the model of
the one before; it ends at its target or with its tokens, and the next one goes on either way. The record of a case is
written when it ends: every check of every phase, and whether the last phase came to its target.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tomllib
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from evidence import words

CHECKED = ("tokens", "seconds", "loss", "accuracy")


def run_case(recipe: dict[str, Any], flags: dict[str, Any], folder: Path) -> list[dict[str, Any]]:
    """The phases of a case, with their checks."""
    phases, before = [], None
    for number, phase in enumerate(recipe["phases"]):
        output = folder / str(number)
        asked = {**recipe["every"], **phase, **flags, "output": str(output), **({"model": before} if before else {})}
        if before:  # its shape is that of the model
            asked = {name: value for name, value in asked.items() if not name.startswith("shape.")}
        command = [sys.executable, "-m", "attnrl", "warmup", *words(asked)]
        with (folder / f"{number}.log").open("w") as log:
            subprocess.run(command, check=True, stdout=log, stderr=log)
        phases.append(read_phase(output, asked))
        before = str(output)
    return phases


def read_phase(output: Path, asked: dict[str, Any]) -> dict[str, Any]:
    """What a phase came to: its checks, and whether the last one met both targets."""
    rows = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    checks = [{name: float(f"{row[f'warmup/{name}']:.5g}") for name in CHECKED} for row in rows]
    last = checks[-1]
    reached = last["accuracy"] >= asked["target_accuracy"] and last["loss"] <= asked["target_loss"]
    return {"reached": reached, "tokens": rows[-1]["warmup/tokens"], "checks": checks}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--runs", type=Path, default=Path("runs/warmups"), help="where the models go; begun anew")
    parser.add_argument("--at-once", type=int, default=1)
    parser.add_argument("--commit", default=os.environ.get("ATTNRL_COMMIT", ""))
    args = parser.parse_args()
    recipe = tomllib.loads(args.recipe.read_text())
    record: dict[str, Any] = {"commit": args.commit, "at once": args.at_once, "cases": {}}
    with ThreadPoolExecutor(args.at_once) as pool:
        waiting = {}
        for name, flags in recipe["cases"].items():
            shutil.rmtree(args.runs / name, ignore_errors=True)
            (args.runs / name).mkdir(parents=True)
            waiting[pool.submit(run_case, recipe, flags, args.runs / name)] = name
        for done in as_completed(waiting):
            name = waiting[done]
            if error := done.exception():  # the other cases go on
                print(f"{name}: failed, see {args.runs / name}: {error}", flush=True)
                continue
            record["cases"][name] = phases = done.result()
            args.out.write_text(json.dumps(record) + "\n")
            last = phases[-1]
            tokens = sum(phase["tokens"] for phase in phases) / 1e6
            came = "reached" if last["reached"] else "missed"
            print(f"{name}: {came} after {tokens:.1f}M tokens, {last['checks'][-1]}", flush=True)
    if len(record["cases"]) < len(recipe["cases"]):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
