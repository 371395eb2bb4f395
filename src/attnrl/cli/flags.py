"""One grammar of flags for every command: `--name VALUE`, `--name=VALUE`, `--switch`, and words.

A command's own flags are the fields of a `Section`; where it takes keys of the config, they are dotted
(`--algo.points 3`) or have a short name. A value is read as its key's type wants it: text as it stands; else TOML or
JSON; a list also as names between commas, or as one name by itself; "none" is nothing where a key may be empty, and
an empty list.
"""

from __future__ import annotations

import json
import shutil
import sys
import textwrap
import tomllib
import types
from collections.abc import Mapping, Sequence
from functools import reduce
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from attnrl.config import Section, fields, keys, load_config, presets, put
from attnrl.errors import ConfigError, near

Flags = TypeVar("Flags", bound=Section)


def read_flags(
    kind: type[Flags],
    argv: Sequence[str],
    about: str,
    *,
    short: Mapping[str, str] | None = None,
    words: str = "",
    flat: str = "",
) -> tuple[Flags, dict[str, Any]]:
    """The flags of a command as a `kind`, and the keys of the config that were set, dotted.

    `short` names keys of the config by shorter names; None: the command takes no keys of the config. `words` is the
    field that takes the words between flags. The keys of the section `flat` of `kind` need no prefix. `--help` prints
    what the command is about, then its flags, those of the config as the preset that stands first has them, and ends.
    """
    if wants_help(argv):
        preset = argv[0] if words == "preset" and argv[0] in presets() else ""
        show(f"{about.rstrip()}\n\n{describe_flags(kind, short, words, flat, preset)}")
        raise SystemExit(0)
    own: dict[str, Any] = {}
    overrides: dict[str, Any] = {}
    given: list[str] = []
    known, rest = fields(kind), list(argv)
    while rest:
        word = rest.pop(0)
        if not word.startswith("--") or word == "--":
            given.append(word)
            continue
        raw, equals, text = word[2:].partition("=")
        name = ".".join(part.replace("-", "_") for part in raw.split("."))
        name = f"{flat}.{name}" if flat and f"{flat}.{name}" in known else name
        ours = name in known and name != words
        key = name if ours else (short or {}).get(name, name)
        if not ours and (short is None or key not in fields()):
            raise ConfigError(unknown_flag(raw, kind, short, words, flat))
        wanted = (known if ours else fields())[key].annotation
        if wanted is bool and not equals and (not rest or rest[0].lower() not in ("true", "false")):
            text = "true"
        elif not equals:
            if not rest or (rest[0].startswith("--") and len(rest[0]) > 2 and not _is_number(rest[0])):
                raise ConfigError(f"--{raw} needs a value")
            text = rest.pop(0)
        if ours:
            put(own, key, read_value(text, wanted))
        else:
            overrides[key] = read_value(text, wanted)
    if given and not words:
        raise ConfigError(
            f"takes no arguments, got {given[0]!r}; `{' '.join(about.split()[:2])} --help` shows the flags"
        )
    if given:
        is_list = _is_list(known[words].annotation)
        if len(given) > 1 and not is_list:
            raise ConfigError(f"takes one {words.replace('_', ' ')}, got {len(given)}: {', '.join(given)}")
        own[words] = given if is_list else given[0]
    try:
        return kind.model_validate(own), overrides
    except ValidationError as error:
        raise ConfigError(_explain_own(error, kind, words)) from None


def read_value(text: str, wanted: Any) -> Any:
    """The value a key of this type gets from a flag's text.

    >>> read_value("3", int), read_value("3", str), read_value("easy", str), read_value('{"a": 1}', dict)
    (3, '3', 'easy', {'a': 1})
    >>> read_value("2,6", tuple[int, int]), [read_value(text, tuple[str, ...]) for text in ("a.parquet", "none")]
    ([2, 6], [['a.parquet'], []])
    """
    members = _members(wanted)
    if type(None) in members and text.lower() == "none":
        return None
    if _is_list(wanted):
        if text.lower() == "none":
            return []
        value = plain_value(text) if text.lstrip()[:1] in ("[", "{") else None
        if isinstance(value, list | dict):
            return value
        inner = next(get_args(m)[0] for m in members if get_origin(m) is tuple)
        return [read_value(part.strip(), inner) for part in text.split(",") if part.strip()]
    if members <= {str, Path, type(None)} or all(get_origin(m) is Literal for m in members - {type(None)}):
        return plain_value(text) if text[:1] in ("'", '"') else text
    return plain_value(text)


def plain_value(text: str) -> Any:
    """A value without knowing its type: TOML or JSON where it reads as such, else the text itself.

    >>> plain_value("3"), plain_value("[1, 2]"), plain_value('{"a": 1}'), plain_value("{a = 1}"), plain_value("easy")
    (3, [1, 2], {'a': 1}, {'a': 1}, 'easy')
    """
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        pass
    try:
        return json.loads(text)
    except ValueError:
        return text


def _members(wanted: Any) -> set[Any]:
    """The types that a union allows; a single one by itself."""
    if get_origin(wanted) is Annotated:
        return _members(get_args(wanted)[0])
    if get_origin(wanted) in (Union, types.UnionType):
        return {m for one in get_args(wanted) for m in _members(one)}
    return {wanted}


def _is_list(wanted: Any) -> bool:
    return any(get_origin(m) is tuple for m in _members(wanted))


def _is_number(text: str) -> bool:
    return isinstance(plain_value(text), int | float)


def unknown_flag(name: str, kind: type[BaseModel], short: Mapping[str, str] | None, words: str, flat: str = "") -> str:
    """What is wrong with a flag that no command of this kind has, and which it may have been."""
    known = [key.removeprefix(f"{flat}.") if flat else key for key in keys(kind) if key != words]
    if short is not None:
        known += [*short, *keys()]
    named = name.replace("-", "_")
    if meant := [flag for flag, key in (short or {}).items() if key.rpartition(".")[2] == named]:
        return f"unknown flag --{name}; did you mean --{meant[0].replace('_', '-')}?"
    hint = near(named, known).replace("'", "").replace("mean ", "mean --").replace("_", "-")
    more = "--help lists them" if short is None else "--help lists them, `attnrl config --help` the keys of the config"
    return f"unknown flag --{name}{hint or f'; {more}'}"


def _explain_own(error: ValidationError, kind: type[BaseModel], words: str) -> str:
    lines = []
    for item in error.errors():
        key = ".".join(str(part) for part in item["loc"])
        missing = item["type"] == "missing"
        if missing and key not in keys(kind) and (whole := key.rpartition(".")[0]) in keys(kind):
            lines.append(f"--{whole.replace('_', '-')} has too few values: {keys(kind)[whole].rstrip('.')}")
        elif missing and key == words:
            lines.append(f"give {keys(kind)[key].rstrip('.')}")
        elif missing:
            lines.append(f"--{key.replace('_', '-')} is needed: {keys(kind).get(key, '').rstrip('.')}")
        else:
            lines.append(
                f"--{key.replace('_', '-')}: {item['msg'].removeprefix('Value error, ')}, got {item['input']!r}"
            )
    return "\n  ".join(lines)


def describe_flags(
    kind: type[BaseModel], short: Mapping[str, str] | None, words: str, flat: str = "", preset: str = ""
) -> str:
    """The flags of a command with their defaults, those of the config in `preset`, and lines of documentation."""
    entries, config = [], load_config(preset)
    for key, line in keys(kind).items():
        if key != words:
            name = key.removeprefix(f"{flat}.") if flat else key
            field = fields(kind)[key]
            entries.append((f"--{name.replace('_', '-')}{_default(field)}", line + _choices(field)))
    for name, key in (short or {}).items():
        field, line = fields()[key], keys()[key]
        value = _default(field, reduce(getattr, key.split("."), config))
        entries.append((f"--{name.replace('_', '-')}{value}", f"{line} ({key}){_choices(field)}"))
    if short is not None:
        other = "another key of the config that the command takes: `attnrl config --help` lists them"
        entries.append(("--section.key VALUE", other))
    return "Flags:\n\n" + in_columns(entries) if entries else ""


def _default(field: FieldInfo, value: Any = ...) -> str:
    """What stands behind a flag: its value, by default the field's own default."""
    if field.annotation is bool:
        return ""
    if field.is_required():
        return " VALUE"
    value = field.get_default(call_default_factory=True) if value is ... else value
    shown = "none" if value is None else ",".join(map(str, value)) if isinstance(value, tuple) else value
    return f" {shown}" if str(shown) else ' ""'


def describe_keys(preset: str = "attnrl_1p5b") -> str:
    """Every key of the config with its value in `preset` and its line of documentation, as wide as the terminal."""
    values = load_config(preset).model_dump(mode="json")
    entries = []
    for key, about in keys().items():
        value: Any = values
        for part in key.split("."):
            value = value[part]
        entries.append((f"--{key} {value!r}", about + _choices(fields()[key])))
    return in_columns(entries)


def _choices(field: FieldInfo) -> str:
    """The values of a key that has only a few, as words to put behind its documentation."""
    names = [str(name) for m in _members(field.annotation) if get_origin(m) is Literal for name in get_args(m)]
    return f" One of: {', '.join(names)}." if names else ""


def in_columns(entries: Sequence[tuple[str, str]]) -> str:
    """Names and, indented below each, what they are about."""
    width = min(shutil.get_terminal_size().columns, 120)
    lines = []
    for name, about in entries:
        for first, text in (("  ", name), (" " * 8, about)):
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
    sys.stdout.flush()
