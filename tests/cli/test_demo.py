"""What a user meets around a run: where a demo goes on, what a finished run says, what fits 80 columns."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from attnrl import cli
from attnrl.cli.demo import choose_place, summary
from attnrl.config import Config, load_config
from attnrl.console import console_line
from attnrl.errors import ConfigError
from attnrl.launch import train
from attnrl.run import open_run
from attnrl.types import State
from fakes import FakeBackend

DEMO = {"demo": load_config("demo")}


def make_run(path: Path, config: Config, *, recorded: int = 0, checkpoint: int | None = None, tokens: int = 0) -> None:
    """A run directory with metrics up to an iteration and a checkpoint of one."""
    run = open_run(path, config.model_dump(mode="json"), resume=True)
    for i in range(recorded + 1):
        run.log({"iteration": float(i)})
    if checkpoint is not None:
        run.checkpoint(State(16.0, checkpoint, generated_tokens=tokens), FakeBackend(), keep=2)


def test_a_demo_goes_on_where_it_was_stopped(tmp_path: Path) -> None:
    output = tmp_path / "demo"
    assert choose_place(output, DEMO) == output
    make_run(output / "demo", DEMO["demo"], recorded=3)  # stopped before its first checkpoint
    assert choose_place(output, DEMO) == output
    make_run(output / "demo", DEMO["demo"], recorded=12, checkpoint=10)
    assert choose_place(output, DEMO) == output
    make_run(output / "demo", DEMO["demo"], recorded=20, checkpoint=20)  # finished: kept
    second = tmp_path / "demo-2"
    assert choose_place(output, DEMO) == second
    make_run(second / "demo", DEMO["demo"], recorded=1)
    assert choose_place(output, DEMO) == second


def test_a_demo_of_several_methods_goes_on_with_those_that_are_left(tmp_path: Path) -> None:
    make_run(tmp_path / "demo/demo", DEMO["demo"], recorded=20, checkpoint=20)
    assert choose_place(tmp_path / "demo", {**DEMO, "demo_grpo": load_config("demo_grpo")}) == tmp_path / "demo"


def test_a_demo_never_writes_into_other_settings_or_other_things(tmp_path: Path) -> None:
    make_run(tmp_path / "a/demo", load_config("demo", {"run.seed": 1}), recorded=3)
    assert choose_place(tmp_path / "a", DEMO) == tmp_path / "a-2"
    (tmp_path / "b").mkdir()
    (tmp_path / "b/thesis.tex").write_text("")
    assert choose_place(tmp_path / "b", DEMO) == tmp_path / "b-2"


@pytest.mark.parametrize(
    ("flags", "hint"),
    [
        ({}, "--run.iterations above 20"),
        ({"run.iterations": 90, "run.generated_tokens": 5000}, "--run.generated_tokens above 6000"),
    ],
)
def test_resuming_a_finished_run_says_so_and_leaves_it_alone(
    flags: dict[str, int], hint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_run(tmp_path, load_config("demo", flags), recorded=20, checkpoint=20, tokens=6000)
    before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    options = [word for key, value in flags.items() for word in (f"--{key}", str(value))]
    assert cli.run(["train", "demo", "--run-dir", str(tmp_path), "--resume", *options]) == 0
    said = capsys.readouterr().out
    assert f"{tmp_path} is finished: 20 iterations, 6,000 tokens generated" in said
    assert hint in said
    assert {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()} == before


@pytest.mark.parametrize(("checkpoint", "said"), [(4, "goes on after iteration 4"), (None, "no checkpoint yet")])
def test_a_resumed_run_tells_its_trackers_what_comes_again(
    checkpoint: int | None, said: str, tmp_path: Path, monkeypatch, capsys: pytest.CaptureFixture[str]
) -> None:
    told = []

    def stop(*_: object, **known: int) -> None:
        told.append(known)
        raise ConfigError("far enough")

    monkeypatch.setattr("attnrl.launch.training.open_trackers", stop)
    make_run(tmp_path, DEMO["demo"], recorded=7, checkpoint=checkpoint)
    with pytest.raises(ConfigError, match="far enough"):
        train(DEMO["demo"], tmp_path, resume=True)
    assert told == [{"kept": -1 if checkpoint is None else checkpoint, "recorded": 7}]
    assert said in capsys.readouterr().out


def test_an_interruption_says_how_to_go_on(monkeypatch, capsys: pytest.CaptureFixture[str]) -> None:
    def stop(argv: list[str]) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("attnrl.cli.demo.main", stop)
    assert cli.run(["demo"]) == 130
    assert "same command goes on" in capsys.readouterr().err


def test_the_result_fits_80_columns(tmp_path: Path) -> None:
    runs = [tmp_path / name for name in ("demo", "demo_grpo", "demo_treerl")]
    for path in runs:
        run = open_run(path, {}, resume=False)
        for i, share in ((0.0, 0.699), (20.0, 1.0)):
            key = "eval/tasks/pass@1"
            numbers = {key: share, f"{key}_low": share - 0.043, f"{key}_high": min(share + 0.039, 1.0)}
            run.log({"iteration": i, **numbers, "generate/total_tokens": 1.23e6, "seconds/iteration": 1234.0})
    out = io.StringIO()
    Console(file=out, width=80).print(summary(runs))
    lines = out.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    row = next(line for line in lines if "demo_treerl" in line)
    assert " ".join(row.split()) == "demo_treerl 69.9 (65.6 to 73.8) 100.0 (95.7 to 100.0) +30.1 1.23M 41m08s"


def test_the_line_of_an_iteration_fits_80_columns() -> None:
    out = io.StringIO()
    shown = {"iteration": 8.0, "train/samples": 1920.0, "batch/prompts": 256.0, "trunks/accuracy": 1.0}
    shown |= {"both/valid": 1.0, "generate/length": 8192.0, "policy/entropy": 0.312, "policy/kl": 0.0123}
    shown |= {"policy/grad_norm": 12.345, "generate/tokens": 6e6, "seconds/generate": 100.0, "seconds/iteration": 200.0}
    shown |= {"generate/truncated_share": 1.0, "trunks/steps": 312.4}
    console_line(load_config("attnrl_1p5b"), Console(file=out, width=80))(shown)
    header, line = out.getvalue().splitlines()
    assert len(header) == len(line) == 80
    assert " ".join(header.split()) == "prompts right valid train length cut steps entropy kl tok/s eta"
    assert " ".join(line.split()) == "8/500 256 100.0% 100% 1920 8192 100% 312.4 0.312 0.0123 60000 27h20m"
