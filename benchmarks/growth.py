"""How an iteration grows with the limit of a response and with the prompts: `iteration.py` over both, in one process.

    python benchmarks/growth.py --tokenizer DIR --commit HASH --out growth.json
    python benchmarks/growth.py --shape tiny --prompts 2,4 --limits 64,128 --out growth.json      # a rehearsal

Every response runs to its limit, where the vocabulary is large (a random model stops as often as it draws any other
token): `of_limit` is how far they came. The second iteration of each case counts: the first draws two batches of trunks
and compiles. From limit `--once` on, where an iteration takes minutes, the first one does, without the call that draws
its own trunks; it compiles, so its growth is an upper bound. Written after each case as JSON; the growth of a phase is
how many times its seconds grew over how many times the tokens did, against the case before: 1 is linear.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch

import iteration
from record import record, write

PHASES = ("generate", "score", "update", "iteration")


def measure(prompts: int, limit: int, args: argparse.Namespace) -> dict[str, Any]:
    """Seconds, tokens and memory of the iteration that counts."""
    once = limit >= args.once
    part = args.out.with_suffix(".part")
    sys.argv = ["iteration.py", "--shape", args.shape, "--prompts", str(prompts), "--limit", str(limit)]
    sys.argv += ["--iterations", "1" if once else "2", "--rows", "512", "--layers", "auto", "--out", str(part)]
    sys.argv += ["--tokenizer", args.tokenizer] if args.tokenizer else []
    iteration.main()
    calls = iteration.ENGINES[0].calls
    iteration.ENGINES.clear()
    iteration.free()
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    found = json.loads(part.read_text())["iterations"][-1]
    part.unlink()
    seconds = {name: found[f"seconds/{name}"] for name in PHASES}
    tokens = {"drawn": calls[-1][1], "trained": found["train/tokens"]}
    of_limit = round(calls[-1][1] / calls[-1][2], 3)
    if once:
        for spent, *_ in calls[:-1]:
            seconds = {**seconds, **{name: seconds[name] - spent for name in ("generate", "iteration")}}
    memory = found.get("device/peak_memory_gb")
    return {
        "prompts": prompts,
        "limit": limit,
        "seconds": seconds,
        "tokens": tokens,
        "of_limit": of_limit,
        "peak_gb": memory,
    }


def growth(before: dict[str, Any], after: dict[str, Any]) -> dict[str, float]:
    """By phase, how many times its seconds grew over how many times its tokens did."""
    tokens = {name: after["tokens"][name] / before["tokens"][name] for name in ("drawn", "trained")}
    of = {"update": "trained"}
    return {name: after["seconds"][name] / before["seconds"][name] / tokens[of.get(name, "drawn")] for name in PHASES}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=iteration.SHAPES, default="135M")
    parser.add_argument("--tokenizer", default=None, help="directory of a tokenizer; default: that of made-up tasks")
    parser.add_argument("--limits", default="1024,2048,4096,8192,16384", help="at the first number of prompts")
    parser.add_argument("--prompts", default="4,8,16,32,64", help="at the first limit")
    parser.add_argument("--once", type=int, default=1 << 30, help="limit from which on one iteration is run, not two")
    parser.add_argument("--commit", default="")
    parser.add_argument("--out", type=Path, default=Path("growth.json"), help="JSON")
    args = parser.parse_args()
    limits, prompts = ([int(n) for n in text.split(",")] for text in (args.limits, args.prompts))
    cases: list[dict[str, Any]] = []
    found = record(args, cases=cases)
    for many, limit in [(prompts[0], n) for n in limits] + [(n, limits[0]) for n in prompts[1:]]:
        case = measure(many, limit, args)
        before = cases[0] if [many] == prompts[1:2] else cases[-1] if cases else None
        cases.append(case | ({"growth": growth(before, case)} if before else {}))
        print(json.dumps(cases[-1]), flush=True)
        write(args, found)


if __name__ == "__main__":
    main()
