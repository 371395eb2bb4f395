"""Comparison of runs, tables and figures: numbers by hand on made-up runs."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from attnrl.algo.adaptive import mean_fci
from attnrl.analysis.comparison import Method, common_budget, compare_runs, estimate, group_methods, numbers, paired
from attnrl.analysis.forests import grouped, rebuild
from attnrl.analysis.intervals import auc
from attnrl.analysis.plots import FIGURES, panel_figure, problem_figure, pyplot
from attnrl.analysis.problems import Problem, means_by_iteration, problems, separation
from attnrl.analysis.records import RunRecord, read_run
from attnrl.analysis.tables import tables
from attnrl.cli import run as command
from attnrl.errors import DataError
from attnrl.types import Group


def record(name: str, accuracies: list[float], *, seed: int = 0, rule: str = "fci", tokens: int = 10) -> RunRecord:
    """A run evaluated before training and after each iteration, of so many tokens and 60 s an iteration."""
    metrics = [{"iteration": 0.0, "eval/a/pass@1": accuracies[0]}]
    for i, accuracy in enumerate(accuracies[1:], start=1):
        cost = {"generate/tokens": tokens, "seconds/iteration": 60.0, "train/valid_tokens": 7.0, "policy/updates": 2.0}
        metrics.append({"iteration": float(i), "eval/a/pass@1": accuracy, **cost})
    config = {"about": name, "run": {"seed": seed}, "algo": {"rule": rule}}
    return RunRecord(name, Path(name), config, {}, metrics, ())


def seeds(method: Method) -> tuple[int, ...]:
    return tuple(run.setting("run.seed") for run in method.runs)


def test_runs_of_one_config_are_one_method() -> None:
    runs = [record("a_s0", [0, 1], seed=0), record("b_s0", [0, 1], rule="none"), record("a_s1", [0, 1], seed=1)]
    methods = group_methods(runs)
    assert [(m.name, seeds(m)) for m in methods] == [("a", (0, 1)), ("b", (0,))]
    with pytest.raises(DataError, match="a_s9: the same config and seed"):
        group_methods([*runs, record("a_s9", [0, 1], seed=1)])


def test_a_run_from_before_a_key_existed_is_of_the_method_that_has_its_default() -> None:
    old, new, other = (record(f"a_s{seed}", [0, 1], seed=seed) for seed in range(3))
    new.config["update"] = {"optimizer": "adamw", "gradient_checkpointing": "all"}
    other.config["update"] = {"optimizer": "adamw_8bit"}
    assert [seeds(m) for m in group_methods([old, new, other])] == [(0, 1), (2,)]


def test_numbers_by_hand() -> None:
    run = record("a", [0.2, 0.4, 0.9, 0.6])
    found = numbers(run, "iterations", 3.0, target=0.5)
    assert (found.first, found.final, found.best) == (0.2, 0.6, 0.9)
    assert found.area == pytest.approx((0.3 + 0.65 + 0.75) / 3)
    assert (found.to_target_tokens, found.to_target_seconds) == pytest.approx((12, 72))  # a fifth of the way up
    assert (found.iterations, found.seconds, found.valid_tokens) == (3, 180, 21)
    early = numbers(run, "tokens", 19.0, target=0.95)
    assert early.final == pytest.approx(0.4 + 0.9 * 0.5)  # nine tenths of the way to the next evaluation
    assert (early.best, early.iterations) == (early.final, 1)
    assert math.isnan(early.to_target_tokens)
    assert numbers(run, "updates", 4.0, 1.0).final == 0.9


def test_the_budget_is_what_all_have_reached() -> None:
    runs = [record("a", [0, 1, 1], tokens=10), record("b", [0, 1], tokens=100, rule="none")]
    assert common_budget(runs, "iterations") == 1
    assert common_budget(runs, "tokens") == 20


def test_within_the_first_iteration_no_cost_is_known() -> None:
    """20 tokens are a fifth of its first iteration: accuracy is on the line, and that it cost nothing is not so."""
    runs = [record("a", [0.2, 0.4, 0.5], tokens=10), record("b", [0.2, 0.7], tokens=100, rule="none")]
    text = tables(compare_runs(runs, axis="tokens"))
    assert "**Cost and accuracy, at 20 tokens; –: the first iteration of a run had not ended by then**" in text
    assert "| a | 2 | 2.0 min | 14 | 50.0 |" in text
    assert "| b | – | – | – | 30.0 |" in text
    assert "had not ended" not in tables(compare_runs(runs))
    before = tables(compare_runs([record("a", [0.2]), record("b", [0.2], rule="none")], axis="tokens"))
    assert "**Cost and accuracy, at 0 tokens**" in before, "before training nothing was spent"
    assert "| a | 0 | 0.0 min | 0 | 20.0 |" in before


def test_nothing_is_said_of_a_run_after_its_last_evaluation() -> None:
    """Evaluated at 0 and 1, and going on to 3: at 3 its accuracy is not known, whatever it was at 1."""
    going = record("a", [0.2, 0.4, 0.9, 0.9])
    for row in going.metrics[2:]:
        del row["eval/a/pass@1"]
    done = record("b", [0.2, 0.6, 0.8, 1.0], rule="none")
    found = compare_runs([going, done])
    assert found.budget == 1
    assert [n.final for (n,) in found.numbers] == [0.4, 0.6]
    text = tables(found)
    assert "one seed a method: no interval can be given" in text
    for row in going.metrics:
        row.pop("eval/a/pass@1", None)
    with pytest.raises(DataError, match="a: no evaluation on record"):
        compare_runs([going, done])


def test_differences_are_paired_by_seed() -> None:
    """Seeds differ far more than methods: only pairs see a difference that is the same in each."""
    base = [record(f"a{s}", [0.0, level], seed=s) for s, level in enumerate((0.2, 0.5, 0.8))]
    better = [record(f"b{s}", [0.0, level + 0.1], seed=s, rule="none") for s, level in enumerate((0.2, 0.5, 0.8))]
    found = compare_runs([*base, *better])
    difference = paired(found.numbers[0], found.numbers[1])
    assert difference.mean == pytest.approx(0.1)
    assert (difference.low, difference.high) == pytest.approx((0.1, 0.1))
    alone = estimate([n.final for n in found.numbers[1]])
    assert alone.low < 0.5 < alone.high
    text = tables(found)
    assert "+10.0 [+10.0, +10.0]" in text
    assert "| a | 50.0 | 50.0 |" in text
    assert "| b | **60.0** | **60.0** |" in text
    latex = tables(found, "latex")
    assert r"b & \textbf{60.0} & \textbf{60.0} \\" in latex
    assert r"\# Valid tokens" in latex
    assert latex.count(r"\begin{tabular}") == latex.count(r"\bottomrule") == 3
    with pytest.raises(DataError, match="--baseline x: the methods are a, b"):
        compare_runs([*base, *better], baseline="x")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, make_run: Callable[..., Path]) -> list[Path]:
    folder = tmp_path_factory.mktemp("compare")
    made = []
    for rule, estimator in (("fci", "tree"), ("none", "grpo")):
        for seed in (0, 1):
            path = make_run(folder / f"{estimator}_s{seed}", iterations=4, seed=seed, rule=rule, estimator=estimator)
            config = json.loads((path / "config.json").read_text())
            config["run"]["seed"] = seed
            (path / "config.json").write_text(json.dumps(config))
            made.append(path)
    return made


def test_mean_fci_of_a_problem_is_the_filters(runs: list[Path]) -> None:
    file = runs[0] / "forests" / "000004.parquet"
    forests = [rebuild(rows) for rows in grouped(pq.read_table(file).to_pylist())]
    found = problems([file])
    assert len(found) == len(forests) == 6
    for case, forest in zip(found, forests, strict=True):
        group = Group(forest.prompt, tuple(t.trunk for t in forest.trees))
        assert case.fci == pytest.approx(mean_fci(group), rel=1e-5)
        assert case.accuracy == pytest.approx(group.accuracy)
        rewards = {leaf.reward for t in forest.trees for leaf in (t.trunk, *t.branches)}
        assert case.signal == (len(rewards) == 2)


def test_one_prompt_of_an_iteration_has_a_mean_and_no_interval() -> None:
    cases = [
        Problem(i, f"{i}{n}", fci, 1.0, signal=False, dropped=False) for i, n, fci in ((1, 0, 2), (2, 0, 1), (2, 1, 5))
    ]
    cases.append(Problem(2, "dropped", 99.0, 1.0, signal=False, dropped=True))
    at, means, low, high = means_by_iteration(cases, False)
    assert (at, means) == ([1, 2], [2.0, 3.0])
    assert math.isnan(low[0])
    assert math.isnan(high[0])
    assert (low[1], high[1]) == (1.0, 5.0)
    assert means_by_iteration(cases, True) == ([], [], [], [])


def test_separation_by_hand() -> None:
    """Low FCI marks the easy prompts without signal; trunk accuracy is the same for all and says nothing."""
    cases = [Problem(1, str(i), 0.1 + 0.01 * i, 1.0, False, False) for i in range(10)]
    cases += [Problem(1, str(i), 0.3 + 0.01 * i, 1.0, True, False) for i in range(10)]
    cases += [Problem(1, "x", 0.0, 1.0, True, True), Problem(1, "y", 0.0, 0.5, True, False)]
    easy = separation(cases, "easy")
    assert easy is not None
    assert (easy.without, easy.others) == (10, 10)  # the dropped one and the hard one are left out
    assert easy.difference == pytest.approx(-0.2)
    assert easy.low < -0.2 < easy.high < 0
    assert (easy.auc_fci, easy.auc_accuracy) == (1.0, 0.5)
    assert separation(cases[:10], "all") is None
    one = separation(cases[9:20], "all")  # 0.19 against 0.3 to 0.39
    assert one is not None
    assert one.difference == pytest.approx(0.19 - 0.345)
    assert math.isnan(one.low)
    assert math.isnan(one.high)


def test_auc_against_all_pairs() -> None:
    rng = np.random.default_rng(0)
    scores, marks = rng.integers(0, 5, 40), rng.random(40) < 0.4
    pairs = [(a > b) + 0.5 * (a == b) for a in scores[marks] for b in scores[~marks]]
    assert auc(scores.tolist(), marks.tolist()) == pytest.approx(np.mean(pairs))


def test_the_commands(runs: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [str(path) for path in runs]
    assert command(["compare", *words, "--at", "tokens", "--baseline", "grpo"]) == 0
    said = capsys.readouterr().out
    assert "mean over seeds: tree 2, grpo 2" in said
    assert "baseline |" in said
    assert command(["compare", *words, "--target", "80"]) == 2  # a share, not percent
    assert "--target: Input should be less than or equal to 1, got 80" in capsys.readouterr().err
    nowhere = str(tmp_path / "no" / "t.tex")
    assert command(["compare", *words, "--output", nowhere]) == 2
    assert f"--output {nowhere}: the folder" in capsys.readouterr().err
    pytest.importorskip("matplotlib")
    assert command(["figures", *words, "--out", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    for name in ("fig4_problems", "fig5_pipeline", "fig6_branching", "fig7_sampling", "fig8_dynamics", "fig9_tests"):
        for form in ("svg", "pdf", "png"):
            assert (tmp_path / f"{name}.{form}").stat().st_size > 1000
        assert f"{name}: {name}.svg" in said
    assert "grpo, all prompts: mean FCI" in said
    text = (tmp_path / "fig8_dynamics.svg").read_text()
    assert text.count("<path") > 50


def test_iterations_are_whole_and_one_prompt_is_seen(runs: list[Path]) -> None:
    pytest.importorskip("matplotlib")
    (method,) = group_methods([read_run(path) for path in runs[2:]])
    figure = problem_figure(pyplot(), [method])
    assert figure is not None
    left = figure.axes[0]
    assert all(tick == int(tick) for tick in left.get_xticks())
    assert all(line.get_marker() == "o" for line in left.get_lines())
    few = panel_figure(pyplot(), [method], FIGURES["fig8_dynamics"])
    for place in (few.axes[0], few.axes[1]):
        place.set_xlim(1, 3)
        assert place.get_xticks().tolist() == [1, 2, 3]
    pyplot().close("all")


def test_a_figure_without_data_says_why(
    make_run: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    path = make_run(tmp_path / "run", iterations=4)
    rows = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    bare = [{"iteration": row["iteration"], "policy/entropy": 0.5} for row in rows]
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in bare))
    files = sorted((path / "forests").glob("*.parquet"))
    unscored = pq.read_table(files[0])
    nothing = [None if v is None else [float("nan")] * len(v) for v in unscored["fci"].to_pylist()]
    at = unscored.schema.get_field_index("fci")
    unscored = unscored.set_column(at, unscored.schema.field(at), pa.array(nothing, unscored.schema.field(at).type))
    taught = pq.read_table(files[1])
    mixed = [row["uid"] for row in taught.to_pylist() if row["reward"] == 0.0]
    taught = taught.filter(pc.is_in(taught["uid"], pa.array(sorted(set(mixed)))))
    for file in files:
        file.unlink()
    for table, why in (
        (taught, "it needs prompts with signal and without: every prompt had signal"),
        (unscored, "no response was scored: no part of these runs reads FCI"),
        (None, "no forests on record (run.save_rollouts_every was 0)"),
    ):
        files[0].unlink(missing_ok=True)
        if table is not None:
            pq.write_table(table, files[0])
        assert command(["figures", str(path), "--out", str(tmp_path / "figures")]) == 0
        said = capsys.readouterr().out
        assert f"fig4_problems: not drawn: {why}\n" in said
        assert f"run, FCI of problems: {why}\n" in said
        assert "fig5_pipeline: not drawn: no run logged seconds/generate\n" in said
        assert "fig6_branching: not drawn: no run logged any of branches/solve_all, branches/solve_none" in said
        assert "fig8_dynamics: fig8_dynamics.svg" in said
        assert "fig9_tests: not drawn: no run was evaluated (evaluation.every was 0)\n" in said


def test_one_iteration_is_one() -> None:
    text = tables(compare_runs([record("a", [0.2, 0.4]), record("b", [0.2, 0.6], rule="none")]))
    assert "at 1 iteration;" in text
    assert "1 iterations" not in text
