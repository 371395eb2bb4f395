"""The whole configuration: frozen, typed, ranges on fields; defaults < TOML < flags.

A preset is a sparse TOML file: it holds only what differs from the defaults below, or from the preset it names as
`base`. Unknown keys and values out of range raise ConfigError, which names the key.
"""

from attnrl.config.base import Names, Section
from attnrl.config.options import check_options
from attnrl.config.reading import explain, fields, keys, load_config, may_change, presets, put
from attnrl.config.sections import (
    AlgoConfig,
    Config,
    ModelConfig,
    RewardConfig,
    RunConfig,
    UpdateConfig,
    VerifyConfig,
)
from attnrl.config.taken import check_taken, check_used, idle_keys
from attnrl.config.tasks import TaskConfig, TaskKind

__all__ = [
    "AlgoConfig",
    "Config",
    "ModelConfig",
    "Names",
    "RewardConfig",
    "RunConfig",
    "Section",
    "TaskConfig",
    "TaskKind",
    "UpdateConfig",
    "VerifyConfig",
    "check_options",
    "check_taken",
    "check_used",
    "explain",
    "fields",
    "idle_keys",
    "keys",
    "load_config",
    "may_change",
    "presets",
    "put",
]
