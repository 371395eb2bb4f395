"""attnrl train PRESET --run-dir DIR [--resume] [--section.key VALUE ...]

Trains a policy and writes a run directory: resolved config, metrics.jsonl,
forests in parquet, checkpoints in Hugging Face format. Each
iteration prints a line: prompts of the batch, share of right trunks, share of
prompts whose rewards differ (valid), samples trained on, mean length and share
cut off of what was drawn, steps a trunk, entropy, KL to the start, speed of
drawing, time left (docs/metrics.md).

PRESET is a name from `attnrl presets`, or the path of a TOML file. With
--resume it may be left out: a run goes on from its newest checkpoint with its
own config, exactly as if it had not been stopped. A finished run is left alone.

Ctrl-C (or SIGTERM) ends a run after the iteration that is running, with a
checkpoint; a second one ends it at once.

Examples:
  attnrl train demo --run-dir runs/a
  attnrl train --run-dir runs/a --resume
  attnrl train --run-dir runs/a --resume --iterations 40
  attnrl train attnrl_1p5b --run-dir runs/b --data.train train.parquet \\
    --algo.points 3 --run.trackers tensorboard
"""

from __future__ import annotations

from pathlib import Path

from attnrl.cli.flags import read_flags
from attnrl.config import Section

SHORT = {"iterations": "run.iterations", "seed": "run.seed"}


class TrainFlags(Section):
    """The flags of `attnrl train`."""

    preset: str | None = None
    """A preset: attnrl train PRESET --run-dir D; `attnrl presets` lists them."""
    run_dir: Path
    """The run directory; it must be new, or --resume given."""
    resume: bool = False
    """Go on from the newest checkpoint of a run that was stopped or killed."""


def main(argv: list[str]) -> None:
    flags, overrides = read_flags(TrainFlags, argv, str(__doc__), short=SHORT, words="preset")
    from attnrl.launch import train

    train(flags.preset, flags.run_dir, resume=flags.resume, overrides=overrides)
