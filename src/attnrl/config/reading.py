"""From a preset, a file and flags to a config; and what can be said of its keys."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from attnrl.config.base import MAY_CHANGE
from attnrl.config.sections import Config, RewardConfig
from attnrl.config.taken import keep_set, set_by_file
from attnrl.errors import ConfigError, MissingFileError, near


def presets() -> dict[str, str]:
    """Name and one-line description of every preset that comes with attnrl."""
    files = {p.name.removesuffix(".toml"): p for p in resources.files("attnrl.presets").iterdir() if ".toml" in p.name}
    return {name: str(tomllib.loads(files[name].read_text("utf-8")).get("about", "")) for name in sorted(files)}


def load_config(
    preset: Config | str | Path, overrides: Mapping[str, Any] | None = None, *, known: Mapping[str, Any] | None = None
) -> Config:
    """The resolved config of a preset with dotted overrides on top. A preset is named, or given as the path of a TOML
    file or of a run's config.json; "" stands for the defaults. Between the two stands what is `known` otherwise. A
    Config is taken as it is.

    Its `model_fields_set` is what the user set, by overrides or in a TOML file of their own (`check_taken`).

    >>> load_config("attnrl_1p5b", {"algo.points": 3}).algo.points
    3
    """
    if isinstance(preset, Config):
        if overrides:
            raise ConfigError("give overrides or a whole config, not both: a Config is taken as it is")
        return preset
    if not isinstance(preset, str | Path):
        raise ConfigError(
            f"a config is a preset's name, a path or a Config, not {preset!r}; overrides are a dict beside it"
        )
    values, own = _read_preset(str(preset)) if preset else ({}, {})
    for key, value in ({} if known is None else known).items():
        put(values, key, value)
    for key, value in ({} if overrides is None else overrides).items():
        put(values, key, value)
        put(own, key, value)
    optional = {key for key, field in fields().items() if type(None) in get_args(field.annotation)}
    values = _with_nothing(values, optional)
    try:
        config = Config.model_validate(values)
    except ValidationError as error:
        raise ConfigError(explain(error, str(preset) or "flags")) from None
    keep_set(config, own)
    return config


def _read_preset(name: str, above: tuple[str, ...] = ()) -> tuple[dict[str, Any], dict[str, Any]]:
    """The values of a preset, those of its `base` underneath; and which of them the user set in files of their own."""
    if name in above:
        raise ConfigError(f"preset {name!r} is its own base, by way of {' -> '.join(above)}")
    text = _preset_text(name)
    try:
        values = json.loads(text) if name.endswith(".json") else tomllib.loads(text)
    except ValueError as error:
        raise ConfigError(f"{name}: not valid {name.rpartition('.')[2].upper()}: {error}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{name}: holds a {type(values).__name__}, not an object with the sections of a config")
    base = values.pop("base", None)
    own = set_by_file(Config, values) if name.endswith(".toml") else {}
    if base is None:
        return values, own
    under, own_under = _read_preset(str(base), (*above, name))
    return _merge(under, values), _merge(own_under, own)


def _preset_text(name: str) -> str:
    if name.endswith((".toml", ".json")):
        path = Path(name)
        if not path.is_file():
            raise MissingFileError(f"config file {name} does not exist")
        try:
            return path.read_text("utf-8")
        except UnicodeDecodeError as error:
            raise ConfigError(f"{name}: not UTF-8 text ({error.reason})") from None
    file = resources.files("attnrl.presets") / f"{name}.toml"
    if not file.is_file():
        hint = near(name, presets())
        raise ConfigError(f"no preset {name!r}{hint}; `attnrl presets` lists them, a path must end in .toml")
    return file.read_text("utf-8")


def _merge(under: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """`over` on top of `under`, section by section; option tables are replaced whole."""
    merged = dict(under)
    for key, value in over.items():
        deep = isinstance(value, dict) and isinstance(merged.get(key), dict) and not key.endswith("_options")
        merged[key] = _merge(merged[key], value) if deep else value
    return merged


def put(values: dict[str, Any], key: str, value: Any) -> None:
    """Set a dotted key in nested tables."""
    *path, last = key.split(".")
    for name in path:
        values = values.setdefault(name, {})
        if not isinstance(values, dict):
            raise ConfigError(f"{key}: {name} is a value, not a section")
    values[last] = value


def _with_nothing(values: dict[str, Any], optional: set[str], prefix: str = "") -> dict[str, Any]:
    """The values with "none" as nothing under keys that may be empty: TOML and flags have no other word for it."""
    made = {}
    for name, value in values.items():
        if isinstance(value, dict):
            value = _with_nothing(value, optional, f"{prefix}{name}.")
        empty = isinstance(value, str) and value.lower() == "none" and f"{prefix}{name}" in optional
        made[name] = None if empty else value
    return made


def explain(error: ValidationError, where: str) -> str:
    """Every mistake of a validation as `key: what is wrong`, with the nearest known key for a wrong one. What stands in
    a list is counted from 1.
    """
    lines = []
    for item in error.errors():
        key = ".".join(str(part + 1 if isinstance(part, int) else part) for part in item["loc"])
        if item["type"] == "extra_forbidden":
            hint = _hint(key, item["loc"])
            lines.append(f"unknown key {key}{hint or '; `attnrl config --help` lists the keys'}")
        else:
            got = "" if isinstance(item["input"], dict | BaseModel) else f", got {item['input']!r}"
            lines.append(f"{key}: {_said(item)}{got}")
    return f"{where}: " + "\n  ".join(lines)


def _hint(key: str, place: tuple[int | str, ...]) -> str:
    """At the known key that a wrong one is near to; in a table of the list [[reward]] by its own name alone."""
    table, _, name = key.rpartition(".")
    if len(place) == 3 and place[0] == "reward":
        return near(name, RewardConfig.model_fields).replace(" '", f" {table}.").replace("'", "")
    return near(key, keys()).replace("'", "")


def _said(item: Any) -> str:
    """What a validation says: pydantic's own sentences in our lower case, our own as they are."""
    if item["type"] == "dict_type":
        return 'should be a table, such as {name = "value"}; in a shell within single quotes'
    ours = item.get("ctx", {}).get("error")
    return str(ours) if item["type"] == "value_error" and ours else str(item["msg"]).lower()


def fields(section: type[BaseModel] = Config, prefix: str = "") -> dict[str, FieldInfo]:
    """Every dotted key with its field."""
    found: dict[str, FieldInfo] = {}
    for name, field in section.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            found |= fields(field.annotation, f"{prefix}{name}.")
        else:
            found[f"{prefix}{name}"] = field
    return found


def may_change() -> set[str]:
    """Dotted keys that may have another value when a run is resumed."""
    return {key for key, field in fields().items() if field.json_schema_extra == MAY_CHANGE}


def keys(section: type[BaseModel] = Config) -> dict[str, str]:
    """Every dotted key with its line of documentation."""
    return {key: " ".join((field.description or "").split()) for key, field in fields(section).items()}
