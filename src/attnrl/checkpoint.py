"""Files written whole or not at all; and the State on disk: one JSON file and one of arrays, exact to the bit."""

from __future__ import annotations

import json
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attnrl.errors import reading
from attnrl.types import Group, Prompt, Rollout, Scores, State, Step, Trunk, Verdict

ARRAYS = ("ids", "sampled", "logprobs", "entropy", "fci", "steps")
SCALARS = tuple(f.name for f in fields(State) if f.name != "waiting")
WORDS = tuple(f.name for f in fields(Prompt) if f.name != "ids")


def write_whole(path: Path, text: str) -> Path:
    """The file, written so that a reader never sees half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.tmp")
    unfinished.write_text(text, encoding="utf-8")
    return unfinished.replace(path)


def write_json(path: Path, value: Any) -> Path:
    """The file with the value as JSON people can read, written whole."""
    return write_whole(path, json.dumps(value, indent=2) + "\n")


def finite(value: Any) -> Any:
    """The value with None for every number JSON does not know."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and value - value != 0.0 else value


def save_state(path: Path, state: State) -> None:
    """Write state.json and state.npz into the directory `path`."""
    arrays: dict[str, NDArray[Any]] = {}
    groups = []
    for g, group in enumerate(state.waiting):
        arrays[f"{g}/prompt"] = group.prompt.ids
        trunks = []
        for t, trunk in enumerate(group.trunks):
            key = f"{g}/{t}"
            arrays |= {
                f"{key}/ids": trunk.rollout.ids,
                f"{key}/sampled": trunk.rollout.logprobs,
                f"{key}/logprobs": trunk.scores.logprobs,
                f"{key}/entropy": trunk.scores.entropy,
                f"{key}/fci": trunk.scores.fci,
                f"{key}/steps": np.array([(s.start, s.stop, s.thinking) for s in trunk.steps], np.int32).reshape(-1, 3),
            }
            rollout = {"finish": trunk.rollout.finish, "version": trunk.rollout.version}
            trunks.append({**rollout, "verdict": asdict(trunk.verdict)})
        groups.append({"prompt": {name: getattr(group.prompt, name) for name in WORDS}, "trunks": trunks})
    np.savez(path / "state.npz", **arrays)  # type: ignore[arg-type]
    scalars = {name: getattr(state, name) for name in SCALARS}
    (path / "state.json").write_text(json.dumps({**scalars, "waiting": groups}))


def load_state(path: Path) -> State:
    """The State that `save_state` wrote into `path`."""
    with reading(path / "state.json", path):
        values = json.loads((path / "state.json").read_text())
    with reading(path / "state.npz", path), np.load(path / "state.npz") as file:
        arrays = dict(file)
    waiting = []
    for g, group in enumerate(values["waiting"]):
        words = group["prompt"]
        prompt = Prompt(**{**words, "answers": tuple(words["answers"])}, ids=arrays[f"{g}/prompt"])
        trunks = []
        for t, trunk in enumerate(group["trunks"]):
            part = {name: arrays[f"{g}/{t}/{name}"] for name in ARRAYS}
            rollout = Rollout(part["ids"], part["sampled"], trunk["finish"], trunk["version"])
            steps = tuple(Step(a, b, thinking=bool(c)) for a, b, c in part["steps"].tolist())
            scores = Scores(part["logprobs"], part["entropy"], part["fci"])
            trunks.append(Trunk(rollout, Verdict(**trunk["verdict"]), steps, scores))
        waiting.append(Group(prompt, tuple(trunks)))
    return State(**{name: values[name] for name in SCALARS}, waiting=tuple(waiting))
