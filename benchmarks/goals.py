"""Goals of speed, and whether what `speed_gpu.sh` wrote meets them: one table in Markdown.

    python benchmarks/goals.py OUT                           # the folder given to speed_gpu.sh
    python benchmarks/goals.py OUT --before learner.json     # part `learner` of an older commit, on the same machine

A goal is of the ratio, where a number stands beside the measured one: measured over the other, but of the plain way's
seconds how many times ours they are. Without `--before` the learner stands beside d9ecc0b's on another machine. Exit
status: 1 where a goal is missed, 2 where there is nothing to read or a rehearsal alone, else 0, also where a part has
not run.
"""

from __future__ import annotations

import argparse
import json
import operator
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple


class Goal(NamedTuple):
    what: str
    part: str  # of speed_gpu.sh; READ has how its file is read
    of: Any  # what that is asked for
    goal: str = "-"  # of the ratio, where there is one; "-": only measured


GOALS = (
    Goal("first call, 256x(128+256), tokens/s", "vllm", "256x(128+256)", ">= 2"),
    Goal("first call, 1024x(128+512), tokens/s", "vllm", "1024x(128+512)", ">= 2"),
    Goal("first call, 256x(128+2048), tokens/s", "vllm", "256x(128+2048)", ">= 1.2"),
    Goal("first call, 64x(4096+512), tokens/s", "vllm", "64x(4096+512)", ">= 1.2"),
    Goal("first call, 256x(4096+256), tokens/s", "vllm", "256x(4096+256)", ">= 1.2"),
    Goal("first call, 320 branches, tokens/s", "vllm", "320 branches, 5 share 2000, +512", ">= 2"),
    Goal("first call, 8x(4096+256), tokens/s", "vllm", "8x(4096+256)", ">= 1.2"),
    Goal("first call, 135M 2048x(64+256), tokens/s", "small", "135M 2048x(64+256)", ">= 6"),
    Goal("decode step, 64x4096, ms", "steps", (64, 4096), "< 4"),
    Goal("decode step, 8x4096, ms", "steps", (8, 4096), "< 2.5"),
    Goal("decode step, 256x128, ms", "steps", (256, 128), "< 4"),
    Goal("mixed lengths, tokens/s", "mixed", "speed", ">= 0.6"),
    Goal("mixed lengths, GB of pages at the peak", "mixed", "pages", "<= 1.15"),
    Goal("learner, 2,048 tokens a sample, tokens/s", "learner", (2048, "tokens_per_second"), ">= 1.5"),
    Goal("learner, 2,048 tokens a sample, peak GB", "learner", (2048, "peak_gb"), "<= 1"),
    Goal("learner, 8,192 tokens a sample, tokens/s", "learner", (8192, "tokens_per_second"), ">= 1.5"),
    Goal("learner, 8,192 tokens a sample, peak GB", "learner", (8192, "peak_gb"), "<= 1"),
    Goal("update with the least memory, s", "plain", "seconds", ">= 2.5"),
    Goal("update with the least memory, peak GB", "plain", "peak_gb", "<= 0.5"),
    Goal("whole iteration, s", "plain", "iteration", ">= 3"),
    Goal("FCI in it, s", "plain", "fci", "< 0.03"),
    Goal("grading and bookkeeping in it, s", "plain", "grading", "< 0.02"),
    Goal("learner of 7B, 8,192 tokens a sample, peak GB", "big", (8192, "peak_gb"), "<= 141"),
    *(Goal(f"growth, 4 prompts, limit {n:,}, s", "growth", (4, n)) for n in (2048, 4096, 8192, 16_384)),
    *(Goal(f"growth, {n} prompts, limit 1,024, s", "growth", (n, 1024)) for n in (16, 64)),
    *(Goal(f"responses of 8,192 tokens, iteration {n + 1}, s", "paper", n) for n in (0, 1)),
)
SPEEDS = ((2048, 20_970), (8192, 17_370))  # of the learner before; how they were measured: docs/performance.md
BEFORE = {  # as learner.json
    "commit": "d9ecc0b, another machine",
    "cases": [{"tokens": n, "layers": "all", "tokens_per_second": speed, "peak_gb": 35.9} for n, speed in SPEEDS],
}
HEAD = ["what", "measured", "beside what", "ratio", "goal", "met", "commit"]
REHEARSAL = "a rehearsal: no number means anything"
COMPARED = {">=": operator.ge, "<=": operator.le, "<": operator.lt}
Found = tuple[float, str, float | str]  # measured, what stands beside it, their ratio; "-": none


def shown(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


def over(ours: float, name: str, theirs: float, *, times: bool = False) -> Found:
    return ours, f"{name}: {shown(theirs)}", theirs / ours if times else ours / theirs  # times: how many ours theirs is


def row(found: Any, **wanted: Any) -> Any:
    """The first row with these values; the section of a benchmark that failed is no list."""
    for one in found if isinstance(found, list) else ():
        if all(one.get(key) == value for key, value in wanted.items()):
            return one
    raise LookupError


def work(file: Any, name: str) -> Found:
    return over(row(file["work"], work=name)["tok_s"], "vLLM", row(file["vllm"], work=name)["tok_s"])


def step(file: Any, of: tuple[int, int]) -> Found:
    return row(file["steps"], rows=of[0], context=of[1], top_p=1.0)["ms"], "-", "-"


def mixed(file: Any, of: str) -> Found:
    ours, equal = file["mixed"]["mixed"], file["mixed"]["equal"]
    if of == "speed":
        return over(ours["tokens_per_second"], "equal lengths", equal["tokens_per_second"])
    return over(ours["cache_peak_bytes"] / 1e9, "tokens alive", ours["cache_live_bytes"] / 1e9)


def learned(file: Any, tokens: int, key: str) -> float:
    """Of a case with all layers again; one that ran out of memory took more than there is, and no token."""
    if any(found.get("case", [])[1:3] == [tokens, "all"] for found in file["cases"]):
        return {"tokens_per_second": 0.0, "peak_gb": float("inf")}[key]
    return float(row(file["cases"], tokens=tokens, layers="all")[key])


def learner(file: Any, of: tuple[int, str]) -> Found:
    return over(learned(file, *of), origin(file["before"])[0], learned(file["before"], *of))


def big(file: Any, of: tuple[int, str]) -> Found:
    return learned(file, *of), "-", "-"


def plain(file: Any, of: str) -> Found:
    """Beside the plain way our update with the least memory, and our iteration; beside that two shares of it."""
    last = file["iterations"][-1]
    if of == "fci":  # of the scoring kernels; `score/overhead`: their time with FCI over that without, minus 1
        spent = last["score/seconds"] * last["score/overhead"] / (1 + last["score/overhead"])
        return over(spent, "the iteration", last["seconds/iteration"])
    if of == "grading":  # waiting for verdicts, and what lies between the phases
        return over(last["seconds/verify"] + last["seconds/other"], "the iteration", last["seconds/iteration"])
    theirs, name = file["plain"], f"the plain way, {file['plain'].get('sampler')}"
    if of == "iteration":
        spent = sum(theirs["seconds"][phase] for phase in ("generate", "score", "update"))
        return over(last["seconds/iteration"], name, spent, times=True)
    return over(file["spare"][of]["update"], "the plain way", theirs[of]["update"], times=of == "seconds")


def growth(file: Any, of: tuple[int, int]) -> Found:
    found = row(file["cases"], prompts=of[0], limit=of[1])
    factors = ", ".join(f"{phase} {found['growth'][phase]:.2f}" for phase in ("generate", "score", "update"))
    return found["seconds"]["iteration"], "seconds over tokens, against the size before", factors


def paper(file: Any, number: int) -> Found:
    phases = ("generate", "verify", "score", "update", "other")
    found = file["iterations"][number]
    return found["seconds/iteration"], ", ".join(f"{phase} {shown(found[f'seconds/{phase}'])}" for phase in phases), "-"


READ: dict[str, Callable[[Any, Any], Found]] = {"vllm": work, "small": work, "steps": step, "mixed": mixed}
READ |= {"learner": learner, "big": big, "plain": plain, "growth": growth, "paper": paper}


def origin(file: Any) -> tuple[str, str]:
    """The commit and the device that a file names; a rehearsal says so."""
    said = file.get("arguments", {})
    rehearsed = file.get("device") == "cpu" or said.get("tiny") == "True" or said.get("shape") == "tiny"
    return file.get("commit") or "not named", REHEARSAL if rehearsed else file.get("device", "not named")


def load(path: Path) -> dict[str, Any] | None:
    """What a file holds; None where its writer was stopped in the middle, or it is of another kind."""
    try:
        if isinstance(found := json.loads(path.read_text(encoding="utf-8")), dict):
            return found
        print(f"{path}: not an object", file=sys.stderr)
    except (OSError, ValueError) as error:
        print(f"{path}: {error}", file=sys.stderr)
    return None


def line(goal: Goal, file: Any) -> list[str]:
    """The cells under HEAD."""
    try:
        measured, theirs, ratio = READ[goal.part](file or {}, goal.of)
    except (LookupError, TypeError, AttributeError):  # not run, cut off, or failed
        return [goal.what, "-", "-", "-", goal.goal, "not measured", "-"]
    met, (sign, _, limit) = "measured", goal.goal.partition(" ")
    if origin(file)[1] == REHEARSAL:
        met = "rehearsal"
    elif limit:
        met = "yes" if COMPARED[sign](measured if isinstance(ratio, str) else ratio, float(limit)) else "no"
    return [goal.what, shown(measured), theirs, shown(ratio), goal.goal, met, origin(file)[0]]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="the folder that speed_gpu.sh wrote to")
    parser.add_argument("--before", type=Path, help="learner.json of an older commit")
    args = parser.parse_args(argv)
    paths = {part: args.out / f"{part}.json" for part in READ}
    found = {part: load(path) for part, path in paths.items() if path.exists()}
    before = load(args.before) if args.before else BEFORE
    files = {p: {**file, "before": before} if p == "learner" else file for p, file in found.items() if file}
    if not files or not before:
        names = ", ".join(sorted(path.name for path in paths.values()))
        print(f"{args.out if before else args.before}: nothing to read; speed_gpu.sh writes {names}", file=sys.stderr)
        return 2
    rows = [line(goal, files.get(goal.part)) for goal in GOALS]
    said = {part: origin(file) for part, file in files.items()}
    several = len({commit for commit, _ in said.values()} - {"not named"}) > 1
    for cells in (HEAD, ["---"] * len(HEAD), *rows):
        print("| " + " | ".join(cells if several else cells[:-1]) + " |")
    for commit, device in dict.fromkeys(said.values()):
        print(f"\ncommit {commit}, device {device}:", ", ".join(p for p in files if said[p] == (commit, device)))
    met = {cells[5] for cells in rows}
    return 1 if "no" in met else 0 if met & {"yes", "measured"} else 2


if __name__ == "__main__":
    sys.exit(main())
