"""attnrl presets

Lists the presets that come with attnrl, one line each: the paper's runs, its
ablations, rival methods, and demos for small machines. They are what `attnrl
train` and `attnrl config` take.

Examples:
  attnrl presets
  attnrl config demo      what is in one of them
"""

from __future__ import annotations

from attnrl.cli.flags import show, wants_help
from attnrl.config import presets
from attnrl.errors import ConfigError


def main(argv: list[str]) -> int:
    if wants_help(argv):
        show(str(__doc__))
        return 0
    if argv:
        raise ConfigError(f"takes no arguments, got {argv[0]!r}")
    known = presets()
    width = max(map(len, known))
    show("\n".join(f"{name:<{width}}  {about}" for name, about in known.items()))
    return 0
