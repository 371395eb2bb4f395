"""Every part of a user's own, by name, end to end: a file outside the package and a TOML over the demo."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pyarrow.parquet as pq
import pytest

import attnrl
from attnrl.backend import Backend
from attnrl.cli import run
from attnrl.config import Config, load_config
from attnrl.data.tasks import as_records
from attnrl.errors import ConfigError, TrainingError
from attnrl.launch.models import VERBS, check_factory, open_engine
from fakes import FakeBackend

MINE = '''
import asyncio
import dataclasses
import sys
from collections import Counter

import attnrl.local.backend
from attnrl.schedules import on_policy
from attnrl.types import Kept, Verdict

ENGINES, RUNNING, SEEN = [], Counter(), []


def by_column(attempts, *, bonus):
    """Right where the gold stands in the response; a bonus by the row's level beside it."""
    return [
        Verdict(float(a.answers[0] in a.response) + bonus * a.row["level"], a.row["topic"], right=False)
        for a in attempts
    ]


async def judge(attempt, *, delay=0.0):
    """A service: slow, and for some rows without an answer."""
    RUNNING["now"] += 1
    RUNNING["most"] = max(RUNNING["most"], RUNNING["now"])
    RUNNING["calls"] += 1
    try:
        await asyncio.sleep(3600 if attempt.row["hangs"] else delay)
    finally:
        RUNNING["now"] -= 1
    return 0.5


def up_to_level(groups, memory, *, most):
    """Prompts of a low level; remembers how many groups it has seen."""
    mask = tuple(g.prompt.row["level"] <= most for g in groups)
    SEEN.append(dict(memory))
    reasons = tuple("" if kept else f"level above {most}" for kept in mask)
    return Kept(mask, {"seen": memory.get("seen", 0) + len(groups)}, reasons)


def marked(state, parts):
    """The on-policy iteration, signed."""
    outcome = on_policy(state, parts)
    return dataclasses.replace(outcome, metrics={**outcome.metrics, "mine/iteration": float(state.iteration)})


class Counting:
    """The local engine, with its calls counted."""

    def __init__(self, inner, label):
        self.inner, self.label, self.calls, self.trees = inner, label, Counter(), []

    @property
    def version(self):
        return self.inner.version

    def generate(self, requests, sampling):
        self.calls["generate"] += 1
        self.trees += [request.tree for request in requests]
        return self.inner.generate(requests, sampling)

    def score(self, requests, scoring):
        self.calls["score"] += 1
        return self.inner.score(requests, scoring)

    def update(self, samples):
        self.calls["update"] += 1
        return self.inner.update(samples)

    def save(self, path):
        self.calls["save"] += 1
        self.inner.save(path)

    def load(self, path):
        self.calls["load"] += 1
        self.inner.load(path)

    def metrics(self):
        counts = {f"{self.label}/{name}": float(count) for name, count in self.calls.items()}
        return {**self.inner.metrics(), **counts}

    def close(self):
        self.calls["close"] += 1
        self.inner.close()


def counting(config, *, model, tokenizer, learn=True, label="mine"):
    inner = attnrl.local.backend.build(config, model=model, tokenizer=tokenizer, learn=learn)
    ENGINES.append(Counting(inner, label))
    return ENGINES[-1]
'''

TOML = """
base = "demo"
about = "all of it mine"

[data]
train = ["rows.jsonl"]

[sampling]
max_response_tokens = 100

[[reward]]
name = "mine:by_column"
options = { bonus = 0.25 }

[[reward]]
name = "mine:judge"
weight = 2.0
options = { delay = 0.02 }

[algo]
schedule = "mine:marked"
filter = "mine:up_to_level"
filter_options = { most = 1 }
prompts = 4
group = 3
adaptive_batch = false
grade_truncated = true


[verify]
concurrency = 4
async_timeout_s = 0.5

[evaluation]
every = 0

[engine]
name = "mine:counting"
options = { label = "counted" }

[run]
iterations = 2
checkpoint_every = 2
"""


def write_own(folder: Path) -> Path:
    """The user's file, rows with columns of their own, and the preset; levels 0, 1, 2 and a row whose judge hangs."""
    (folder / "mine.py").write_text(MINE, encoding="utf-8")
    tasks = as_records(load_config("demo").data.tasks, "train", 8, seed=0)
    rows = [
        {"problem": t.problem, "answer": t.answers[0], "level": i % 3, "topic": f"topic{i % 3}", "hangs": i == 4}
        for i, t in enumerate(tasks)
    ]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    (folder / "mine.toml").write_text(TOML, encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """One run by `attnrl.train` of everything, with the user's module and the forests it wrote."""
    folder = write_own(tmp_path_factory.mktemp("own"))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.syspath_prepend(folder)
        done = attnrl.train("mine.toml", "run", say=lambda text: None)
        module = sys.modules.pop("mine")
        forests = pq.read_table(done.run_dir / "forests", use_threads=False).to_pylist()
        metrics = done.metrics
        weights = (folder / "run" / "checkpoints" / "000002" / "model" / "config.json").is_file()
    rows = {r["problem"]: r for r in map(json.loads, (folder / "rows.jsonl").read_text().splitlines())}
    return {"module": module, "forests": forests, "metrics": metrics, "rows": rows, "model": weights}


def test_a_reward_of_ones_own_sees_the_columns_of_the_row(trained):
    graded = [(r, trained["rows"][r["problem"]]) for r in trained["forests"]]
    assert len({row["level"] for _, row in graded}) == 3  # every level was met
    for rollout, row in graded:
        said = float(row["answer"] in whole_text(rollout, trained["forests"]))
        assert rollout["reward"] == pytest.approx(said + 0.25 * row["level"] + 2.0 * 0.5)
        assert rollout["rule"] == row["topic"]  # the first reward says by which rule


def whole_text(rollout: dict, forests: list[dict]) -> str:
    """The response of a rollout: a branch's with what it kept of its trunk."""
    if rollout["kind"] == "trunk":
        return rollout["text"]
    same = ("iteration", "uid", "tree")
    trunk = next(r for r in forests if r["kind"] == "trunk" and all(r[k] == rollout[k] for k in same))
    from attnrl.launch.models import decoder, load_tokenizer, model_path
    from attnrl.types import as_ids

    decode = decoder(load_tokenizer(model_path("demo")))
    return decode(as_ids([*trunk["ids"][: rollout["point"]], *rollout["ids"]]))


def test_right_is_what_the_first_reward_says_not_what_is_earned(trained):
    for metrics in trained["metrics"]:
        assert metrics["trunks/accuracy"] == 0.0  # `right=False`, although most earn more than 1
        assert metrics["reward/judge"] <= 0.5


def test_an_async_reward_runs_side_by_side_and_within_its_time(trained):
    running = trained["module"].RUNNING
    assert running["most"] == 4  # verify.concurrency: as many as allowed, and no more
    assert running["now"] == 0  # what hung was cancelled
    late = sum(m.get("verify/timeout", 0.0) for m in trained["metrics"])
    assert late == sum(m["verify/errors"] for m in trained["metrics"]) > 0
    # a trunk without an answer from the service is no evidence: it is in no forest
    hanging = next(problem for problem, row in trained["rows"].items() if row["hangs"])
    assert all(r["problem"] != hanging for r in trained["forests"])
    assert late % 3 == 0  # whole groups: all trunks of the row that hangs


def test_a_filter_of_ones_own_drops_with_its_reason_and_remembers(trained):
    reasons = Counter()
    for r in trained["forests"]:
        level = trained["rows"][r["problem"]]["level"]
        assert (r["prompt_reason"] == "filtered: level above 1") == (level == 2), r["prompt_reason"]
        reasons[level] += 1
    assert reasons[2]
    assert reasons[0] or reasons[1]
    assert all(r["kind"] == "trunk" for r in trained["forests"] if trained["rows"][r["problem"]]["level"] == 2)
    first, second = trained["module"].SEEN
    assert first == {}
    assert 3 <= second["seen"] <= 4


def test_a_schedule_of_ones_own_is_the_iteration(trained):
    assert [m["mine/iteration"] for m in trained["metrics"]] == [0.0, 1.0]


def test_an_engine_of_ones_own_wraps_ours_and_speaks_in_the_metrics(trained):
    (engine,) = trained["module"].ENGINES
    assert engine.calls["update"] == engine.inner.version >= 1
    assert engine.calls["save"] == 1
    assert engine.calls["close"] == 1
    assert trained["model"]
    assert engine.calls["generate"] >= 2
    assert engine.calls["score"] == 2
    last = trained["metrics"][-1]
    assert last["counted/generate"] == engine.calls["generate"]
    assert last["generate/shared_context"] > 0  # those of the engine inside come through
    trunks, branches = engine.trees[:12], engine.trees[12:]
    assert len(set(trunks)) == 12  # four prompts of three trunks, a tree each
    first_branches = [t for t in branches if t in set(trunks)]
    assert first_branches
    assert max(Counter(first_branches).values()) <= 4


def test_the_command_finds_the_file_in_the_folder_it_is_started_in(tmp_path):
    write_own(tmp_path)
    command = [sys.executable, "-m", "attnrl", "train", "mine.toml", "--run-dir", "run", "--iterations", "1"]
    env = {**os.environ, "PYTHONPATH": str(Path(attnrl.__file__).parents[1])}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    (line,) = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    metrics = json.loads(line)
    assert metrics["mine/iteration"] == 0.0
    assert metrics["counted/generate"] >= 1
    assert metrics["reward/by_column"] > 0
    assert 0 < metrics["reward/judge"] <= 0.5


@pytest.fixture
def own(tmp_path, monkeypatch):
    write_own(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    sys.modules.pop("mine", None)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ({"algo.filter": "mine:up_to_levels"}, r"algo\.filter: cannot import 'mine:up_to_levels'"),
        ({"algo.filter_options": {"least": 1}}, r"algo\.filter: 'mine:up_to_level' has no option 'least'"),
        ({"algo.schedule": "mine:ENGINES"}, r"algo\.schedule: 'mine:ENGINES' is not a function but list"),
        ({"algo.schedule": "mine:by_column"}, r"algo\.schedule: must be callable as \(state, parts\)"),
        (
            {"algo.filter": "mine:judge", "algo.filter_options": {}},
            r"algo\.filter: must be callable as \(groups, memory\)",
        ),
        ({"algo.budget_options": {"rounding": "up"}}, r"algo\.budget: option rounding = 'up': input should be 'round'"),
        ({"engine.name": "builtins:dict", "engine.options": {}}, r"engine\.name: 'builtins:dict' is no factory"),
        ({"run.keep_best": "eval/x/pass@1"}, r"run\.keep_best = 'eval/x/pass@1', but nothing is evaluated"),
        ({"evaluation.every": 1, "evaluation.ks": [999]}, r"pass@999 cannot be estimated from"),
        ({"engine.name": "mine:engine"}, r"engine\.name: cannot import 'mine:engine'"),
        ({"engine.options": {"tag": 1}}, r"engine\.options: 'mine:counting' has no option 'tag'; it has: label"),
        ({"reward": "mine:by_column"}, r"reward 1 \(mine:by_column\): .*needs the option 'bonus'"),
        ({"reward": "mine:by_colum"}, r"reward 1 \(mine:by_colum\): cannot import"),
    ],
)
def test_a_wrong_name_or_option_is_said_before_a_model_loads(own, overrides, said):
    with pytest.raises(ConfigError, match=said):
        attnrl.train("mine.toml", "run", overrides={**overrides, "model.path": "owner/no-such-model"})
    assert not (own / "run").exists()


def test_a_service_that_is_down_ends_the_run_with_the_cause(own):
    def hang_everywhere(line: str) -> str:
        return json.dumps({**json.loads(line), "hangs": True}) + "\n"

    file = own / "rows.jsonl"
    file.write_text("".join(map(hang_everywhere, file.read_text().splitlines())))
    with pytest.raises(TrainingError, match=r"12 of 12 rewards .*timeout: no answer within 0\.5 s"):
        attnrl.train("mine.toml", "run", say=lambda text: None)


def test_an_engine_that_wants_the_run_directory_is_told_it(tmp_path):
    told: list[object] = []

    class Nothing(FakeBackend):
        def close(self):
            told.append("closed")

    def wants(config, *, model, tokenizer, learn=True, run_dir=None):
        told.append(run_dir)
        return Nothing()

    def does_not(config, *, model, tokenizer, learn=True):
        return Nothing()

    for factory in (wants, does_not):
        with open_engine(factory, Config(), "model", None, run_dir=tmp_path):
            pass
    assert told == [tmp_path, "closed", "closed"]
    with pytest.raises(ConfigError, match="has no option 'run_dir'"):
        check_factory("mine:wants", wants, {"run_dir": "elsewhere"})


@pytest.mark.parametrize(
    ("command", "learn"),
    [
        (["train", "demo", "--run-dir", "run", "--data.train", "nowhere.jsonl"], True),
        (["eval", "--model", "demo", "--output", "results", "--benchmarks", "aime24", "--data-dir", "nowhere"], False),
        (["score", "--model", "demo", "--input", "empty.jsonl", "--output", "scores.parquet"], False),
    ],
    ids=["train", "eval", "score"],
)
def test_an_engine_says_what_is_wrong_before_data_is_read(tmp_path, monkeypatch, capsys, command, learn):
    """As the engine of verl does, by a `check` of its factory."""
    (tmp_path / "strict.py").write_text(
        "from attnrl.errors import ConfigError\n"
        "def build(config, *, model, tokenizer, learn=True): ...\n"
        "def check(config, *, model, checkpoint, learn): raise ConfigError(f'no cluster, {checkpoint=} {learn=}')\n"
        "build.check = check\n"
    )
    (tmp_path / "empty.jsonl").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    assert run([*command, "--engine.name", "strict:build"]) == 2
    assert capsys.readouterr().err.endswith(f"attnrl {command[0]}: no cluster, checkpoint=None learn={learn}\n")
    assert {file.name for file in tmp_path.iterdir()} <= {"strict.py", "__pycache__", "empty.jsonl"}


@pytest.mark.parametrize(
    ("missing", "verbs", "said"),
    [
        (("close",), VERBS, "close"),
        (("save", "load"), VERBS, "save, load"),
        (("metrics", "version"), VERBS, "metrics, version"),
        (("generate", "update"), ("generate",), "generate"),
        (("score", "close"), ("score", "metrics"), "score, close"),
    ],
)
def test_an_engine_without_a_verb_that_is_needed_is_refused_before_work_starts(missing, verbs, said):
    kept = {*VERBS, "version"} - {*missing}
    closed = []
    engine = SimpleNamespace(**dict.fromkeys(kept, lambda: closed.append(1)))
    config = load_config("demo", {"engine.name": "mine:factory"})
    refused = rf"engine\.name: 'mine:factory' made an engine \(SimpleNamespace\) without {said};"
    with (
        pytest.raises(ConfigError, match=refused),
        open_engine(lambda *a, **k: engine, config, "model", None, verbs=verbs),
    ):
        raise AssertionError("work started")
    assert closed == ([1] if "close" in kept else []), "what it holds is given back where it can be"


def test_a_factory_that_returns_nothing_is_refused_and_what_is_not_asked_for_may_be_missing():
    config = load_config("demo", {"engine.name": "mine:factory"})
    with (
        pytest.raises(ConfigError, match=r"made an engine \(NoneType\) without generate, score, update, .*, version;"),
        open_engine(lambda *a, **k: None, config, "model", None),
    ):
        raise AssertionError("work started")
    draws = SimpleNamespace(generate=print, close=lambda: None, version=0)
    with open_engine(lambda *a, **k: draws, config, "model", None, verbs=("generate",)) as engine:
        assert engine is draws


def test_the_verbs_are_those_of_the_protocol():
    assert {*VERBS} == {name for name in dir(Backend) if not name.startswith("_")}
