"""attnrl disrupt --model MODEL --output DIR [--benchmarks NAME,NAME]

The disruption experiment of the paper (Sec. 3.1.2, Fig. 3). Draws responses,
hides one step of each from all later text (no new token attends to it), draws
the rest anew and grades it; beside it the same continuation, nothing hidden,
by the same random numbers. The step is one of the top 20 % by FCI, of the other
80 %, of the top 20 % by entropy, or, beyond the paper, the one of those 80 %
that stands nearest to the first: early steps have a higher FCI whatever they
say. Prints accuracy per type and by position in five bins, with 95 % intervals.

The output directory gets trials.jsonl (as they come), results.json and, where
matplotlib is there, the figure. The same command goes on after an interruption.
Models take the settings `attnrl eval` gives them.

Examples:
  attnrl disrupt --model demo --output results/disrupt
  attnrl disrupt --model M --benchmarks aime24,aime25 --samples 8 --output D
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import Field

from attnrl.analysis.disruption import TYPES, Trial, summary
from attnrl.checkpoint import finite, write_json
from attnrl.cli.eval import DRAWN
from attnrl.cli.flags import read_flags, show
from attnrl.config import Section
from attnrl.errors import DataError, MissingExtraError

SHORT = DRAWN | {"delta": "algo.delta"}


class DisruptFlags(Section):
    """The flags of `attnrl disrupt`."""

    model: str
    """Directory or hub name of a Hugging Face model, a run directory, or "demo" (comes with attnrl)."""
    output: Path
    """Output directory."""
    seed: int = Field(0, ge=0)
    """Seed of sampling and of the choice of steps."""
    chunk: int = Field(64, ge=1)
    """Responses between two writes to the output directory."""


def main(argv: list[str]) -> None:
    flags, overrides = read_flags(DisruptFlags, argv, str(__doc__), short=SHORT)
    from attnrl.launch.disrupting import disrupt

    trials = disrupt(flags.model, flags.output, overrides=overrides, seed=flags.seed, chunk=flags.chunk, say=show)
    if not trials:
        raise DataError(f"{flags.output}: no response has enough steps to choose from")
    found = summary(trials)
    write_json(flags.output / "results.json", finite(found))
    show(table(found))
    show(draw(trials, flags.output))


def draw(trials: list[Trial], output: Path) -> str:
    """Writes the figure; says where, or why not."""
    from attnrl.analysis.plots import draw_disruption, save_figure

    try:
        files = save_figure(draw_disruption(trials), output, "fig3_disruption")
    except MissingExtraError as error:
        return f"results in {output}; no figure: {error}"
    return f"results in {output}: {', '.join(file.name for file in files)}"


def table(found: dict[str, Any]) -> str:
    """The numbers people read, in percent."""
    lines = [f"{found['responses']} responses, {100 * found['original_accuracy']:.1f} % of them right"]
    lines += ["", f"{'hidden step':40} {'trials':>6} {'place':>6} {'intact':>7} {'hidden':>22} {'drop':>24}"]
    for e in found["types"]:
        hidden = f"{100 * e['disrupted']:.1f} [{100 * e['disrupted_low']:.1f}, {100 * e['disrupted_high']:.1f}]"
        drop = f"{100 * e['drop']:+.1f} [{100 * e['drop_low']:+.1f}, {100 * e['drop_high']:+.1f}]"
        place = f"{100 * e['position']:.0f} %"
        lines.append(
            f"{TYPES[e['type']]:40} {e['trials']:6} {place:>6} {100 * e['intact']:7.1f} {hidden:>22} {drop:>24}"
        )
    lines.append("")
    for name, c in found["fci_top_costs_more_than"].items():
        points = f"{100 * c['points']:+.1f} points [{100 * c['low']:+.1f}, {100 * c['high']:+.1f}]"
        lines.append(f"cost of hiding {TYPES['fci_top']} minus that of hiding {TYPES[name]}: {points}")
    lines += ["", "place of the hidden step, accuracy with it hidden:"]
    for number, row in enumerate(found["by_position"]):
        span = f"{20 * number:3} to {20 * (number + 1):3} %"
        accuracy, low, high = (f"{100 * row[name]:.1f}" for name in ("accuracy", "low", "high"))
        said = f"{accuracy} [{low}, {high}] of {row['trials']}" if row["trials"] else "no trial"
        lines.append(f"  {span}   {said}")
    return "\n".join(lines)
