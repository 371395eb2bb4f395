"""Every `attnrl ...` line of the README, the docs and the commands' own help is read by the real flag reader: a flag, a
preset or a value that does not exist fails here. Nothing is executed.
"""

from __future__ import annotations

import importlib
import itertools
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from attnrl.cli import COMMANDS
from attnrl.cli.flags import read_flags
from attnrl.config import load_config, presets
from attnrl.errors import AttnRLError

ROOT = Path(__file__).parent.parent
FENCED = re.compile(r"^```[^\n]*\n(.*?)^```", re.DOTALL | re.MULTILINE)
INDENTED = re.compile(r"(?:(?<=\n\n)|\A)((?:    .*(?:\n|\Z))+)")
SPAN = re.compile(r"`(attnrl [^`]+)`")
LOOP = re.compile(r"\bfor (\w+) in ([^;\n]+);")


class Read(Exception):
    """What the reader made of a command line; raised in place of running it."""


def commands(text: str) -> list[str]:
    """The command lines of a Markdown page: those of its code blocks, and spans of code with more than a name."""
    blocks = FENCED.findall(text)
    rest = FENCED.sub("\n", text)
    blocks += INDENTED.findall(rest)
    found = [line for block in blocks for line in in_block(block)]
    for span in SPAN.findall(INDENTED.sub("\n", rest)):
        words = span.split()
        if len(words) > 2 and words[1] in COMMANDS and "..." not in words:  # "..." stands for the rest: a reminder
            found.append(" ".join(words))
    return found


def in_block(block: str) -> Iterator[str]:
    """The commands of a block: lines joined, comments gone, loops written out."""
    loops = [[(name, value) for value in values.split()] for name, values in LOOP.findall(block)]
    for line in re.sub(r"\\\n\s*", "", block).splitlines():
        line = re.split(r"\s#\s|\s>\s", line.strip().removeprefix("$ "))[0].strip()
        if not line.startswith("attnrl "):
            continue
        for chosen in itertools.product(*loops):
            written = line
            for name, value in chosen:
                written = re.sub(rf"\${name}\b|\${{{name}}}", value, written)
            yield written


def pages() -> dict[str, str]:
    files = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    found = {str(file.relative_to(ROOT)): file.read_text("utf-8") for file in files}
    for name in COMMANDS:  # the examples of --help are indented as well
        text = importlib.import_module(f"attnrl.cli.{name}").__doc__ or ""
        examples = text.partition("Example")[2].partition("\n")[2]
        found[f"attnrl {name} --help"] = re.sub(r"^  ", "    ", examples, flags=re.MULTILINE)
    return found


LINES = list(dict.fromkeys((page, line) for page, text in pages().items() for line in commands(text)))


def read(line: str, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, dict[str, Any]]:
    """The flags and keys of a command line, by its own command up to the place where it would begin to work."""
    _, name, *argv = shlex.split(line)
    module = importlib.import_module(f"attnrl.cli.{name}")

    def reader(*args: Any, **options: Any) -> None:
        raise Read(read_flags(*args, **options))

    monkeypatch.setattr(module, "read_flags", reader)
    with pytest.raises(Read) as stopped:
        module.main(argv)
    flags, overrides = stopped.value.args[0]
    return flags, overrides


def check(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Raise where a command line would be refused for its words alone."""
    words = shlex.split(line)
    assert words[1] in COMMANDS, f"no command {words[1]!r}"
    if "--help" in words:
        return
    flags, overrides = read(line, monkeypatch)
    named = getattr(flags, "presets", ()) or (getattr(flags, "preset", None) or "",)
    for preset in named:  # a file of the reader's own may say anything; what is set beside it is checked
        load_config("" if preset.endswith(".toml") else preset, overrides)


@pytest.mark.parametrize(("page", "line"), LINES, ids=[f"{page}: {line}" for page, line in LINES])
def test_a_command_of_the_docs_is_one(page: str, line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check(line, monkeypatch)


def test_the_pages_are_found_and_every_command_has_an_example() -> None:
    assert len(LINES) > 90
    assert {line.split()[1] for page, line in LINES if page.endswith("--help")} == set(COMMANDS)
    assert {"README.md", "docs/evaluation.md", "docs/tasks.md", "docs/first_runs.md"} <= {page for page, _ in LINES}


PAGE = """
Run `attnrl view`, or `attnrl eval --model M
--outptu x`, or `attnrl score ... --html PAGE`.

    attnrl report runs/a   # all of it

```
for method in grpo nosuch; do
  attnrl train demo_$method --run-dir runs/${method} \\
    --run.seed 1
done
```
"""


def test_what_is_found_on_a_page_and_what_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    found = commands(PAGE)
    assert found == [
        "attnrl train demo_grpo --run-dir runs/grpo --run.seed 1",
        "attnrl train demo_nosuch --run-dir runs/nosuch --run.seed 1",
        "attnrl report runs/a",
        "attnrl eval --model M --outptu x",
    ]
    assert "demo_grpo" in presets()
    for line, said in (
        (found[1], "no preset 'demo_nosuch'"),
        (found[3], "did you mean --output"),
        ("attnrl train demo --run-dir x --algo.points 0", "algo.points"),
        ("attnrl compare a --at hours", "--at: Input should be 'iterations'"),
        ("attnrl view", "run directories"),
    ):
        with pytest.raises(AttnRLError, match=re.escape(said)):
            check(line, monkeypatch)
    check(found[0], monkeypatch)
    check(found[2], monkeypatch)
