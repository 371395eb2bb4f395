"""The engine on one machine: own sampler, scorer and learner over any Hugging Face decoder-only model.

Names are loaded on first use: worker processes import parts of this package without torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from attnrl.local.backend import BackendOptions, LocalBackend, backend_from_config, load_backend
    from attnrl.local.learner import Learner, LearnerOptions
    from attnrl.local.losses import LossOptions
    from attnrl.local.models import LoraOptions, load_model
    from attnrl.local.sampler import Sampler

_HOMES = {
    "BackendOptions": "backend",
    "LocalBackend": "backend",
    "backend_from_config": "backend",
    "load_backend": "backend",
    "Learner": "learner",
    "LearnerOptions": "learner",
    "LossOptions": "losses",
    "LoraOptions": "models",
    "load_model": "models",
    "Sampler": "sampler",
}

__all__ = [
    "BackendOptions",
    "Learner",
    "LearnerOptions",
    "LocalBackend",
    "LoraOptions",
    "LossOptions",
    "Sampler",
    "backend_from_config",
    "load_backend",
    "load_model",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
