"""The command line: help is fast and free of torch, mistakes end in one message and exit code 2."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

from attnrl.cli import COMMANDS, run, usage
from attnrl.config import load_config, presets


def attnrl(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "attnrl", *args], capture_output=True, text=True, check=False)


def test_help_lists_every_command_and_imports_no_torch() -> None:
    code = (
        "import sys; from attnrl.cli import run; run(['--help']);"
        "assert not {'torch', 'transformers', 'numpy', 'pydantic'} & set(sys.modules)"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert answer.returncode == 0, answer.stderr
    assert all(name in answer.stdout for name in COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself_in_80_columns(command: str) -> None:
    ask = [sys.executable, "-m", "attnrl", command, "--help"]
    environment = {**os.environ, "COLUMNS": "80", "PYTHONIOENCODING": "utf-8"}
    answer = subprocess.run(ask, capture_output=True, encoding="utf-8", check=False, env=environment)
    assert answer.returncode == 0, answer.stderr
    assert answer.stdout.startswith(f"attnrl {command}"), "how it is called"
    assert f"\n  attnrl {command}" in answer.stdout, "an example"
    assert max(map(len, answer.stdout.splitlines())) <= 80
    for wrong in ("options options", ">>>", "usage:"):
        assert wrong not in answer.stdout


def test_the_list_of_commands_fits_80_columns() -> None:
    assert max(map(len, usage().splitlines())) <= 80


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["nonsense"], "no command 'nonsense'"),
        (["trian"], "did you mean 'train'?"),
        (["view", "run", "--port", "80800"], "--port: Input should be less than or equal to 65535"),
        (["eval", "--compare", "a"], "--compare has too few values: Two output directories A,B"),
        (["config"], "give one preset"),
        (["config", "attnrl_1p5b", "--algo.pionts", "2"], "did you mean --algo.points"),
        (["config", "attnrl_1p5b", "--algo.points", "0"], "algo.points"),
        (["config", "attnrl_1p5b", "--algo.points"], "needs a value"),
        (["config", "demo", "--reward", '["math", {"name": "exact", "wieght": 2}]'], "did you mean reward.2.weight?"),
        (["config", "missing.toml"], "missing.toml does not exist"),
        (["config", "demo", "--reward", "maht"], "reward 1 (maht): unknown name 'maht'; did you mean 'math'?"),
        (["config", "demo", "--reward", '{name = "exact", options = {hole = true}}'], "has no option 'hole'"),
        (["config", "demo", "--engine.local.device", "gpu"], "engine.local.device: string should match"),
        (["config", "demo", "--update.loss", "cipso"], "did you mean 'cispo'"),
        (["config", "demo", "--update.loss", "cispo", "--update.clip_low", "0.1"], "update.clip_low = 0.1 is set, but"),
        (["config", "demo", "--reward", "exact", "--verify.workers", "2"], "verify.workers = 2 is set, but nothing"),
        (["presets", "extra"], "takes no arguments"),
        (["config", "attnrl_1p5b", "--update.lr", "inf"], "update.lr"),
        (["config", "attnrl_1p5b", "--model.path", ""], "model.path"),
        (
            ["eval", "--model", "x", "--output", "y", "--samples", "0"],
            "evaluation.samples: input should be greater than or equal to 1",
        ),
        (["eval", "--model", "x", "--seed", "-1"], "--seed: Input should be greater than or equal to 0"),
        (["train", "demo", "--run-dir", "/proc/nowhere"], "--run-dir /proc/nowhere cannot be written"),
        (
            ["train", "demo", "--run-dir", "x", "--model.path", "./nope"],
            "no model or run directory ./nope; give",
        ),
        (["train", "demo", "--run-dir", "x", "--evaluation.benchmarks", '["nosuch"]'], "nosuch"),
        (["train", "--run-dir", "x"], "give a preset, or --resume"),
        (["train", "--run-dir", "x", "--resume"], "holds no run to go on with"),
        (["train", "demo", "demo", "--run-dir", "x"], "takes one preset, got 2"),
        (["train", "demo", "--run-dir", "x", "--engine.name", "locl"], "did you mean 'local'"),
        (["train", "demo", "--run-dir", "x", "--reward", "maths"], "did you mean 'math'"),
        (["train", "demo", "--run-dir", "x", "--update.loss", "clp"], "did you mean 'clip'"),
        (["train", "demo", "--run-dir", "x", "--rnu-dir", "y"], "did you mean --run-dir"),
        (["train", "treerl_1p5b", "--run-dir", "x", "--algo.top_fraction", "0.5"], "algo.top_fraction = 0.5 is set"),
        (["train", "demo", "--run-dir", "x", "--sampling.top_p", "0.9"], "sampling.top_p"),
        (["score", "--model", "demo"], "--input is needed"),
        (["score", "--model", "demo", "--input", "r.jsonl", "--output", "s.csv"], "let its name end in .parquet"),
        (["train", "demo"], "--run-dir"),
        (["report", "run", "--output", "no/r.html"], "--output no/r.html: the folder no does not exist"),
        (["verify", "a.jsonl", "--output", "no/v.jsonl"], "--output no/v.jsonl: the folder no does not exist"),
        (["data", "a.jsonl", "--clean", "no/c.jsonl"], "--clean no/c.jsonl: the folder no does not exist"),
        (["tasks", "--output", "no/t.jsonl"], "--output no/t.jsonl: the folder no does not exist"),
        (["train", "demo", "--run-dir", "x", "--data.train", "[]"], "data.train"),
        (["train", "demo", "--run-dir", "x", "--data.train", '["no/such/file.jsonl"]'], "no/such/file.jsonl"),
    ],
)
def test_mistakes_end_in_one_message_and_exit_code_2(args: list[str], message: str, tmp_path: Path) -> None:
    answer = subprocess.run(
        [sys.executable, "-m", "attnrl", *args], capture_output=True, text=True, check=False, cwd=tmp_path
    )
    assert answer.returncode == 2
    assert message in answer.stderr
    assert "Traceback" not in answer.stderr
    assert answer.stdout == "", "nothing is said of the work before the mistake is found"
    assert list(tmp_path.iterdir()) == [], "nothing is written before the mistake is found"


@pytest.mark.parametrize(("words", "iterations"), [(["demo"], 20), ([], 500), (["--run-dir", "demo"], 500)])
def test_help_behind_a_preset_shows_its_values(
    words: list[str], iterations: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (load_config("demo").run.iterations, load_config("").run.iterations) == (20, 500)
    with pytest.raises(SystemExit):
        run(["train", *words, "--help"])
    assert f"  --iterations {iterations}\n" in capsys.readouterr().out


def test_choices_of_a_flag_and_of_a_key_are_listed() -> None:
    assert "One of: iterations, updates, tokens, seconds." in attnrl("compare", "--help").stdout
    assert "One of: markdown, latex." in attnrl("compare", "--help").stdout
    assert "One of: mean, sum." in attnrl("config", "--help").stdout


def test_a_reader_that_goes_ends_a_command_quietly() -> None:
    """As `attnrl config --help | head -1` does: far more is said than a pipe holds unread."""
    command = [sys.executable, "-c", "from attnrl.cli import entry; entry()", "config", "--help"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode == 141


def test_a_run_in_use_is_refused_before_its_data_is_read(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    with (run_dir / "lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        answer = attnrl("train", "demo", "--run-dir", str(run_dir))
        assert answer.returncode == 2
        assert f"--run-dir {run_dir} is in use by another process" in answer.stderr
        assert answer.stdout == ""
    assert [p.name for p in run_dir.iterdir()] == ["lock"]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ('{"problem": "", "answer": "4"}', "tasks.jsonl:1"),
        ('{"problem": "2+2?", "answer": ""}', "tasks.jsonl:1"),
        ('{"problem": "2+2?"}', "tasks.jsonl"),
        ("{not json", "tasks.jsonl"),
    ],
)
def test_a_bad_data_row_is_named_before_a_model_loads(row: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "tasks.jsonl"
    file.write_text(row + "\n" + '{"problem": "1+1?", "answer": "2"}\n')
    answer = attnrl("train", "demo", "--run-dir", str(tmp_path / "run"), "--data.train", f'["{file}"]')
    assert answer.returncode == 2, answer.stderr
    assert message in answer.stderr
    assert "Traceback" not in answer.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("preset", presets())
def test_printed_config_reads_back_as_the_same_config(
    preset: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """What nothing takes stands in a comment, such as a bound where every batch has as many prompts, or what is for
    branches where there are none: tests/test_taken.py."""
    assert run(["config", preset, "--run.seed", "4"]) == 0
    config, printed = load_config(preset, {"run.seed": 4}), capsys.readouterr().out
    algo = config.algo
    bound, budget = f"max_prompts = {algo.max_prompts}\n", f'budget = "{algo.budget}"\n'
    for line, idle in ((bound, not algo.adaptive_batch), (budget, algo.rule == "none")):
        assert f"\n{line}" in printed or (f"\n# {line}" in printed and idle)
        printed = printed.replace(f"\n# {line}", f"\n{line}")
    (tmp_path / "printed.toml").write_text(printed)
    assert load_config(str(tmp_path / "printed.toml")) == config


def test_presets_are_listed_with_one_line_each(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["presets"]) == 0
    said = capsys.readouterr().out
    first, last = (part.splitlines() for part in said.split("\n\nExperiments of docs/results.md:\n"))
    names = [[line.split()[0] for line in part] for part in (first, last)]
    assert sorted(names[0] + names[1]) == list(presets())
    assert names == [sorted(part) for part in names]
    assert all(len(line.split()) > 3 for line in (*first, *last))
    assert {name.partition("_")[0] for name in names[1]} == {"s", "p"}
    assert not {"s_attnrl", "p_grpo"} & set(names[0])
