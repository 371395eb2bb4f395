"""From a name in a config to a model, its tokenizer, an engine over it, and the rewards."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attnrl.algo.parts import find
from attnrl.config import Config, check_options
from attnrl.errors import ConfigError, MissingFileError, listed, near
from attnrl.progress import tell
from attnrl.run import Run
from attnrl.types import Ids

if TYPE_CHECKING:
    from attnrl.backend import Backend
    from attnrl.reward import Rewards

ENGINES = {"local": "attnrl.local.backend:build", "verl": "attnrl.verl_engine:build"}
FACTORY_KEYS = ("model", "tokenizer", "learn")  # what every factory is called with, beside the config and its options
VERBS = ("generate", "score", "update", "save", "load", "metrics", "close")  # of attnrl.backend.Backend
OFFERED = ("run_dir",)  # what a factory is called with that has such a parameter


def find_engine(config: Config) -> Callable[..., Backend]:
    """The factory that `engine.name` stands for."""
    name = config.engine.name
    if ":" not in name and name not in ENGINES:
        raise ConfigError(
            f"engine.name: unknown name {name!r}{near(name, ENGINES)}; known: {listed(ENGINES)}, or your own as "
            "package.module:factory"
        )
    if config.engine.options and name in ENGINES:
        raise ConfigError(f"engine.options are those of your own engine; {name} has its section [engine.{name}]")
    try:
        factory: Callable[..., Backend] = find({}, ENGINES.get(name, name))
    except ValueError as error:
        raise ConfigError(f"engine.name: {error}") from None
    check_factory(name, factory, config.engine.options)
    return factory


def check_factory(name: str, factory: Callable[..., Backend], options: Mapping[str, Any]) -> None:
    """Raise where an engine's factory does not take what it is called with: the model, and its options."""
    try:
        wanted = inspect.signature(factory).parameters
    except ValueError as error:
        raise ConfigError(f"engine.name: {name!r} is no factory of engines: {error}") from None
    takes_any = any(p.kind is p.VAR_KEYWORD for p in wanted.values())
    if not takes_any and (missing := [key for key in FACTORY_KEYS if key not in wanted]):
        shape = "(config, *, model, tokenizer, learn=True, ...)"
        raise ConfigError(f"engine.name: {name!r} must be called as {shape}; it does not take {missing[0]!r}")
    own = {n: p for n, p in wanted.items() if p.kind is p.KEYWORD_ONLY and n not in (*FACTORY_KEYS, *OFFERED)}
    if not takes_any and (unknown := [key for key in options if key not in own]):
        hint = near(unknown[0], own)
        raise ConfigError(f"engine.options: {name!r} has no option {unknown[0]!r}{hint}; it has: {listed(own)}")
    if missing := [key for key, p in own.items() if p.default is p.empty and key not in options]:
        raise ConfigError(f"engine.options: {name!r} needs the option {missing[0]!r}")
    try:
        check_options(factory, options)
    except ValueError as error:
        raise ConfigError(f"engine.options: {error}") from None


def check_engine(
    factory: Callable[..., Backend], config: Config, model: str, run_dir: Path | None = None, *, learn: bool = True
) -> None:
    """Let an engine whose factory has a `check` say what is wrong before anything starts, also with the checkpoint that
    a run goes on from.
    """
    from attnrl.local.models import check_reachable

    if (check := getattr(factory, "check", None)) is not None:
        if config.engine.name in ENGINES:
            check_reachable(model)
        found = Run(run_dir).checkpoints if run_dir is not None else []
        check(config, model=model, checkpoint=found[-1] if found else None, learn=learn)


@contextmanager
def open_engine(
    factory: Callable[..., Backend],
    config: Config,
    model: str,
    tokenizer: Any,
    *,
    learn: bool = True,
    run_dir: Path | None = None,
    verbs: Collection[str] = VERBS,
) -> Iterator[Backend]:
    """The engine over a model, closed at the end; raises where it lacks one of the verbs that will be asked of it."""
    tell(f"open the engine over {model}")
    offered = {"run_dir": run_dir} if "run_dir" in inspect.signature(factory).parameters else {}
    backend = factory(config, model=model, tokenizer=tokenizer, learn=learn, **offered, **config.engine.options)
    missing = [verb for verb in VERBS if verb in {*verbs, "close"} and not callable(getattr(backend, verb, None))]
    try:
        if missing := [*missing, *([] if hasattr(backend, "version") else ["version"])]:
            raise ConfigError(
                f"engine.name: {config.engine.name!r} made an engine ({type(backend).__name__}) without "
                f"{listed(missing)}; attnrl.backend.Backend says what they are"
            )
        yield backend
    finally:
        if "close" not in missing:
            backend.close()


def reward_keys(config: Config) -> set[str]:
    """The keys and sections that `open_rewards` reads; the limit of responses where a reward may ask for it."""
    asks = any(reward.name == "overlong" or ":" in reward.name for reward in config.reward)
    return {"reward", "verify", "algo.grade_truncated", *(["sampling.max_response_tokens"] if asks else [])}


def open_rewards(config: Config) -> Rewards:
    """The rewards of a config, to be closed."""
    from attnrl.reward import build_rewards

    return build_rewards(
        [(reward.name, reward.weight, reward.options) for reward in config.reward],
        grade_truncated=config.algo.grade_truncated,
        knobs={"max_response_tokens": config.sampling.max_response_tokens},
        **config.verify.model_dump(),
    )


def load_tokenizer(model: str) -> Any:
    """The tokenizer of a model directory or hub name."""
    from attnrl.local.models import load_tokenizer as load

    return load(model)


def decoder(tokenizer: Any, *, special: bool = False) -> Callable[[Ids], str]:
    """Token ids -> text; special tokens left out, or kept."""

    def decode(ids: Ids) -> str:
        text: str = tokenizer.decode(ids.tolist(), skip_special_tokens=not special)
        return text

    return decode


def model_path(name: str) -> str:
    """Where a model is: "demo" names the tiny one that comes with attnrl."""
    if name != "demo":
        return name
    from importlib import resources

    return str(Path(str(resources.files("attnrl"))) / "assets" / "demo_model")


def newest_model(name: str) -> str:
    """Where a model is, a run directory standing for its newest checkpoint."""
    if not (Path(name) / "checkpoints").is_dir():
        return model_path(name)
    found = Run(Path(name)).checkpoints
    if not found:
        raise MissingFileError(f"{name}: a run directory without a checkpoint yet; give a model, or wait for one")
    return str(found[-1] / "model")


def pin_model(name: str, say: Callable[[str], None], begun: str = "") -> str:
    """The model that a name stands for from now on, which is what is recorded. A run directory stands for its newest
    checkpoint, wherever one stands later, and that is said: the run may train on. What was `begun` with an older one
    of it keeps that.
    """
    newest = newest_model(name)
    if name == "demo" or newest == name:
        return name
    path, before = (Path(os.path.abspath(found)) for found in (newest, begun))
    if begun and before.parent.parent == path.parent.parent:
        say(f"{name} stands for {begun}, as at the beginning{'' if before == path else f'; its newest is {path}'}")
        return begun
    say(f"{name} stands for its newest checkpoint, {path}")
    return str(path)


def check_model(name: str, config: Config) -> str:
    """Where a model is; raises where a local path holds none, or no weights for an engine of ours. Loads nothing."""
    from attnrl.local.models import check_model_path

    path = newest_model(name)
    run = run_of(path)
    if run is not None and not Path(path).is_dir():
        there = listed(str(found / "model") for found in Run(run).checkpoints)
        raise MissingFileError(
            f"no model {path}: the run {run} keeps its newest checkpoints alone (run.keep_checkpoints); it has {there}"
        )
    return check_model_path(path, weights=config.engine.name in ENGINES)


def run_of(model: str) -> Path | None:
    """The run directory that a model's name means, by itself or by a checkpoint in it; None for any other model."""
    path = Path(model)
    place = path.absolute()
    runs = [path]
    runs += [place.parents[2]] if place.match("checkpoints/[0-9]*/model") else []
    runs += [place.parents[1]] if place.match("best/model") else []
    return next((run for run in runs if (run / "checkpoints").is_dir()), None)
