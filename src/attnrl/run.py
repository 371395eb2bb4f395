"""The run directory: the interface between training and everything that reads it.

    config.json                the resolved config
    environment.json           versions, commit, machine
    metrics.jsonl              one object an iteration
    forests/000001.parquet     every rollout of an iteration
    checkpoints/000010/        model, optimizer and state, written whole or not at all
    best/                      the same of the iteration with the best value of run.keep_best, and best.json

A checkpoint holds all that the next iteration needs. Resuming drops what was recorded after it, so that a run that was
killed and resumed leaves the same record as one that was not.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import IO, Any

import pyarrow as pa
import pyarrow.parquet as pq

from attnrl.algo.reasons import Reasons
from attnrl.backend import Backend
from attnrl.checkpoint import load_state, save_state, write_json, write_whole
from attnrl.config import Config, may_change
from attnrl.errors import ConfigError, TrainingError
from attnrl.types import Forest, Ids, State
from attnrl.version import __version__

PACKAGES = ("torch", "transformers", "numpy", "math-verify", "triton", "vllm", "verl")
ROWS_PER_GROUP = 120  # of a forest file: four prompts of 30 leaves
LEAST_ROOM = 64_000_000  # bytes: with less left when a write fails, that is why it failed
OURS = {"config.json", "environment.json", "checkpoints", "forests", "best", "lock"}
OURS |= {f".{name}.tmp" for name in OURS} | {"tensorboard", "tracker_id", "wandb"}


@dataclass(frozen=True, slots=True)
class Run:
    """A run directory, open for writing."""

    path: Path
    lock: IO[str] | None = None  # held until it is closed or the process ends, however that happens

    @property
    def metrics_file(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def recorded(self) -> bool:
        """Whether there is anything to go on from."""
        return self.metrics_file.exists() or bool(self.checkpoints)

    @property
    def checkpoints(self) -> list[Path]:
        """Finished checkpoints, oldest first."""
        return sorted(p for p in (self.path / "checkpoints").glob("[0-9]*") if p.is_dir())

    def close(self) -> None:
        """Lets go of the directory: the same process may open it again."""
        if self.lock is not None:
            self.lock.close()

    def begin(self, config: dict[str, Any], rule: Mapping[str, Any] | None = None) -> None:
        """Record what the run is, and goes on, with; its command is the one that began it. What the rule declares of
        itself is recorded too: a reader need not have the user's file.
        """
        write_json(self.path / "config.json", config)
        record = self.path / "environment.json"
        began = json.loads(record.read_text()) if record.exists() else {}
        command = began.get("command", sys.argv)
        known = environment() | {"command": command} | ({"rule": rule} if rule else {})
        write_json(record, known)  # whole, since it is read when the run goes on

    def log(self, metrics: dict[str, float]) -> None:
        """Append one iteration's metrics, durably."""
        with self.metrics_file.open("a") as file:
            file.write(json.dumps(metrics) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def save_forests(
        self,
        iteration: int,
        forests: Sequence[Forest],
        decode: Callable[[Ids], str],
        reasons: Sequence[Reasons] | None = None,
    ) -> None:
        """Write every rollout of an iteration to parquet, one row each, with the reasons of each forest where given.

        Row groups are small: whoever looks at one forest reads a few of them, not the file.
        """
        target = self.path / "forests" / f"{iteration:06d}.parquet"
        unfinished = target.with_suffix(".tmp")
        table = forest_table(iteration, forests, decode, reasons)
        pq.write_table(table, unfinished, compression="zstd", row_group_size=ROWS_PER_GROUP)
        unfinished.replace(target)

    def checkpoint(self, state: State, backend: Backend, keep: int) -> Path:
        """Write a checkpoint atomically and delete all but the newest `keep`."""
        target = self.path / "checkpoints" / f"{state.iteration:06d}"
        self._write_whole(target, state, backend)
        for old in self.checkpoints[:-keep]:
            shutil.rmtree(old)
        return target

    def keep_best(self, state: State, backend: Backend, metric: str, value: float) -> None:
        """Write `best/` anew where the metric is higher than of the iteration that it holds."""
        target = self.path / "best"
        held = json.loads((target / "best.json").read_text()) if (target / "best.json").exists() else None
        if not math.isfinite(value):
            return  # nothing is better or worse than that
        if held is None or held["metric"] != metric or value > held["value"]:
            words = {"metric": metric, "value": value, "iteration": state.iteration}
            self._write_whole(target, state, backend, words)

    def _write_whole(self, target: Path, state: State, backend: Backend, best: dict[str, Any] | None = None) -> None:
        """A checkpoint at `target`, written beside it and renamed, so that a kill leaves the old one or the new one."""
        unfinished = target.with_name(f".unfinished-{target.name}")
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
        with self._room_for(unfinished):
            backend.save(unfinished)
            save_state(unfinished, state)
            if best is not None:
                (unfinished / "best.json").write_text(json.dumps(best) + "\n")
            _sync(unfinished)
        replaced = target.with_name(f".replaced-{target.name}")
        if target.exists():  # aside, not deleted: a kill between here and the end must not cost both
            shutil.rmtree(replaced, ignore_errors=True)
            target.rename(replaced)
        unfinished.rename(target)
        _sync(target.parent)
        shutil.rmtree(replaced, ignore_errors=True)

    @contextmanager
    def _room_for(self, folder: Path) -> Iterator[None]:
        """What fails inside on a full disk is said in our words: every library that writes there has its own."""
        whole = False
        try:
            yield
            whole = True
        finally:
            if not whole and shutil.disk_usage(self.path).free < LEAST_ROOM:
                written = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
                shutil.rmtree(folder)
                last = self.checkpoints[-1].name if self.checkpoints else "the beginning: none is whole yet"
                raise TrainingError(
                    f"{self.path}: the disk is full, {written / 1e9:.1f} GB into a checkpoint. Make room for it (or "
                    f"lower run.keep_checkpoints) and --resume; the run goes on from {last}"
                )

    def resume(self, backend: Backend) -> State | None:
        """The state of the newest checkpoint, loaded into the backend; None where there is none yet.

        What was recorded after that checkpoint is dropped: it will be recorded again.
        """
        for aside in (*self.path.glob(".replaced-*"), *(self.path / "checkpoints").glob(".replaced-*")):
            target = aside.with_name(aside.name.removeprefix(".replaced-"))
            shutil.rmtree(aside) if target.exists() else aside.rename(target)
        for leftover in (*self.path.glob(".unfinished-*"), *(self.path / "checkpoints").glob(".unfinished-*")):
            shutil.rmtree(leftover)
        newest = self.checkpoints[-1] if self.checkpoints else None
        state = None
        if newest is not None:
            backend.load(newest)
            state = load_state(newest)
        self._forget_after(state.iteration if state is not None else -1)
        return state

    def _forget_after(self, iteration: int) -> None:
        if self.metrics_file.exists():
            kept = [m for m in read_metrics(self.path) if m["iteration"] <= iteration]
            write_whole(self.metrics_file, "".join(json.dumps(m) + "\n" for m in kept))
        for torn in (self.path / "forests").glob("*.tmp"):
            torn.unlink()
        for file in (self.path / "forests").glob("*.parquet"):
            if int(file.stem) > iteration:
                file.unlink()


def check_run(path: Path, config: dict[str, Any], *, resume: bool) -> State | None:
    """The state that a run in this directory would continue from; None where it would start at the beginning.

    Refuses a directory that holds something else, or a run that this config does not continue. Writes nothing. A
    directory in which nothing was recorded yet, because its run was stopped before that, counts as new.
    """
    run = Run(path)
    if run.recorded and not resume:
        raise ConfigError(
            f"--run-dir {path} already holds a run; add --resume (in Python resume=True) to continue it, or choose "
            "another"
        )
    if run.recorded:
        changed = _differences(json.loads((path / "config.json").read_text()), config, Config().model_dump(mode="json"))
        free = may_change()
        if wrong := {key: values for key, values in changed.items() if key not in free}:
            lines = "".join(f"\n  {key}: was {old!r}, is now {new!r}" for key, (old, new) in wrong.items())
            raise ConfigError(
                f"--run-dir {path} was started with other values of:{lines}\n"
                f"resume with the old ones (attnrl train --resume --run-dir {path} needs no others), or start a new "
                f"run; what may change is {', '.join(sorted(free))}"
            )
    elif path.is_dir() and (strange := sorted({p.name for p in path.iterdir()} - OURS)):
        raise ConfigError(f"--run-dir {path} holds no run but other things ({strange[0]}, ...); choose another")
    _check_place(path)
    return load_state(run.checkpoints[-1]) if run.checkpoints else None


def check_no_run(path: Path) -> None:
    """Refuse to write something else into a run directory."""
    if (path / "checkpoints").is_dir() or (path / "metrics.jsonl").exists():
        raise ConfigError(f"--output {path} is a run directory; name another, for example {path / 'results'}")


def open_run(path: Path, config: dict[str, Any], *, resume: bool, rule: Mapping[str, Any] | None = None) -> Run:
    """A run directory, new or to be resumed; one that `check_run` refuses, or that is in use, is refused. A resumed
    one keeps its record until `Run.begin`: an engine may still refuse what has changed.
    """
    check_run(path, config, resume=resume)
    try:
        for folder in ("checkpoints", "forests"):
            (path / folder).mkdir(parents=True, exist_ok=True)
        lock = (path / "lock").open("w")
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        run = Run(path, lock)
        if not run.recorded:
            run.begin(config, rule)
    except OSError as error:
        raise _refused(path, error) from None
    return run


def _check_place(path: Path) -> None:
    """Refuse a directory that another process holds, or that cannot be written, before anything is read for it."""
    held = path / "lock"
    above = next(p for p in (path, *path.absolute().parents) if p.exists())
    try:
        if held.exists():
            with held.open() as lock:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        with tempfile.TemporaryFile(dir=above):  # without a name: nothing is left of it
            pass
    except OSError as error:
        raise _refused(path, error) from None


def _refused(path: Path, error: OSError) -> ConfigError:
    if isinstance(error, BlockingIOError):
        return ConfigError(f"--run-dir {path} is in use by another process; wait for it, or choose another")
    return ConfigError(f"--run-dir {path} cannot be written: {error.strerror}; choose another")


def read_metrics(path: Path) -> list[dict[str, float]]:
    """The metrics of a run directory, one dict an iteration; a last line torn by a kill is left out."""
    lines = (path / "metrics.jsonl").read_text().split("\n")
    return [json.loads(line) for line in lines[:-1]]


def last_recorded(path: Path) -> int:
    """The last iteration on record in a run directory; -1 where there is none."""
    rows = read_metrics(path) if (path / "metrics.jsonl").exists() else []
    return int(rows[-1]["iteration"]) if rows else -1


def environment() -> dict[str, Any]:
    """Versions, commit and machine: what a reader needs to run it again."""
    versions: dict[str, str | None] = {"attnrl": __version__}
    for name in PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = None
    return {
        "versions": versions,
        "python": sys.version.split()[0],
        "commit": _git("rev-parse", "HEAD"),
        "changed": bool(_git("status", "--porcelain")),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "command": sys.argv,
    }


def forest_table(
    iteration: int,
    forests: Sequence[Forest],
    decode: Callable[[Ids], str],
    reasons: Sequence[Reasons] | None = None,
) -> pa.Table:
    """One row per rollout: who drew it from where, what it says, how it was judged; steps and FCI for trunks.

    `reason` says why a tree was branched or not, `prompt_reason` why the prompt taught or not; null where not given.
    """
    rows = []
    given: Sequence[Reasons | None] = [None] * len(forests) if reasons is None else reasons
    for forest, why in zip(forests, given, strict=True):
        for number, tree in enumerate(forest.trees):
            trunk = tree.trunk
            shared = {
                "iteration": iteration,
                "uid": forest.prompt.uid,
                "problem": forest.prompt.problem,
                "answers": list(forest.prompt.answers),
                "tree": number,
                "reason": why.trees[number] if why else None,
                "prompt_reason": why.prompt if why else None,
            }
            steps = {
                "step_starts": [s.start for s in trunk.steps],
                "step_texts": [decode(trunk.rollout.ids[s.start : s.stop]) for s in trunk.steps],
                "fci": trunk.scores.fci.tolist(),
                "entropy": trunk.scores.entropy.tolist(),
            }
            leaves = [(0, trunk.rollout, trunk.verdict), *((b.point, b.rollout, b.verdict) for b in tree.branches)]
            for point, rollout, verdict in leaves:
                is_trunk = rollout is trunk.rollout
                rows.append(
                    {
                        **shared,
                        "kind": "trunk" if is_trunk else "branch",
                        "point": point,
                        "text": decode(rollout.ids),
                        "tokens": len(rollout.ids),
                        "ids": rollout.ids,
                        "logprobs": rollout.logprobs,
                        "finish": rollout.finish,
                        "version": rollout.version,
                        "reward": verdict.reward,
                        "right": verdict.right,
                        "rule": verdict.rule,
                        "answer": verdict.answer,
                        **(steps if is_trunk else dict.fromkeys(steps)),
                    }
                )
    return pa.Table.from_pylist(rows, schema=FOREST_SCHEMA)


FOREST_SCHEMA = pa.schema(
    {
        **dict.fromkeys(("iteration", "tree", "point", "tokens", "version"), pa.int32()),
        **dict.fromkeys(("uid", "kind", "problem", "text", "finish", "rule", "answer"), pa.string()),
        "reward": pa.float32(),
        "right": pa.bool_(),
        **dict.fromkeys(("reason", "prompt_reason"), pa.string()),
        **dict.fromkeys(("answers", "step_texts"), pa.list_(pa.string())),
        **dict.fromkeys(("ids", "step_starts"), pa.list_(pa.int32())),
        **dict.fromkeys(("logprobs", "fci", "entropy"), pa.list_(pa.float32())),
    }
)


def _differences(
    old: dict[str, Any], new: dict[str, Any], defaults: dict[str, Any], prefix: str = ""
) -> dict[str, tuple[Any, Any]]:
    """Dotted keys in which two configs differ, with both values. A key that the old one does not know has its default:
    the run was started before there was a choice."""
    found: dict[str, tuple[Any, Any]] = {}
    for key in sorted({*old, *new}):
        default = defaults.get(key)
        a, b = old.get(key, default), new.get(key)
        if isinstance(a, dict) and isinstance(b, dict) and not key.endswith("options"):
            found |= _differences(a, b, default if isinstance(default, dict) else {}, f"{prefix}{key}.")
        elif a != b:
            found[f"{prefix}{key}"] = (a, b)
    return found


def _git(*args: str) -> str | None:
    """Output of git in the folder of this package, None outside a checkout."""
    here = Path(__file__).parent
    answer = subprocess.run(["git", *args], cwd=here, capture_output=True, text=True, check=False)
    return answer.stdout.strip() if answer.returncode == 0 else None


def _sync(folder: Path) -> None:
    """Flush a folder and the files under it to disk."""
    for path in [folder, *folder.rglob("*")]:
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
