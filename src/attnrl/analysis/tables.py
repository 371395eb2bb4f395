"""A comparison as tables, in Markdown or LaTeX, in the form of the paper's Tables 1 to 3."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

from attnrl.analysis.comparison import Comparison, Estimate, estimate, paired

Format = Literal["markdown", "latex"]
UNITS = ((1e9, "B"), (1e6, "M"), (1e3, "k"))


def tables(found: Comparison, form: Format = "markdown") -> str:
    """Accuracy by benchmark (Tables 1 and 2), cost (Table 3), and curve numbers with paired differences."""
    noun = found.axis.removesuffix("s")
    at = f"at {short(found.budget)} {noun if found.budget == 1 else found.axis}"
    seeds = ", ".join(f"{m.name} {len(m.runs)}" for m in found.methods)
    alone = all(len(m.runs) == 1 for m in found.methods)
    sure = (
        "one seed a method: no interval can be given, and a difference may be chance"
        if alone
        else "differences are paired by seed, brackets are 95 % intervals by bootstrap over seeds"
    )
    early = any(math.isnan(n.iterations) for rows in found.numbers for n in rows)
    unknown = "; –: the first iteration of a run had not ended by then" if early else ""
    parts = [
        (
            f"Held-out accuracy in percent, {at} (mean over seeds: {seeds}; on the line between evaluations)",
            accuracy_rows(found),
        ),
        (f"Cost and accuracy, {at}{unknown}", cost_rows(found)),
        (
            f"Curves, {at}; Area is the mean height of the accuracy curve, target {100 * found.target:.1f} %; {sure}",
            curve_rows(found),
        ),
    ]
    write = markdown if form == "markdown" else latex
    return "\n".join(write(title, rows) for title, rows in parts)


def accuracy_rows(found: Comparison) -> list[list[str]]:
    """One row a method: final accuracy of each benchmark, and their average; the best of a column is bold."""
    names = list(dict.fromkeys(name for rows in found.numbers for n in rows for name in n.by_benchmark))
    columns: list[list[float]] = []
    for rows in found.numbers:
        each = [estimate([n.by_benchmark.get(name, math.nan) for n in rows]).mean for name in names]
        columns.append([*each, estimate([n.final for n in rows]).mean])
    body = [[f"{100 * v:.1f}" if v == v else "–" for v in row] for row in columns]
    for j in range(len(names) + 1):
        top = max((row[j] for row in columns if row[j] == row[j]), default=math.nan)
        for i, row in enumerate(columns):
            if len(columns) > 1 and f"{100 * row[j]:.1f}" == f"{100 * top:.1f}":
                body[i][j] = f"**{body[i][j]}**"
    return [["Method", *names, "Avg."], *([m.name, *row] for m, row in zip(found.methods, body, strict=True))]


def cost_rows(found: Comparison) -> list[list[str]]:
    """One row a method: iterations, wall time, valid tokens, accuracy, as in Table 3."""
    rows = [["Method", "# Iterations", "Wall-clock time", "# Valid tokens", "Accuracy"]]
    for method, numbers in zip(found.methods, found.numbers, strict=True):
        mean = [estimate([getattr(n, k) for n in numbers]).mean for k in ("iterations", "seconds", "valid_tokens")]
        last = f"{100 * estimate([n.final for n in numbers]).mean:.1f}"
        rows.append([method.name, short(mean[0]), span(mean[1]), short(mean[2]), last])
    return rows


def curve_rows(found: Comparison) -> list[list[str]]:
    """One row a method: final, best, mean height of the curve, cost to reach the target, difference to the baseline."""
    rows = [["Method", "Final", "Best", "Area", "Tokens to target", "Time to target", "Difference"]]
    base = found.numbers[found.baseline]
    for i, (method, numbers) in enumerate(zip(found.methods, found.numbers, strict=True)):
        points = [percent(estimate([getattr(n, k) for n in numbers])) for k in ("final", "best", "area")]
        tokens = estimate([n.to_target_tokens for n in numbers]).mean
        seconds = estimate([n.to_target_seconds for n in numbers]).mean
        other = "baseline" if i == found.baseline else percent(paired(base, numbers), sign=True)
        rows.append([method.name, *points, short(tokens), span(seconds), other])
    return rows


def percent(value: Estimate, *, sign: bool = False) -> str:
    """An accuracy in percent, with its interval where there is one.

    >>> percent(Estimate(0.5, 0.4, 0.6)), percent(Estimate(0.01, float("nan"), float("nan")), sign=True)
    ('50.0 [40.0, 60.0]', '+1.0')
    """
    if value.mean != value.mean:
        return "–"
    plus = "+" if sign else ""
    centre = f"{100 * value.mean:{plus}.1f}"
    return centre if value.low != value.low else f"{centre} [{100 * value.low:{plus}.1f}, {100 * value.high:{plus}.1f}]"


def short(value: float) -> str:
    """A count in three digits.

    >>> short(754321), short(20.0), short(float("nan"))
    ('754k', '20', '–')
    """
    if value != value:
        return "–"
    scale, letter = next(((s, u) for s, u in UNITS if value >= s), (1, ""))
    return f"{value / scale:.3g}{letter}" if scale > 1 else f"{value:g}"


def span(seconds: float) -> str:
    """A time in hours, or in minutes where that is short."""
    if seconds != seconds:
        return "–"
    return f"{seconds / 3600:.1f} h" if seconds >= 3600 else f"{seconds / 60:.1f} min"


def markdown(title: str, rows: Sequence[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    rule = "|" + "|".join(["---"] + ["---:"] * (len(rows[0]) - 1)) + "|"
    return "\n".join([f"**{title}**", "", lines[0], rule, *lines[1:], ""])


def latex(title: str, rows: Sequence[Sequence[str]]) -> str:
    def cell(text: str) -> str:
        inner = text.strip("*") if text.startswith("**") else text
        for plain in "&%$#_{}":
            inner = inner.replace(plain, f"\\{plain}")
        inner = inner.replace("–", "--")
        return f"\\textbf{{{inner}}}" if text.startswith("**") else inner

    body = [" & ".join(map(cell, row)) + r" \\" for row in rows]
    head = " & ".join(f"\\textbf{{{cell(c)}}}" for c in rows[0]) + r" \\"
    lines = [r"\begin{table}[!ht]", r"\centering", f"\\caption{{{cell(title)}.}}"]
    lines += [f"\\begin{{tabular}}{{l{'c' * (len(rows[0]) - 1)}}}", r"\toprule", head, r"\midrule", *body[1:]]
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}", r"\end{table}", ""])
