"""Keys that only some settings take: the mark on such a key, and the check that none of them is set in vain."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Set
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from attnrl.errors import ConfigError


@dataclass(frozen=True, slots=True)
class For:
    """A mark on a key, or on a section and all of its keys: what it is for, in words and as a test of the whole config.

    A key's own mark stands in place of its section's. Without a test the parts say whether one of them takes the key.
    """

    what: str
    where: Callable[[Any], bool] | None = None
    in_files: bool = True  # False: a file may hold it for another choice than the one made; only flags set it in vain
    even_default: bool = False  # True: set in vain also as its default, which a preset may have changed


PART = For("a part with such an option")


def check_taken(config: BaseModel, by_parts: Set[str] = frozenset()) -> None:
    """Raise ConfigError where the user set a key that nothing takes. `by_parts` are the dotted keys that parts take.

    Set is what `model_fields_set` holds: of a config that was loaded, what flags and the user's own files say, not what
    presets do.
    """
    for key, (section, mark) in idle_keys(config, by_parts, only_set=True).items():
        fields = type(section).model_fields
        parts = [f"{name} {getattr(section, name)!r}" for name in fields if f"{name}_options" in fields]
        here = f" ({', '.join(parts)})" if mark is PART else ""
        value = getattr(section, key.rpartition(".")[2])
        raise ConfigError(f"{key} = {value!r} is set, but nothing takes it: it is for {mark.what}{here}; leave it out")


def check_used(config: BaseModel, what: str, takes: Set[str]) -> None:
    """Raise ConfigError where the user set a key that is not among those that a command `takes`: dotted, a section
    standing for all of its keys. `what` names the command.

    It is for configs that hold no file of the user's own: such a file may be a whole run's.
    """
    for key, value in _set_keys(config):
        if not any(f"{key}.".startswith(f"{one}.") for one in takes):
            known = ", ".join(sorted(takes)) or "no key of the config"
            raise ConfigError(f"{key} = {value!r} is set, but nothing takes it: {what} takes {known}; leave it out")


def _set_keys(section: BaseModel, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted key and value of what the user set."""
    for name in type(section).model_fields:
        if name in section.model_fields_set:
            value = getattr(section, name)
            yield from (
                _set_keys(value, f"{prefix}{name}.") if isinstance(value, BaseModel) else [(prefix + name, value)]
            )


def idle_keys(
    config: BaseModel, by_parts: Set[str] = frozenset(), *, only_set: bool = False
) -> dict[str, tuple[BaseModel, For]]:
    """The dotted keys that nothing takes, with section and mark; not those with their default value, unless the mark
    says so."""
    found = {}

    def look(section: BaseModel, prefix: str, above: For | None) -> None:
        for name, field in type(section).model_fields.items():
            key, value, mark = f"{prefix}{name}", getattr(section, name), mark_of(field, above)
            plain = value == field.get_default() and not (mark and mark.even_default)
            if plain or (only_set and name not in section.model_fields_set):
                continue
            if isinstance(value, BaseModel):
                look(value, f"{key}.", mark)
            elif mark is not None and not (key in by_parts if mark.where is None else mark.where(config)):
                found[key] = section, mark

    look(config, "", None)
    return found


def mark_of(field: Any, above: For | None = None) -> For | None:
    """The mark on a field, or else that of the section above it."""
    return next((m for m in field.metadata if isinstance(m, For)), above)


def keep_set(section: BaseModel, own: Mapping[str, Any]) -> None:
    """Leave in `model_fields_set` only what the tables `own` hold."""
    section.model_fields_set.intersection_update(own)
    for name in type(section).model_fields:
        if isinstance(value := getattr(section, name), BaseModel):
            keep_set(value, own.get(name, {}))


def set_by_file(section: Any, values: Any) -> Any:
    """The tables of a user's file, without those that it may hold for another choice."""
    if not (isinstance(section, type) and issubclass(section, BaseModel) and isinstance(values, dict)):
        return values
    fields = section.model_fields
    marks = {name: mark_of(fields[name]) for name in values if name in fields}
    return {
        name: set_by_file(fields[name].annotation, values[name])
        for name, mark in marks.items()
        if mark is None or mark.in_files
    }
