"""Tables and figures of docs/results.md from docs/results/*: `python benchmarks/evidence.py tables`.

A table stands between the lines `<!-- table NAME -->` and `<!-- end -->` of the page and is written anew.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np

from evidence_base import base_cells, base_figures
from evidence_figures import curves, gains
from evidence_rows import NAMES, Rows, Runs, at, at_one_rate, by_preset, method, paired, spread

PAGE = Path("docs/results.md")
FIGURES = Path("docs/figures")
ONE_RATE = {  # testbeds whose methods all have runs at one rate that ruins none
    "tail": "tail: made-up tasks, 1.1M weights",
    "m": "M: made-up tasks, 20M weights",
}


def shown(values: Sequence[float], scale: float = 100.0, form: str = ".1f") -> str:
    mean, half = spread([scale * v for v in values])
    return f"{mean:{form}} ± {half:{form}}" if np.isfinite(half) else f"{mean:{form}}"


def table(rows: Sequence[Sequence[str]]) -> str:
    head, *body = rows
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in body])


def main_table(rows: Rows) -> str:
    lines = [
        [
            "branching rule or method",
            "seeds",
            "rate",
            "held-out accuracy",
            "iterations",
            "updates",
            "tokens",
            "loop seconds",
        ]
    ]
    for preset, own in by_preset(rows, "main").items():
        runs = list(own.values())
        lines.append(
            [
                NAMES[preset],
                str(len(runs)),
                f"{runs[0]['cell']['rate']:g}",
                shown([r["after"] for r in runs]),
                f"{np.mean([r['iterations'] for r in runs]):.0f}",
                f"{np.mean([r['updates'] for r in runs]):.0f}",
                f"{np.mean([r['tokens'] for r in runs]) / 1e6:.2f}M",
                f"{np.mean([r['seconds'] for r in runs]):.0f}",
            ]
        )
    return table(lines)


def benchmark_table(rows: Rows) -> str:
    """Held-out accuracy on each benchmark, and the mean over benchmarks. Paper: Table 1."""
    runs = by_preset(rows, "main")
    every = [r for own in runs.values() for r in own.values() if r.get("benchmarks")]
    names = list(dict.fromkeys(name for r in every for name in r["benchmarks"]))
    lines = [["method", "seeds", *names, "mean"]]
    if every:
        before = [float(np.mean([r["benchmarks"][name][0] for r in every])) for name in names]
        lines.append(["before", "", *(f"{100 * v:.1f}" for v in (*before, np.mean(before)))])
    for preset, own in runs.items():
        found = [r for r in own.values() if r.get("benchmarks")]
        if found:
            ends = [shown([r["benchmarks"][name][1] for r in found]) for name in names]
            lines.append([NAMES[preset], str(len(found)), *ends, shown([r["after"] for r in found])])
    return table(lines)


PAIRS = (
    ("oracle", "random"),
    ("atb", "random"),
    ("atb", "first"),
    ("atb", "position"),
    ("atb", "treerl"),
    ("atb", "grpo"),
    ("residual", "atb"),
    ("ratio", "atb"),
    ("ratio", "treerl"),
    ("ratio", "entropy"),
    ("oracle", "ratio"),
    ("mean", "atb"),
    ("entropy", "atb"),
    ("entropy", "treerl"),
    ("mean", "treerl"),
    ("oracle", "entropy"),
    ("random", "first"),
    ("residual", "first"),
    ("residual", "random"),
    ("residual", "grpo"),
    ("oracle", "atb"),
    ("oracle", "first"),
    ("oracle", "treerl"),
    ("oracle", "grpo"),
    ("random", "grpo"),
    ("attnrl", "treerl"),
    ("attnrl", "grpo"),
    ("attnrl", "atb"),
    ("attnrl_entropy", "attnrl"),
    ("attnrl_entropy", "treerl"),
    ("attnrl_entropy", "grpo"),
    ("attnrl_entropy", "entropy"),
    ("attnrl_ratio", "attnrl"),
    ("attnrl_ratio", "treerl"),
    ("attnrl_ratio", "grpo"),
    ("attnrl_ratio", "attnrl_entropy"),
    ("attnrl", "no_filter"),
    ("attnrl", "no_expansion"),
    ("attnrl", "no_batch"),
    ("treerl_off_policy", "treerl"),
    ("treerl", "grpo"),
)


def pair_table(rows: Rows) -> str:
    """Paired differences over the seeds both have: held-out at equal tokens, training accuracy at equal iterations and,
    where stage "alone" says how fast the two are, at equal wall time.
    """
    runs, paces = by_preset(rows, "main"), pace(rows)
    heads = ["held-out, equal tokens", "training accuracy, equal iterations"]
    lines = [["difference, points", "seeds", *heads, *(["training accuracy, equal wall time"] if paces else [])]]
    for a, b in PAIRS:
        seeds = sorted(set(runs.get(a, {})) & set(runs.get(b, {})))
        if not seeds:
            continue
        pairs = [(runs[a][seed], runs[b][seed]) for seed in seeds]
        cells = [signed(paired(runs[a], runs[b])), signed(at_equal_iterations(runs[a], runs[b]))]
        if a in paces and b in paces:
            seconds = [min(x["tokens"] * paces[a], y["tokens"] * paces[b]) for x, y in pairs]
            timed = zip(pairs, seconds, strict=True)
            cells.append(signed([at(x, "tokens", t / paces[a]) - at(y, "tokens", t / paces[b]) for (x, y), t in timed]))
        elif paces:
            cells.append("-")
        lines.append([f"{NAMES[a]} - {NAMES[b]}", str(len(seeds)), *cells])
    return table(lines)


def against_table(rows: Rows, others: Rows, methods: Sequence[str]) -> str:
    """Held-out differences of a queue's methods to those of another queue with the same base, tasks and rate, paired by
    seed.
    """
    runs, known = by_preset(rows, "main"), by_preset(others, "main")
    lines = [["difference, points", "seeds", "held-out, equal tokens"]]
    for a, own in runs.items():
        for b in methods:
            found = paired(own, known[b])
            lines.append([f"{NAMES[a]} - {NAMES[b]} of the other queue", str(len(found)), signed(found)])
    return table(lines)


def at_equal_iterations(own: Runs, other: Runs) -> list[float]:
    """Differences of training accuracy at the end of the iterations that both runs of a seed have."""
    pairs = [(row, other[seed]) for seed, row in sorted(own.items()) if seed in other]
    counts = [min(x["iterations"], y["iterations"]) for x, y in pairs]
    return [ending(x, n) - ending(y, n) for (x, y), n in zip(pairs, counts, strict=True)]


def iteration_table(testbeds: dict[str, Rows]) -> str:
    """Whether accuracy goes with the logarithm of the iterations over all methods, and how many of all their pairs are
    told apart at equal tokens and at equal iterations.
    """
    apart = ["told apart at equal tokens", "at equal iterations", "by chance"]
    heads = ["points a doubling", "farthest from the line", "pairs", *apart]
    lines = [["testbed", "methods", *heads]]
    for name, rows in testbeds.items():
        runs = by_preset(rows, "main")
        x, y = ([np.mean([r[key] for r in own.values()]) for own in runs.values()] for key in ("iterations", "after"))
        slope, start = np.polyfit(np.log2(x), 100 * np.array(y), 1)
        off = 100 * np.array(y) - slope * np.log2(x) - start
        place = int(np.argmax(np.abs(off)))
        farthest = f"{off[place]:+.1f} ({NAMES[list(runs)[place]]})"
        pairs = list(combinations(runs.values(), 2))
        found = [[spread(of(a, b)) for a, b in pairs] for of in (paired, at_equal_iterations)]
        counts = [sum(abs(mean) > half for mean, half in spreads) for spreads in found]
        numbers = map(str, (len(pairs), *counts, round(0.05 * len(pairs))))
        lines.append([name, str(len(runs)), f"{slope:.1f}", farthest, *numbers])
    return table(lines)


def ending(row: dict[str, Any], iterations: int, window: int = 5) -> float:
    """Mean training accuracy of the last few of a run's first `iterations`."""
    return float(np.mean(row["series"]["accuracy"][max(0, iterations - window) : iterations]))


def pace(rows: Rows) -> dict[str, float]:
    """preset -> seconds per generated token of its runs on a machine that ran nothing else: the median over iterations,
    the first, which compiles kernels and starts workers, left out.
    """
    found = {}
    for preset, own in by_preset(rows, "alone").items():
        series = [r["series"] for r in own.values()]
        found[preset] = float(
            np.median(np.concatenate([np.array(s["seconds"][1:]) / np.diff(s["tokens"]) for s in series]))
        )
    return found


def pace_table(rows: Rows) -> str:
    """How fast each method is where nothing else runs: medians over iterations, and of valid tokens also the mean with
    its 95 % interval. Paper: Table 3, valid tokens a second.
    """
    heads = ["runs", "seconds an iteration", "tokens/s", "valid tokens/s", "mean and 95 % over iterations, thousands"]
    lines = [["branching rule or method", *heads]]
    for preset, own in by_preset(rows, "alone").items():
        series = [r["series"] for r in own.values()]
        each = np.median(np.concatenate([s["seconds"][1:] for s in series]))
        valid = sum(sum(v or 0.0 for v in s["valid_tokens"][1:]) for s in series)
        valid /= sum(s["tokens"][-1] - s["tokens"][0] for s in series)
        rate = 1 / pace(rows)[preset]
        own_valid = np.concatenate([[v or 0.0 for v in s["valid_tokens"][1:]] for s in series])
        every = own_valid / np.concatenate([s["seconds"][1:] for s in series])
        numbers = [f"{each:.2f}", f"{rate:,.0f}", f"{valid * rate:,.0f}", shown(every, 1e-3, ".0f")]
        lines.append([NAMES[preset], str(len(series)), *numbers])
    return table(lines)


def knob_table(rows: Rows) -> str:
    """Held-out accuracy with one key changed, and its paired difference to the same method and seed of stage "main"."""
    main = by_preset(rows, "main")
    lines = [["method", "changed", "seeds", "held-out accuracy", "difference, points", "iterations"]]
    cells = sorted({(method(r), r["cell"]["knob"]) for r in rows if r["cell"].get("knob")})
    for preset, knob in cells:
        own = [r for r in rows if (method(r), r["cell"].get("knob")) == (preset, knob)]
        as_is = main.get(preset, {})
        gains = [r["after"] - as_is[r["cell"]["seed"]]["after"] for r in own if r["cell"]["seed"] in as_is]
        iterations = f"{np.mean([r['iterations'] for r in own]):.0f}"
        ends = shown([r["after"] for r in own])
        lines.append([NAMES[preset], f"`{knob}`", str(len(own)), ends, signed(gains) if gains else "-", iterations])
    return table(lines)


def signed(values: Sequence[float]) -> str:
    mean, half = spread([100 * v for v in values])
    return f"{mean:+.1f} ({mean - half:+.1f} to {mean + half:+.1f})" if np.isfinite(half) else f"{mean:+.1f}"


def sweep_table(rows: Rows) -> str:
    rates = sorted({r["cell"]["rate"] for r in rows if r["cell"]["stage"] == "sweep"})
    lines = [["preset", *(f"{rate:g}" for rate in rates), "seeds"]]
    for preset in NAMES:
        own = [r for r in rows if r["cell"]["stage"] == "sweep" and method(r) == preset]
        if own:
            cells = [[r["after"] for r in own if r["cell"]["rate"] == rate] for rate in rates]
            means = [100 * float(np.mean(c)) if c else np.nan for c in cells]
            best = int(np.nanargmax(means))
            texts = ["-" if np.isnan(m) else f"**{m:.1f}**" if i == best else f"{m:.1f}" for i, m in enumerate(means)]
            lines.append([NAMES[preset], *texts, str(max(len(c) for c in cells))])
    return table(lines)


COSTS = ((1, ".0f"), (1, ".0f"), (1e-6, ".2f"), (1, ".0f"))  # scale and form of iterations, updates, tokens, seconds


def cost_table(rows: Rows, goal: str = "treerl", window: int = 5) -> str:
    """In how many runs training accuracy, as a mean over `window` iterations, reaches where `goal`'s run of the same
    seed ends, and at what cost, mean and 95 % over those that do. Paper: Table 3.
    """
    runs = by_preset(rows, "main")
    heads = ["iterations", "updates", "tokens, millions", "loop seconds"]
    lines = [["branching rule or method", "runs that reach it", *heads]]
    for preset, own in runs.items():
        reached = []
        seeds = sorted(set(own) & set(runs.get(goal, {})))
        for seed in seeds:
            wanted = running_mean(runs[goal][seed]["series"]["accuracy"], window)[-1]
            if len(places := np.flatnonzero(running_mean(own[seed]["series"]["accuracy"], window) >= wanted)):
                series = own[seed]["series"]
                n = int(places[0]) + min(window, len(series["accuracy"]))
                spent = (sum(series[name][:n]) for name in ("updates", "seconds"))
                reached.append((n, next(spent), series["tokens"][n - 1], next(spent)))
        if not seeds:
            continue
        costs = zip(zip(*reached, strict=True), COSTS, strict=True) if reached else ()
        cells = [shown(values, scale, form) for values, (scale, form) in costs] or ["-"] * len(COSTS)
        lines.append([NAMES[preset], f"{len(reached)} of {len(seeds)}", *cells])
    return table(lines)


def running_mean(values: Sequence[float], window: int) -> np.ndarray:
    """Means over `window` neighbours, over all values where there are fewer.

    >>> running_mean([1.0, 2.0, 6.0], 2).tolist(), running_mean([1.0, 2.0, 6.0], 5).tolist()
    ([1.5, 4.0], [3.0])
    """
    window = min(window, len(values))
    return np.convolve(values, np.ones(window) / window, mode="valid")


PLACES = {
    "points are the first steps": "first_steps",
    "before the decisive step": "before",
    "in it": "at",
    "after it": "after",
    "points whose outcomes differ": "split",
    "first point at": "first",
    "second point at": "last",
    "FCI, position": "position_correlation",
}


def place_table(rows: Rows) -> str:
    """Where the trees branch. Without a decisive step there is no place before, in or after it."""
    runs = by_preset(rows, "main")
    known = {key for own in runs.values() for r in own.values() for key in r["branching"]}
    places = {name: key for name, key in PLACES.items() if key in known or not known}
    lines = [["rule", "trees", *places]]
    for preset, own in runs.items():
        found = [r["branching"] for r in own.values()]
        if not any(f.get("trees") for f in found):
            continue
        cells = [[f[key] for f in found if key in f] for key in places.values()]
        trees = sum(f["trees"] for f in found)
        lines.append([NAMES[preset], f"{trees:,.0f}", *(f"{np.mean(c):.2f}" if c else "-" for c in cells)])
    return table(lines)


def signal_table(rows: Rows) -> str:
    keys = {
        "trunks valid": "trunks_valid",
        "branches valid": "branches_valid",
        "both valid": "both_valid",
        "valid token share": "valid",
        "filtered": "filtered",
        "prompts a batch": "prompts",
        "entropy": "entropy",
        "KL to the start, median": "kl",
    }
    lines = [["preset", *keys]]
    for preset, own in by_preset(rows, "main").items():
        cells = []
        for key in keys.values():
            middle = np.nanmedian if key == "kl" else np.nanmean  # of the KL, single iterations can be a thousand
            values = [middle(np.array(r["series"][key], dtype=float)) for r in own.values() if key in r["series"]]
            cells.append(f"{np.mean(values):.3g}" if values else "-")
        lines.append([NAMES[preset], *cells])
    return table(lines)


def branch_table(testbeds: dict[str, Rows]) -> str:
    """The share of prompts whose branches have both outcomes, by the paper's rule and by surprisal, paired by seed and
    over the iterations that both runs have. Paper: Fig. 6.
    """
    lines = [["testbed", "seeds", "surprisal", "FCI", "FCI - surprisal, points"]]
    for name, rows in testbeds.items():
        runs = by_preset(rows, "main")
        seeds = sorted(set(runs["treerl"]) & set(runs["atb"]))
        pairs = [[runs[m][seed]["series"]["branches_valid"] for m in ("treerl", "atb")] for seed in seeds]
        theirs, ours = np.array([[np.mean(v[: min(map(len, pair))]) for v in pair] for pair in pairs]).T
        gain = signed(list(ours - theirs))
        lines.append([name, str(len(seeds)), f"{np.mean(theirs):.3f}", f"{np.mean(ours):.3f}", gain])
    return table(lines)


def auc_table(rows: Rows) -> str:
    lines = [["runs", "easy prompts", "of these with signal", "AUC of mean FCI"]]
    for preset, own in by_preset(rows, "main").items():
        found = [r["branching"] for r in own.values() if "filter_auc" in r["branching"]]
        if found and preset in ("atb", "residual", "mean", "no_filter"):
            easy, signal = (sum(f[k] for f in found) for k in ("easy_prompts", "easy_with_signal"))
            aucs = shown([f["filter_auc"] for f in found], 1.0, ".2f")
            lines.append([NAMES[preset], f"{easy:.0f}", f"{signal:.0f}", aucs])
    return table(lines)


def value_tables(values: dict[str, Any]) -> dict[str, str]:
    rules = [["rule", *next(iter(values["rules"].values()))]]
    rules += [[name, *(f"{v:.3f}" for v in row.values())] for name, row in values["rules"].items()]
    pairs = [["rank correlation over the steps of a response", "mean (95 % interval over prompts)"]]
    pairs += [
        [name, f"{m:+.2f} ({low:+.2f} to {high:+.2f})"] for name, (m, low, high) in values["correlations"].items()
    ]
    facts = [["", "decisive steps", "other steps"]]
    for name in ("squared effect", "FCI over its position null"):
        if name in values:
            facts.append([name, *(f"{v:.3f}" for v in values[name].values())])
    return {"rules": table(rules), "correlations": table(pairs), "facts": table(facts)}


def ceiling_table(worlds: dict[str, Any]) -> str:
    """Accuracy of the policy without a network, by rule, and what the oracle gains over random and first steps."""
    rules = list(next(iter(worlds.values()))["rules"])
    lines = [
        ["", "before", *(rule.replace("none", "none (GRPO)") for rule in rules), "oracle - random", "oracle - first"]
    ]
    for name, world in worlds.items():
        ends = {rule: np.array(world["rules"][rule]["accuracy"]) for rule in rules}
        cells = [f"{shown(list(ends[r]))}, {world['rules'][r]['iterations']:.0f} it." for r in rules]
        gains = [signed(list(ends["oracle"] - ends[other])) for other in ("random_steps", "first_steps")]
        lines.append([name, f"{100 * world['before']:.1f}", *cells, *gains])
    return table(lines)


def write_all(results: Path) -> None:
    """Every table of the page and every figure, from the rows on record."""
    page = PAGE.read_text()
    made: dict[str, str] = {}
    makers: dict[str, Callable[[Rows], str]] = {
        "main": main_table,
        "benchmarks": benchmark_table,
        "pairs": pair_table,
        "cost": cost_table,
        "sweep": sweep_table,
        "pace": pace_table,
        "knobs": knob_table,
        "places": place_table,
        "signal": signal_table,
        "auc": auc_table,
    }
    files = sorted(results.glob("*.jsonl"))
    kept = {file.stem: [json.loads(line) for line in file.read_text().splitlines()] for file in files}
    for stem, rows in kept.items():
        if len(prefixes := {row["cell"]["preset"].partition("_")[0] for row in rows}) > 1:
            raise SystemExit(f"{stem}: rows of several testbeds: {sorted(prefixes)}")
        made |= {f"{stem} {name}": make(rows) for name, make in makers.items()}
        one = at_one_rate(rows)
        made |= {f"{stem} {name} at one rate": makers[name](one) for name in ("main", "pairs", "signal") if one}
        if f"/results_{stem}.svg" in page:
            curves(rows, FIGURES / f"results_{stem}.svg")
    rivals = ("attnrl", "treerl", "entropy", "grpo")
    made["whole against tail"] = against_table(kept["whole"], at_one_rate(kept["tail"]), rivals)
    both = {"S": "s", "late": "late", "ripe": "ripe", "tail": "tail", "M": "m", "P": "p"}  # with surprisal and FCI
    made["branches"] = branch_table({name: at_one_rate(kept[stem]) or kept[stem] for name, stem in both.items()})
    one_rate = {title: at_one_rate(kept[stem]) for stem, title in ONE_RATE.items()}
    pretrained = {"P: grade school, pretrained, 135M weights": kept["p"]}
    made["iterations"] = iteration_table(one_rate | pretrained)
    whole = {ONE_RATE["tail"]: [*one_rate[ONE_RATE["tail"]], *(r for r in kept["whole"] if method(r) != "attnrl")]}
    gains(one_rate | whole | pretrained, FIGURES / "results_gains.svg")
    for file in sorted(results.glob("*_values.json")):
        tables = value_tables(json.loads(file.read_text()))
        made |= {f"{file.stem} {name}": text for name, text in tables.items()}
    if (results / "ceiling.json").exists():
        made["ceiling"] = ceiling_table(json.loads((results / "ceiling.json").read_text()))
    made |= {name: table(cells) for name, cells in base_cells(results).items()}
    base_figures(results, FIGURES)
    for name in re.findall(r"<!-- table (.+?) -->", page):
        if name not in made:
            raise SystemExit(f"{PAGE} asks for table {name!r}; there are: {', '.join(made)}")
        pattern = rf"(<!-- table {re.escape(name)} -->\n).*?(<!-- end -->)"
        page = re.sub(pattern, lambda m, text=made[name]: f"{m[1]}{text}\n{m[2]}", page, flags=re.DOTALL)
    PAGE.write_text(page)
