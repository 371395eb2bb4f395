"""attnrl: process-supervised RL for reasoning models. Names are loaded on first use: `import attnrl` stays light."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from attnrl.version import __version__

if TYPE_CHECKING:
    from attnrl.config import load_config
    from attnrl.launch import check, evaluate, score, train

__all__ = ["__version__", "check", "evaluate", "load_config", "score", "train"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module("attnrl.config" if name == "load_config" else "attnrl.launch"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
