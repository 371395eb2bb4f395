"""attnrl check PRESET [--prompts 2] [--responses 4] [--section.key VALUE ...]

Looks at everything before the GPU hours are spent, in a minute or so: loads
config, data, tokenizer and model, renders one prompt as the model will see it,
grades five rows with their gold and with nonsense, forecasts memory and time of
an iteration, draws a few responses, runs every part of [algo] over them,
compares the sampler's log-probs with the learner's, and makes an update at no
learning rate, which must change nothing.

Each line says ok, look (it may be meant so) or wrong; the exit code is 1 where
something is wrong. Nothing is written.

Examples:
  attnrl check demo
  attnrl check mine.toml --prompts 4 --responses 8
  attnrl check attnrl_1p5b --model.path ../models/mine --data.train rows.jsonl
"""

from __future__ import annotations

from pydantic import Field

from attnrl.cli.flags import read_flags
from attnrl.config import Section


class CheckFlags(Section):
    """The flags of `attnrl check`."""

    preset: str
    """one preset: attnrl check PRESET; `attnrl presets` lists them."""
    prompts: int = Field(2, ge=1)
    """Prompts that responses are drawn for."""
    responses: int = Field(4, ge=1)
    """Responses to each."""


def main(argv: list[str]) -> int:
    flags, overrides = read_flags(CheckFlags, argv, str(__doc__), short={}, words="preset")
    from attnrl.launch import check

    found = check(flags.preset, overrides=overrides, prompts=flags.prompts, responses=flags.responses)
    return int(any(finding.level == "wrong" for finding in found))
