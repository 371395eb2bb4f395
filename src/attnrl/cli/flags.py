"""Flags of two kinds: dotted ones over a config (`--algo.points 3`), and those of a dataclass, read by tyro."""

from __future__ import annotations

import io
import shutil
import sys
import textwrap
import tomllib
from collections.abc import Sequence
from contextlib import redirect_stdout, suppress
from typing import Any, TypeVar

import tyro

from attnrl.config import keys, load_config
from attnrl.errors import ConfigError

Flags = TypeVar("Flags")


def parse(
    argv: Sequence[str], *, plain: Sequence[str] = (), switches: Sequence[str] = ()
) -> tuple[list[str], dict[str, Any]]:
    """Words and flags of a command line. Flags named in `plain` or `switches` keep their name; others are dotted keys.

    >>> parse(["demo", "--algo.points=3", "--resume"], switches=["resume"])
    (['demo'], {'algo.points': 3, 'resume': True})
    """
    words: list[str] = []
    flags: dict[str, Any] = {}
    rest = list(argv)
    while rest:
        word = rest.pop(0)
        if not word.startswith("--"):
            words.append(word)
            continue
        name, equals, value = word[2:].partition("=")
        name = name if "." in name else name.replace("_", "-")
        if name in switches:
            if equals and value not in ("true", "false"):
                raise ConfigError(f"--{name} is a switch: leave it out, or write --{name}")
            flags[name] = value != "false"
            continue
        if not equals:
            if not rest:
                raise ConfigError(f"--{name} needs a value")
            value = rest.pop(0)
        flags[name] = value if name in plain else toml_value(value)
    return words, flags


def toml_value(text: str) -> Any:
    """A flag's value: TOML where it reads as TOML, else the text itself.

    >>> toml_value("3"), toml_value("[1, 2]"), toml_value("true"), toml_value("easy")
    (3, [1, 2], True, 'easy')
    """
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def read_flags(kind: type[Flags], argv: Sequence[str], about: str, default: Flags | None = None) -> Flags:
    """The flags of a command as a `kind`; `--help` prints what it is about, then the flags, and ends the program."""
    prog = " ".join(about.split()[:2])
    if wants_help(argv):
        listed = io.TextIOWrapper(io.BytesIO(), sys.stdout.encoding)  # tyro draws what the terminal can show
        with redirect_stdout(listed), suppress(SystemExit):
            tyro.cli(kind, args=["--help"], prog=prog, description=" ")
        listed.seek(0)
        show(f"{about}\n{listed.read().partition(chr(10))[2].strip()}")  # without tyro's line of usage
        raise SystemExit(0)
    if default is None:
        return tyro.cli(kind, args=argv, prog=prog)
    return tyro.cli(kind, args=argv, prog=prog, default=default)


def unset(metavar: str) -> Any:
    """A flag that is None where it is not given: tyro need not say so."""
    return tyro.conf.arg(metavar=metavar, help_behavior_hint="")


def describe_keys(preset: str = "attnrl_1p5b") -> str:
    """Every key of the config with its value in `preset` and its line of documentation, as wide as the terminal."""
    values = load_config(preset).model_dump(mode="json")
    width = min(shutil.get_terminal_size().columns, 120)
    lines = []
    for key, about in keys().items():
        value: Any = values
        for part in key.split("."):
            value = value[part]
        for first, text in (("  ", f"--{key} {value!r}"), (" " * 8, about)):
            lines += textwrap.wrap(
                text,
                width,
                initial_indent=first,
                subsequent_indent=" " * 8,
                break_on_hyphens=False,
                break_long_words=False,
            )
    return "\n".join(lines)


def wants_help(argv: Sequence[str]) -> bool:
    return "--help" in argv or "-h" in argv


def show(text: str) -> None:
    sys.stdout.write(text.rstrip("\n") + "\n")
