"""Dotted flags over a config: `--algo.points 3` or `--algo.points=3`."""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Sequence
from typing import Any

from attnrl.config import keys, load_config
from attnrl.errors import ConfigError


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


def describe_keys(preset: str = "attnrl_1p5b") -> str:
    """Every key of the config with its value in `preset` and its line of documentation."""
    values = load_config(preset).model_dump(mode="json")
    lines = []
    for key, about in keys().items():
        value: Any = values
        for part in key.split("."):
            value = value[part]
        lines.append(f"  --{key} {value!r}\n        {about}")
    return "\n".join(lines)


def wants_help(argv: Sequence[str]) -> bool:
    return "--help" in argv or "-h" in argv


def show(text: str) -> None:
    sys.stdout.write(text.rstrip("\n") + "\n")
