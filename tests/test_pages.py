"""The pages on Python, engines, parts and models keep their word: blocks run end to end on the demo model."""

from __future__ import annotations

import io
import json
import re
import runpy
import sys
from pathlib import Path

import pytest
from rich.console import Console

import attnrl
from attnrl.config import load_config
from attnrl.console import HEADER, console_line
from attnrl.launch.parts import check_parts

ROOT = Path(__file__).parent.parent
TINY = {
    "data.train_tasks": 60,
    "algo.prompts": 2,
    "algo.max_prompts": 4,
    "algo.group": 3,
    "evaluation.every": 0,
    "run.iterations": 1,
}


def blocks(page: str, kind: str) -> list[str]:
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    return re.findall(rf"```{kind}\n(.*?)```", text, flags=re.DOTALL)


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder to start in; modules imported from it are forgotten afterwards."""
    before = set(sys.modules)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    for name in set(sys.modules) - before:
        if getattr(sys.modules[name], "__file__", None) and str(tmp_path) in str(sys.modules[name].__file__):
            del sys.modules[name]


def write_files(page: str, folder: Path) -> list[str]:
    """The blocks of a page that begin with a file's name, as files."""
    names = []
    for block in (*blocks(page, "python"), *blocks(page, "toml")):
        if name := re.match(r"# (\w+\.\w+)\n", block):
            (folder / name[1]).write_text(block, encoding="utf-8")
            names.append(name[1])
    return names


def quiet(text: str) -> None:
    pass


def test_python_page(here, capsys):
    found = blocks("python.md", "python")
    assert len(found) == 3
    (here / "script.py").write_text("\n".join(found), encoding="utf-8")
    names = runpy.run_path(str(here / "script.py"))
    out = capsys.readouterr().out.splitlines()
    assert "runs/first/checkpoints/000001/model" in out  # as its comment says
    assert names["more"].model == Path("runs/first/checkpoints/000002/model")
    steps = names["scored"].steps
    assert out[-len(steps) :] == [
        f"{s['step']} {round(s['fci'], 3)} {s['branch_point']} {s['text'].strip()}" for s in steps
    ]
    assert len(steps) == 4
    assert 0 <= names["report"].metrics()["eval/tasks/pass@1"] <= 1


def test_engines_page(here):
    assert write_files("engines.md", here) == ["my_engine.py", "mine.toml"]
    done = attnrl.train("mine.toml", "run", overrides=TINY, say=quiet)
    (metrics,) = done.metrics
    assert metrics["watch/drawn"] == metrics["generate/tokens"] > 0
    assert metrics["watch/scored"] > 0
    assert metrics.get("watch/trained", 0.0) == metrics["train/response_tokens"]


def test_the_table_of_verbs_is_the_protocol():
    from attnrl.backend import Backend, Overlapping

    page = (ROOT / "docs/engines.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (`.*?`) \|", page, flags=re.MULTILINE)
    named = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    declared = {*dir(Backend), *dir(Overlapping)}
    assert named == {name for name in declared if not name.startswith("_")} - {"version"}
    assert len(named) == 8


def test_extending_page_end_to_end(here):
    write_files("extending.md", here)
    (preset,) = blocks("extending.md", "toml")
    (here / "mine.toml").write_text(preset.replace("attnrl_1p5b", "demo"), encoding="utf-8")
    overrides = {**TINY, "algo.segmenter_options": {"words": ["Then", "Take", "So"]}}
    done = attnrl.train("mine.toml", "run", overrides=overrides, say=quiet)
    (metrics,) = done.metrics
    assert metrics["mine/on_policy"] == 1.0
    assert sorted(done.state.memory.values()) == [1, 1]  # the filter saw two prompts, once each
    assert metrics["trunks/steps"] > 2  # the segmenter's
    assert metrics["generate/rollouts"] > 6  # the rule branched


def test_own_model_page_loads_as_it_says(here):
    names = write_files("own_model.md", here)
    assert names == ["mine.toml", "lora.toml"]
    config = load_config("mine.toml")
    check_parts(config)
    assert config.run.keep_best == "eval/held_out/pass@1"
    assert config.data.columns == {"problem": "question", "answer": "solution"}


def test_lora_trains_adapters_and_saves_them_merged_and_apart(here):
    pytest.importorskip("peft")
    import torch
    from safetensors.torch import load_file

    write_files("own_model.md", here)
    overrides = {**TINY, "update.lr": 1e-2}
    done = attnrl.train("lora.toml", "run", overrides=overrides, say=quiet)
    saved = done.model.parent
    settings = json.loads((saved / "adapter" / "adapter_config.json").read_text())
    assert settings["r"] == 4
    assert sorted(settings["target_modules"]) == ["q_proj", "v_proj"]
    merged = load_file(done.model / "model.safetensors")
    start = load_file(Path(attnrl.__file__).parent / "assets" / "demo_model" / "model.safetensors")
    changed = {name for name in start if not torch.equal(start[name].float(), merged[name].float())}
    assert changed
    assert all(re.search(r"[qv]_proj\.weight$", name) for name in changed)
    assert attnrl.train(run_dir="run", resume=True, overrides={"run.iterations": 2}, say=quiet).state.iteration == 2


def test_own_model_tables_are_what_the_functions_say():
    script = runpy.run_path(str(ROOT / "benchmarks" / "forecast.py"))
    page = (ROOT / "docs/own_model.md").read_text(encoding="utf-8")
    found = script["rows"]()
    for made in (script["table"](found), script["fits"](found), script["layers"](), script["hours"]()):
        assert made in page
    assert script["kept"]() in (ROOT / "docs/performance.md").read_text(encoding="utf-8")


def test_metrics_page_says_which_metric_each_column_of_the_console_shows():
    """A metric that a row names moves the cell under that row's column, and no other."""
    page = (ROOT / "docs/metrics.md").read_text(encoding="utf-8")
    table = page.partition("| column | metric |\n|---|---|\n")[2].partition("\n\n")[0]
    rows = [row.strip("| ").split(" | ") for row in table.splitlines()]
    named = [(re.findall(r"`([^`]+)`", names), re.findall(r"`(\w+/\w+)`", said)) for names, said in rows]
    columns = HEADER.split()
    assert sorted(name for names, _ in named for name in names) == sorted(columns)
    shown = {"iteration": 1.0, "train/samples": 8.0, "seconds/generate": 2.0, "policy/entropy": 0.5, "policy/kl": 0.5}

    def cells(metrics):
        out = io.StringIO()
        console_line(load_config("demo"), Console(file=out, width=400))(metrics)
        return out.getvalue().splitlines()[1].split()[1:]

    base = {**shown, "generate/tokens": 40.0}
    for names, metrics in named:
        for name, metric in zip(names, metrics, strict=False):
            moved = cells({**base, metric: base.get(metric, 0.0) + 2.0})
            assert [c for c, a, b in zip(columns, cells(base), moved, strict=True) if a != b] == [name]


def test_metrics_page_names_what_a_run_records(here):
    """Every key of a run, its numbers and names apart, stands in the table."""
    page = (ROOT / "docs/metrics.md").read_text(encoding="utf-8")
    done = attnrl.train("demo", "run", overrides={**TINY, "evaluation.every": 1, "evaluation.tasks": 4}, say=quiet)
    said = set(re.findall(r"[\w@./]+", page))
    groups = {"seconds": "seconds/generate", "branches": "branches/solve_all", "both": "both/", "eval": "eval/NAME"}
    missing = []
    for key in {key for metrics in done.metrics for key in metrics}:
        group = key.partition("/")[0]
        if key in said or group in groups or re.match(r"score/(attention|fci)_", key) or key.startswith("reward/"):
            continue
        missing.append(key)
    assert not missing
