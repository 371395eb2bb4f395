"""attnrl config PRESET [--section.key VALUE ...]

Prints the resolved config of a preset, its parts, loss and rewards found and
their options checked. PRESET is a name from `attnrl presets`, or the path of a
TOML file with the keys below. What is printed is TOML and can be saved as a
preset of your own; a file may name another preset as its `base` and hold only
what differs.

Examples:
  attnrl config demo
  attnrl config attnrl_1p5b --algo.points 3 > mine.toml
"""

from __future__ import annotations

import json
from collections.abc import Container
from typing import Any

from attnrl.cli.flags import describe_keys, read_flags, show, wants_help
from attnrl.config import Config, Section, idle_keys, load_config
from attnrl.launch.training import check_named


class ConfigFlags(Section):
    """The flags of `attnrl config`."""

    preset: str
    """one preset: attnrl config PRESET; `attnrl presets` lists them."""


def main(argv: list[str]) -> None:
    if wants_help(argv):
        show(f"{__doc__}\nKeys, with their values in attnrl_1p5b:\n\n{describe_keys()}")
        return
    flags, overrides = read_flags(ConfigFlags, argv, str(__doc__), short={}, words="preset")
    config = load_config(flags.preset, overrides)
    _, rewards, taken = check_named(config)
    rewards.close()
    show(to_toml(config.model_dump(mode="json"), Config().model_dump(mode="json"), idle_keys(config, taken)))


def to_toml(values: dict[str, Any], defaults: dict[str, Any], idle: Container[str] = (), prefix: str = "") -> str:
    """Nested values as TOML; keys without a value as "none", in a comment where that is the default; in a comment also
    keys that nothing takes: in a file of the user's own they would be refused.

    >>> values = {"about": "x", "algo": {"points": 2, "rule_options": {"a": 1}, "cap": None, "parts": None}}
    >>> print(to_toml(values, {"algo": {"parts": 2}}))
    about = "x"
    <BLANKLINE>
    [algo]
    points = 2
    rule_options = {a = 1}
    # cap = "none"
    parts = "none"
    """
    plain = {k: v for k, v in values.items() if not isinstance(v, dict) or k.endswith("options") or k == "columns"}
    lines = []
    for k, v in plain.items():
        unsaid = f"{prefix}{k}" in idle or (v is None and defaults.get(k) is None)
        lines.append(f"{'# ' * unsaid}{k} = {_value(v)}")
    for name, section in values.items():
        if name not in plain:
            lines += ["", f"[{prefix}{name}]", to_toml(section, defaults.get(name) or {}, idle, f"{prefix}{name}.")]
    return "\n".join(lines)


def _value(value: Any) -> str:
    if value is None:
        return '"none"'
    if isinstance(value, dict):
        return "{" + ", ".join(f"{k} = {_value(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(_value(v) for v in value) + "]"
    return json.dumps(value, ensure_ascii=False)
