"""attnrl presets

Lists the presets that come with attnrl, one line each: the paper's runs, its
ablations, rival methods, and demos for small machines. They are what `attnrl
train` and `attnrl config` take.

Examples:
  attnrl presets
  attnrl config demo  # what is in one of them
"""

from __future__ import annotations

from attnrl.cli.flags import read_flags, show
from attnrl.config import Section, presets


def main(argv: list[str]) -> None:
    read_flags(Section, argv, str(__doc__))
    known = presets()
    width = max(map(len, known))
    show("\n".join(f"{name:<{width}}  {about}" for name, about in known.items()))
