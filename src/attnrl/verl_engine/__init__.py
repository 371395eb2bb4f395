"""The engine on a cluster: our loop in the driver; verl's worker group, vLLM servers and weight sync underneath.

verl's trainers, datasets, reward and agent loops are not used. Needs the extras `verl` and `vllm`.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from attnrl.backend import Backend
    from attnrl.config import Config


def check(config: Config, *, model: str, checkpoint: Path | None = None, learn: bool = True) -> Any:
    """verl's config, as ours means it; raises what can be known to be wrong before anything starts: the installed verl,
    lengths against the model's and the servers', settings that verl does not know, the checkpoint a run goes on from.
    """
    from attnrl.attention.decoder import read_config
    from attnrl.verl_engine import settings
    from attnrl.verl_engine.contract import check_verl

    check_verl()
    settings.check(config, read_config(model), learn=learn)
    composed = settings.compose(settings.overrides(config, model=model, learn=learn))
    longest = settings.max_tokens(config, learn=learn)
    settings.check_servers(composed, config.engine.verl.server_gpus, longest=longest)
    if checkpoint is not None:
        settings.read_state(checkpoint)
    return composed


def build(config: Config, *, model: str, tokenizer: Any, learn: bool = True, run_dir: Path | None = None) -> Backend:
    """The engine a config describes, started. What is written to `run_dir` must be seen by all machines."""
    composed = check(config, model=model, learn=learn)
    from attnrl.verl_engine.backend import VerlBackend

    return VerlBackend(config, composed, model=model, tokenizer=tokenizer, learn=learn, run_dir=run_dir)


build.check = check  # type: ignore[attr-defined]  # what launch calls before data is read and a directory made
