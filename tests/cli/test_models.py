"""The names a model goes by: "demo", a run directory; and how it is evaluated without a flag."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from attnrl import cli
from attnrl.config import TaskConfig, load_config
from attnrl.data.tasks import make_tasks
from attnrl.errors import MissingFileError
from attnrl.launch import train
from attnrl.launch.evaluating import settings_of
from attnrl.launch.models import model_path, newest_model


def test_a_run_directory_stands_for_its_newest_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(MissingFileError, match="without a checkpoint"):
        newest_model(str(tmp_path))
    for name in ("000010", "000020", ".unfinished-000030"):
        (tmp_path / "checkpoints" / name / "model").mkdir(parents=True)
    assert newest_model(str(tmp_path)) == str(tmp_path / "checkpoints/000020/model")
    assert newest_model("owner/model") == "owner/model"


def test_a_trained_model_is_evaluated_as_its_run_was(tmp_path: Path, monkeypatch) -> None:
    config = load_config("demo", {"data.tasks.modulus": 7, "evaluation.temperature": 0.5})
    (tmp_path / "checkpoints/000010/model").mkdir(parents=True)
    (tmp_path / "config.json").write_text(config.model_dump_json())
    monkeypatch.chdir(tmp_path / "checkpoints")
    for name in (tmp_path, tmp_path / "checkpoints/000010/model", "../checkpoints/000010/model"):
        where, known = settings_of(str(name), {"evaluation.tasks": 3})
        assert where.endswith("config.json")
        wanted = known.evaluation
        assert (wanted.benchmarks, known.data.tasks.modulus, wanted.temperature) == (("tasks",), 7, 0.5)
        assert (known.data.template, wanted.max_response_tokens, wanted.samples) == ("{problem}", 200, 2)
        assert wanted.tasks == 3
    assert settings_of("model") == settings_of("owner/model") == ("", load_config(""))


def test_the_best_checkpoint_is_evaluated_as_its_run_was(tmp_path: Path) -> None:
    for name in ("checkpoints", "best/model"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "config.json").write_text(load_config("demo").model_dump_json())
    where, known = settings_of(str(tmp_path / "best/model"))
    assert (where, known.evaluation.benchmarks) == (str(tmp_path / "config.json"), ("tasks",))


def test_what_began_with_a_run_s_checkpoint_goes_on_with_it_when_the_run_has_moved_on(
    tmp_path: Path, monkeypatch, capsys
) -> None:
    monkeypatch.chdir(tmp_path)
    small = {"evaluation.every": 0, "algo.prompts": 1, "algo.group": 2, "run.checkpoint_every": 1}
    first, second = (str(tmp_path / f"a/checkpoints/{number:06}/model") for number in (1, 2))
    shutil.copytree(model_path("demo"), first)
    Path("a/config.json").write_text(load_config("demo").model_dump_json())
    said: list[str] = []
    b = {**small, "model.path": "a", "run.iterations": 1}
    train("demo", "b", overrides=b, say=said.append)
    assert f"a stands for its newest checkpoint, {first}" in said
    rows = [{"prompt": "All counts are modulo 11.\n", "response": "Take mugs = 3\n\nSo mugs = \\boxed{3}."}]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    evaluation = ["eval", "--model", "a", "--task-count", "2", "--samples", "1", "--output", "results"]
    scoring = ["score", "--model", "a", "--input", "rows.jsonl", "--output", "scores.parquet"]
    for argv in (evaluation, scoring):
        assert cli.run(argv) == 0
        assert f"a stands for its newest checkpoint, {first}" in capsys.readouterr().out

    shutil.copytree(model_path("demo"), second)
    said.clear()
    train("demo", "b", resume=True, overrides={**b, "run.iterations": 2}, say=said.append)
    assert f"a stands for {first}, as at the beginning; its newest is {second}" in said
    assert json.loads(Path("b/config.json").read_text())["model"]["path"] == first
    environment = json.loads(Path("b/environment.json").read_text())
    assert environment["rule"] == {"reads": ["fci"], "by_quantile": True}
    assert cli.run(evaluation) == 0
    assert json.loads(Path("results/results.json").read_text())["settings"]["model"] == first
    assert pq.read_schema("scores.parquet").metadata[b"model"].decode() == first
    assert cli.run(scoring) == 0
    assert pq.read_schema("scores.parquet").metadata[b"model"].decode() == second

    monkeypatch.chdir("results")  # from wherever: what was recorded is absolute
    assert cli.run(["train", "--resume", "--run-dir", "../b", "--run.iterations", "3"]) == 0
    monkeypatch.chdir(tmp_path)
    shutil.rmtree(Path(first).parent)  # as the run does by itself once two newer ones are there
    with pytest.raises(MissingFileError, match=rf"no model {first}: .*run\.keep_checkpoints.*; it has .*{second}$"):
        train(None, "b", resume=True, overrides={"run.iterations": 4})


def test_a_warmed_up_model_is_evaluated_on_its_own_tasks() -> None:
    where, known = settings_of(model_path("demo"))  # by its directory: the name "demo" takes the preset
    assert where.endswith("warmup.json")
    tasks = known.data.tasks
    assert (known.evaluation.benchmarks, tasks.modulus, tasks.wording) == (("tasks",), 11, "equations")


def test_the_demo_model_by_name_gives_the_number_that_training_begins_with(tmp_path: Path, capsys) -> None:
    small = {"evaluation.tasks": 12, "algo.prompts": 1, "algo.group": 2, "run.iterations": 1}
    begun = train("demo", tmp_path / "run", overrides=small).metrics[0]
    argv = ["eval", "--model", "demo", "--task-count", "12", "--output", str(tmp_path / "results")]
    assert cli.run(argv) == 0
    assert "settings from preset demo" in capsys.readouterr().out
    results = json.loads((tmp_path / "results/results.json").read_text())
    assert results["benchmarks"]["tasks"]["pass@1"] == begun["eval/tasks/pass@1"]
    assert 0.3 < begun["eval/tasks/pass@1"] < 1
    assert cli.run([*argv, "--temperature", "0"]) == 2  # a flag overrules, and another setting is refused here
    assert "temperature was 1.0, is now 0.0" in capsys.readouterr().err


def test_the_demo_model_by_name_scores(tmp_path: Path, capsys) -> None:
    spec = TaskConfig(operations=(2, 6), modulus=11, wording="equations")
    (task,) = make_tasks(spec, "test", 1)
    (tmp_path / "in.jsonl").write_text(json.dumps({"prompt": task.problem + "\n", "response": task.solution}) + "\n")
    files = ["--input", str(tmp_path / "in.jsonl"), "--output", str(tmp_path / "out.parquet")]
    assert cli.run(["score", "--model", "demo", *files, "--device", "cpu"]) == 0
    steps = task.solution.count("\n\n") + 1
    assert f"1 response, {steps} steps" in capsys.readouterr().out
