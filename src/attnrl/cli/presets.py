"""attnrl presets

Lists the presets that come with attnrl, one line each: the paper's runs, its
ablations, rival methods, and demos for small machines; then those of the
experiments of docs/results.md, whose models benchmarks/evidence.py makes. They
are what `attnrl train` and `attnrl config` take.

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
    lines = {name: f"{name:<{width}}  {about}" for name, about in known.items()}
    testbeds = [line for name, line in lines.items() if known[name].startswith("Testbed")]
    others = [line for line in lines.values() if line not in testbeds]
    show("\n".join([*others, "", "Experiments of docs/results.md:", *testbeds]))
