"""The queue of runs and the numbers made of them: by hand, and once for real."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from attnrl.analysis.disruption import Trial

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))

import evidence  # noqa: E402
import evidence_base as base  # noqa: E402
import evidence_figures as figures  # noqa: E402
import evidence_forests as forests  # noqa: E402
import evidence_p  # noqa: E402
import evidence_tables as tables  # noqa: E402
import node_values  # noqa: E402
import step_values  # noqa: E402
from evidence import Cell, Queue  # noqa: E402
from node_values import Place  # noqa: E402


def row(stage: str, preset: str, seed: int, rate: float, after: float) -> dict:
    return {"cell": {"stage": stage, "preset": preset, "seed": seed, "rate": rate}, "after": after}


class TestQueue:
    rows = [  # noqa: RUF012
        row("sweep", "a", 100, 0.1, 0.5),
        row("sweep", "a", 101, 0.1, 0.7),
        row("sweep", "a", 100, 0.2, 0.65),
        row("sweep", "b", 100, 0.2, 0.3),
        row("main", "b", 0, 0.3, 0.9),
    ]

    def test_the_rate_of_a_preset_is_the_best_of_its_own_sweep(self):
        assert evidence.best_rate(self.rows, "a") == 0.2  # means 0.6 and 0.65
        assert evidence.best_rate(self.rows, "b") == 0.2  # stage main does not count
        with pytest.raises(SystemExit, match="c: no sweep"):
            evidence.best_rate(self.rows, "c")

    def test_cells_come_seed_by_seed_and_a_stage_may_fix_its_rates(self):
        stages = {
            "sweep": {"presets": ["a", "b"], "seeds": [100]},
            "main": {"presets": ["a", "b"], "seeds": [0, 1]},
            "fixed": {"presets": ["c"], "seeds": [0], "rates": [0.5], "overrides": {"algo.points": 3}},
        }
        queue = Queue("q", (0.1, 0.2), stages)
        swept = [Cell("sweep", p, 100, r) for p in "ab" for r in (0.1, 0.2)]
        assert queue.cells("sweep", []) == swept
        assert queue.cells("main", self.rows) == [Cell("main", p, seed, 0.2) for seed in (0, 1) for p in "ab"]
        assert queue.cells("main", self.rows, only=["b"]) == [Cell("main", "b", seed, 0.2) for seed in (0, 1)]
        stages["rules"] = {"presets": ["c"], "seeds": [0], "rate_of": "a"}
        assert queue.cells("rules", self.rows) == [Cell("rules", "c", 0, 0.2)]
        (fixed,) = queue.cells("fixed", [])
        assert queue.overrides(fixed) == {"algo.points": 3, "update.lr": 0.5, "run.seed": 0}

    def test_one_cell_is_that_of_the_first_stage_that_has_its_preset(self):
        stages = {"sweep": {"seeds": [9], "presets": ["a"]}, "rules": {"presets": ["b"], "rate_of": "a"}}
        stages |= {"main": {"presets": ["a"]}, "stable": {"presets": ["a", "c"], "rates": [0.3]}}
        queue = Queue("q", (0.1, 0.2), stages)
        rows = [row("sweep", "a", 9, 0.1, 0.5), row("sweep", "a", 9, 0.2, 0.6)]
        assert queue.cell("a", 4, rows) == Cell("main", "a", 4, 0.2)
        assert queue.cell("a", 4, rows, "stable") == Cell("stable", "a", 4, 0.3)
        assert queue.cell("b", 4, rows) == Cell("rules", "b", 4, 0.2)  # at the rate of a
        assert queue.cell("c", 4, rows) == Cell("stable", "c", 4, 0.3)
        for preset, stage in (("d", None), ("b", "main")):
            with pytest.raises(SystemExit, match=f"no cell of {preset}"):
                queue.cell(preset, 4, rows, stage)

    def test_a_stage_that_varies_keys_has_a_cell_for_each_value_of_one_key(self):
        stage = {"presets": ["a"], "seeds": [0, 1], "rates": [0.5], "overrides": {"algo.points": 3}}
        queue = Queue("q", (), {"knobs": {**stage, "vary": {"algo.points": [1, 4], "update.lr": [0.1]}}})
        cells = queue.cells("knobs", [])
        assert [(c.seed, c.knob) for c in cells] == [
            (seed, knob) for seed in (0, 1) for knob in ("algo.points=1", "algo.points=4", "update.lr=0.1")
        ]
        assert len({c.name for c in cells}) == 6
        assert queue.overrides(cells[1]) == {"algo.points": 4, "update.lr": 0.5, "run.seed": 0}
        assert queue.overrides(cells[2]) == {"algo.points": 3, "update.lr": 0.1, "run.seed": 0}
        assert Cell(**row("main", "a", 1, 0.1, 0.5)["cell"]).knob == ""  # rows from before there were knobs

    def test_the_base_of_the_rows_on_record_is_taken_where_it_is_kept(self, tmp_path, monkeypatch):
        kept = evidence.BASES / "tail"
        monkeypatch.setattr(evidence, "BASES", ROOT / evidence.BASES)
        monkeypatch.chdir(tmp_path)
        evidence.warm_up(evidence.read_queue(ROOT / "benchmarks/evidence_tail.toml"))
        assert (tmp_path / "runs/tail/model.safetensors").read_bytes() == (
            ROOT / kept / "model.safetensors"
        ).read_bytes()

    def test_a_row_on_record_stays_and_new_ones_join_it(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        Path("docs/results").mkdir(parents=True)
        Path("docs/results/q.jsonl").write_text(json.dumps(row("main", "a", 1, 0.1, 0.5)) + "\n")
        for name, found in {"x": row("main", "a", 1, 0.1, 0.9), "y": row("main", "a", 0, 0.1, 0.4)}.items():
            Path(f"runs/{name}").mkdir(parents=True)
            Path(f"runs/{name}/result.json").write_text(json.dumps(found))
        assert evidence.collect("q", Path("runs")) == 2
        assert [(r["cell"]["seed"], r["after"]) for r in evidence.read_rows("q")] == [(0, 0.4), (1, 0.5)]

    def test_a_cell_is_held_by_one_worker_at_a_time(self, tmp_path):
        with evidence.held(tmp_path / "a.lock") as first, evidence.held(tmp_path / "a.lock") as second:
            assert (first, second) == (True, False)
        with evidence.held(tmp_path / "a.lock") as again:
            assert again


class TestForests:
    tree = forests.RecordedTree(
        uid="q",
        starts=(0, 4, 8, 12, 16),
        tokens=20,
        fci=(9.0, 4.0, 5.0, 0.0, 0.0),
        reward=1.0,
        decisive=(2,),
        points=(4, 4, 10, 10, 13, 13),
        rewards=(1.0, 0.0, 1.0, 1.0, 0.0, 0.0),
    )

    def test_places_are_steps_and_a_point_splits_where_outcomes_differ(self):
        assert [forests.place(self.tree, p) for p in (4, 8, 10, 11, 12)] == ["before", "at", "at", "at", "after"]
        assert [forests.splits(self.tree, p) for p in (4, 10, 13)] == [True, False, True]
        found = forests.summary([self.tree])
        assert {
            k: found[k] for k in ("first_steps", "before", "at", "after", "split", "first", "last")
        } == pytest.approx(
            {"first_steps": 0, "before": 1 / 3, "at": 1 / 3, "after": 1 / 3, "split": 2 / 3, "first": 0.2, "last": 0.65}
        )
        assert found["decisive"] == 0.4

    def test_without_a_decisive_step_nothing_is_said_of_its_place(self):
        trees = [replace(self.tree, decisive=(), fci=(9.0, 2.0, 3.0, 1.0, 0.0)), replace(self.tree, fci=(4.0,))]
        found = forests.summary([replace(t, decisive=()) for t in trees])
        assert not {"before", "at", "after", "decisive"} & set(found)
        assert found["position_correlation"] == pytest.approx(-0.5)  # of 2, 3, 1: the last step has no FCI
        assert all(np.isfinite(value) for value in found.values())
        by_chance = forests.summary([*(replace(t, decisive=()) for t in trees), self.tree])
        assert not {"before", "at", "after", "decisive"} & set(by_chance)

    def test_ranks_correlation_and_auc_by_hand(self):
        assert forests.ranks(np.array([5.0, 1.0, 5.0, 9.0])).tolist() == [1.5, 0, 1.5, 3]
        assert forests.rank_correlation([1, 2, 3], [30, 20, 10]) == pytest.approx(-1)
        assert forests.rank_correlation([1, 1, 1], [3, 2, 1]) == 0
        assert forests.auc(np.array([3.0, 1.0]), np.array([2.0])) == 0.5
        assert forests.auc(np.array([3.0, 2.0]), np.array([2.0, 1.0])) == 0.875

    def test_a_correlation_that_is_position_alone_vanishes_with_position_held(self):
        place = np.arange(8.0)
        assert forests.rank_correlation(place, 2 * place) == pytest.approx(1)
        assert step_values.partial(place, 2 * place, place) == 0
        bump = place + np.array([0, 0, 9, 0, 0, 0, 0, 0])  # ranks 0 1 7 2 3 4 5 6
        assert step_values.partial(bump, bump, place) == pytest.approx(1)


class TestNodeValues:
    def test_over_all_outcomes_bias_and_squared_error_are_the_true_ones(self):
        """Places of value 0.3 and 0.6, three rollouts at each, a trunk that is right with 0.6: every outcome by its
        chance, against what two branches a point would give, by the same chances.
        """
        estimated, exact = np.zeros((2, 2)), np.zeros((2, 2))  # error and squared error of the two nodes
        for trunk, *drawn in product((0.0, 1.0), repeat=7):
            found = node_values.nodes("q", trunk, Place(4, drawn[:3]), Place(9, drawn[3:]))
            weight = chance([trunk, *drawn], [0.6] + [0.3] * 3 + [0.6] * 3)
            estimated += weight * np.array([[n.error, n.squared_error] for n in found])
        for trunk, a, b, c, d in product((0.0, 1.0), repeat=5):
            errors = ((trunk + a + b + c + d) / 5 - 0.3, (trunk + c + d) / 3 - 0.6)
            exact += chance([trunk, a, b, c, d], [0.6, 0.3, 0.3, 0.6, 0.6]) * np.array([[e, e * e] for e in errors])
        np.testing.assert_allclose(exact[:, 0], [0.18, 0.0], atol=1e-12)  # (0.6 + 0.6 + 1.2)/5 - 0.3, and none
        np.testing.assert_allclose(estimated, exact, atol=1e-12)

    def test_quality_by_hand(self):
        judged = [
            node_values.Node("a", True, 5, 0.75, 0.2, 0.4, 0.3),
            node_values.Node("b", True, 5, 0.25, 0.2, 0.2, 0.1),
        ]
        found = node_values.quality(judged)
        assert found["bias"][0] == pytest.approx(0.3)
        assert found["variance"] == pytest.approx(0.2 - 0.09)
        assert found["worth of leaves"] == pytest.approx(0.2 / 0.11)
        assert found["true value"] == 0.5

    def test_points_that_are_one_make_one_node_of_five_leaves(self):
        error = squared = 0.0
        for trunk, *drawn in product((0.0, 1.0), repeat=5):
            (found,) = node_values.nodes("q", trunk, Place(4, drawn[:2]), Place(4, drawn[2:]))
            weight = chance([trunk, *drawn], [0.3] * 5)
            error, squared = error + weight * found.error, squared + weight * found.squared_error
        assert found.leaves == 5
        assert (error, squared) == pytest.approx((0.0, 0.3 * 0.7 / 5))  # five independent leaves

    def test_branches_are_read_in_the_order_of_the_rules(self, tmp_path):
        """Rule number i: at its first point i of eight branches are right, at its second one more."""
        rules, width = len(node_values.COMPARED), 8
        rows = [{"uid": "q", "tree": 0, "kind": "trunk", "point": 0, "reward": 1.0}]
        rows += [
            {"uid": "q", "tree": 0, "kind": "branch", "point": 5 + second, "reward": float(k < i + second)}
            for i in range(rules)
            for second in (0, 1)
            for k in range(width)
        ]
        rows.append({"uid": "lone", "tree": 0, "kind": "trunk", "point": 0, "reward": 1.0})  # it was not branched
        (tmp_path / "forests").mkdir()
        pq.write_table(pa.Table.from_pylist(rows), tmp_path / "forests/000001.parquet")
        found = node_values.read_nodes([tmp_path])
        assert [[n.truth for n in found[name]] for name in node_values.COMPARED] == [
            [i / 8, (i + 1) / 8] for i in range(rules)
        ]
        first, second = found["oracle"]  # 4 and 5 of 8
        assert (first.error, second.error) == pytest.approx(((1 + 1 + 1.25) / 5 - 0.5, (1 + 1.25) / 3 - 0.625))


def chance(outcome: Sequence[float], right: Sequence[float]) -> float:
    return float(np.prod([p if r else 1 - p for r, p in zip(outcome, right, strict=True)]))


class TestBaseModels:
    def test_hidden_steps_by_kind_and_place(self):
        trials = [Trial(f"q{i}", i, "fci_top", 1, 0.1, True, True, i > 2) for i in range(4)]  # three of four lost
        trials += [Trial(f"q{i}", i, "matched", 2, 0.3, True, True, i > 0) for i in range(4)]  # one of four lost
        head, top, matched = base.type_cells(trials)
        assert (top[:4], top[4][:4], top[5][:5], top[6]) == (
            ["FCI top 20 %", "4", "0.10", "100.0"],
            "25.0",
            "+75.0",
            "",
        )
        assert matched[6].startswith("+50.0 (")
        assert len(head) == len(top) == len(matched)
        places = base.place_cells(trials)
        assert [row[1].split(" (")[0] for row in places[1:]] == ["25.0", "75.0", "-", "-", "-"]
        assert places[1][2] == places[1][1]  # in the first fifth all are of the top
        assert places[1][2].endswith(", 4")

    def test_problems_with_and_without_signal(self):
        cases = [base.Case(1, "a", 1.0, 0.0, False, False, 9.0), base.Case(1, "b", 3.0, 0.5, True, False, 7.0)]
        _, both, easy = base.problem_cells({"s": cases})
        assert both[:6] == ["S", "all", "1", "1", "1.0000", "3.0000"]
        sure, never = "1.00 (1.00 to 1.00)", "0.00 (0.00 to 0.00)"
        assert both[7:] == [sure, "-", never, sure]  # "a" has more steps: no two are alike in them
        assert easy == ["S", "easy", "0", "0", *["-"] * 7]

    def test_pairs_alike_in_steps(self):
        """Low FCI tells the prompt without signal in three of four pairs, and in both of those alike in steps."""
        found = ((5.0, False, 9.0), (6.0, True, 9.2), (1.0, False, 5.0), (2.0, True, 5.0))
        cases = [base.Case(1, "q", fci, 0.5, signal, False, steps) for fci, signal, steps in found]
        assert base.ranked(cases, lambda c: -c.fci).startswith("0.75")
        assert base.ranked(cases, lambda c: -c.fci, by=lambda c: round(c.steps)).startswith("1.00")

    def test_what_is_kept_comes_back(self, tmp_path):
        trials = [Trial("q", 3, "matched", 2, 0.25, True, False, True)]
        base.keep(trials, tmp_path / "s_trials.parquet")
        assert base.read_trials(tmp_path / "s_trials.parquet") == trials
        assert set(base.base_cells(tmp_path)) == {"s_trials types", "s_trials places"}


class TestTables:
    def test_a_column_for_each_benchmark(self):
        def run(stage: str, preset: str, seed: int, **ends: list[float]) -> dict:
            after = sum(end for _, end in ends.values()) / len(ends)
            return row(stage, preset, seed, 0.1, after) | {"benchmarks": ends, "branching": {}}

        rows = [
            run("main", "p_grpo", 0, mawps=[0.4, 0.5], svamp=[0.2, 0.3]),
            run("main", "p_grpo", 1, mawps=[0.5, 0.5], svamp=[0.3, 0.3]),
            run("rules", "p_random", 0, mawps=[0.6, 0.75], svamp=[0.4, 0.5]),
            run("sweep", "p_grpo", 100, mawps=[0.0, 0.0], svamp=[0.0, 0.0]),
        ]
        assert tables.benchmark_table(rows).splitlines() == [
            "| method | seeds | mawps | svamp | mean |",
            "|---|---|---|---|---|",
            "| before |  | 50.0 | 30.0 | 40.0 |",
            "| GRPO | 2 | 50.0 ± 0.0 | 30.0 ± 0.0 | 40.0 ± 0.0 |",
            "| random steps | 1 | 75.0 | 50.0 | 62.5 |",
        ]
        assert tables.benchmark_table([row("main", "s_grpo", 0, 0.1, 0.5)]).count("\n") == 1

    def test_a_total_above_the_last_by_a_digit_is_the_end(self):
        series = {"tokens": [100.0, 200.0, 300.0], "accuracy": [0.1, 0.2, 0.9]}
        ends = [tables.at({"series": series}, "tokens", value) for value in (300.0, 300.0 * (1 + 1e-15), 400.0)]
        assert ends == pytest.approx([0.4] * 3)

    def test_columns_of_a_decisive_step_where_there_is_one(self):
        here = {"trees": 3.0, "first_steps": 1.0, "split": 0.5, "first": 0.2, "last": 0.4}
        rows = [row("main", "p_atb", 0, 0.1, 0.5) | {"branching": here}]
        assert "decisive" not in tables.place_table(rows)
        assert "decisive" in tables.place_table([rows[0] | {"branching": here | {"before": 1.0, "at": 0.0}}])

    def test_cost_to_reach_the_end_of_another_run(self):
        def run(preset: str, seed: int, accuracy: list[float]) -> dict:
            steps = list(range(1, len(accuracy) + 1))
            series = {"accuracy": accuracy, "tokens": [1e5 * s for s in steps], "updates": [2] * len(steps)}
            return row("main", preset, seed, 0.1, 0.5) | {"series": series | {"seconds": [3.0] * len(steps)}}

        rows = [run("s_treerl", 0, [0.1, 0.3, 0.5]), run("s_oracle", 0, [0.4, 0.4, 0.2]), run("s_grpo", 0, [0.1] * 3)]
        found = tables.cost_table(rows, window=2).splitlines()  # TreeRL ends at 0.4; the oracle is there after two
        assert found[2].endswith("| 0 of 1 | - | - | - | - |")
        assert found[4].endswith("| 1 of 1 | 2 | 4 | 0.20 | 6 |")

    def test_equal_wall_time_goes_by_the_pace_of_runs_that_were_alone(self):
        def run(stage: str, preset: str, after: float, accuracy: list[float], tokens: float, seconds: float) -> dict:
            count = len(accuracy)
            series = {
                "accuracy": accuracy,
                "tokens": [tokens * (i + 1) for i in range(count)],
                "seconds": [60.0] + [seconds] * (count - 1),  # the first is slow whoever runs
                "valid_tokens": [tokens / 2] * count,
            }
            totals = {"iterations": count, "tokens": tokens * count, "series": series}
            return row(stage, preset, 0, 0.1, after) | totals

        rows = [
            run("main", "s_attnrl", 0.7, [0.1 * i for i in range(10)], 100.0, 9.0),  # seconds of a crowd do not count
            run("main", "s_grpo", 0.4, [0.0] * 10, 100.0, 9.0),
            run("alone", "s_attnrl", 0.5, [0.2] * 3, 100.0, 4.0),
            run("alone", "s_grpo", 0.5, [0.2] * 3, 100.0, 2.0),
        ]
        assert tables.pace(rows) == {"grpo": 0.02, "attnrl": 0.04}
        # GRPO's 1,000 tokens take 20 s, in which AttnRL makes 500 tokens: its first five iterations, mean 0.2
        (pair,) = [line for line in tables.pair_table(rows).splitlines() if line.startswith("| AttnRL - GRPO")]
        assert pair == "| AttnRL - GRPO | 1 | +30.0 | +70.0 | +20.0 |"
        assert tables.pace_table(rows).splitlines()[3].startswith("| AttnRL | 1 | 4.00 | 25 | 12 |")
        rows[2]["series"]["valid_tokens"] = [9e9, 20e3, 28e3]  # 5 and 7 thousand a second
        assert tables.pace_table(rows).splitlines()[3].endswith("| 6 ± 13 |")
        assert "wall time" not in tables.pair_table(rows[:2])

    def test_at_one_rate_stand_the_runs_of_both_stages_that_had_it(self):
        rows = [
            row("main", "s_grpo", 0, 2e-4, 0.5),
            row("stable", "s_grpo", 0, 1e-4, 0.6),
            row("main", "s_oracle", 0, 1e-4, 0.7),
            row("sweep", "s_oracle", 100, 1e-4, 0.1),
            row("alone", "s_grpo", 0, 2e-4, 0.2),
        ]
        found = tables.at_one_rate(rows)
        ends = {(r["cell"]["stage"], r["cell"]["preset"]): r["after"] for r in found}
        assert ends == {("main", "s_grpo"): 0.6, ("main", "s_oracle"): 0.7, ("alone", "s_grpo"): 0.2}
        assert tables.at_one_rate([r for r in rows if r["cell"]["stage"] != "stable"]) == []
        assert rows[1]["cell"]["stage"] == "stable"

    def test_a_knob_is_compared_with_the_same_seed_as_it_is(self):
        def run(stage: str, seed: int, after: float, **knob: str) -> dict:
            found = row(stage, "s_attnrl", seed, 0.1, after) | {"iterations": 7}
            return found | {"cell": found["cell"] | knob}

        changed = [run("knobs", seed, after, knob="algo.points=4") for seed, after in ((0, 0.55), (1, 0.65), (2, 0.9))]
        rows = [run("main", 0, 0.5), run("main", 1, 0.62), *changed]
        line = tables.knob_table(rows).splitlines()[2]
        assert line.startswith("| AttnRL | `algo.points=4` | 3 | 70.0 ")
        assert "| +4.0 (" in line  # 5 and 3 points; seed 2 has nothing beside it
        assert list(tables.by_preset(rows, "main")["attnrl"]) == [0, 1]

    def test_interval_and_paired_difference_by_hand(self):
        mean, half = tables.spread([1.0, 2.0, 3.0])
        assert (mean, half) == pytest.approx((2.0, 4.303 / 3**0.5))
        assert tables.signed([0.01, 0.02, 0.03]) == "+2.0 (-0.5 to +4.5)"
        assert tables.shown([0.5]) == "50.0"

    def test_gains_are_over_the_seeds_that_both_have(self):
        ends = {"s_grpo": (0.5, 0.6, 0.4), "s_oracle": (0.51, 0.62), "s_atb": (0.4,)}
        rows = [row("main", preset, seed, 0.1, after) for preset, own in ends.items() for seed, after in enumerate(own)]
        found = figures.differences([*rows, row("sweep", "s_oracle", 2, 0.1, 0.9)], "grpo")
        assert found["oracle"] == pytest.approx((1.5, 12.71 * 0.5, 2))  # 1 and 2 points
        assert found["atb"] == pytest.approx((-10.0, np.nan, 1), nan_ok=True)
        assert list(found) == ["atb", "oracle"]

    def test_two_queues_are_compared_seed_by_seed(self):
        ends = {"s_attnrl": (0.5, 0.6, 0.9), "s_treerl": (0.4,)}
        others = [
            row("main", preset, seed, 0.1, after) for preset, own in ends.items() for seed, after in enumerate(own)
        ]
        rows = [row("main", "s_attnrl_entropy", seed, 0.1, after) for seed, after in ((0, 0.51), (1, 0.63))]
        lines = tables.against_table(rows, others, ("attnrl", "treerl")).splitlines()[2:]
        name = "AttnRL at the steps of highest entropy"
        assert lines[0].startswith(f"| {name} - AttnRL of the other queue | 2 | +2.0 (")  # 1 and 3 points
        assert lines[1].endswith("| 1 | +11.0 |")

    def test_iterations_and_what_is_left_without_them(self):
        def run(preset: str, seed: int, iterations: int, after: float, end: float) -> dict:
            series = {"accuracy": [end] * iterations}
            return row("main", preset, seed, 0.1, after) | {"iterations": iterations, "series": series}

        # 8, 16 and 32 iterations, 10 points a doubling; the middle one 3 points above the line of the other two
        made = {"s_grpo": (8, 0.5, 0.4), "s_treerl": (16, 0.63, 0.4), "s_oracle": (32, 0.7, 0.5)}
        rows = [
            run(preset, seed, n, after, end + 0.001 * seed * (preset == "s_oracle"))
            for preset, (n, after, end) in made.items()
            for seed in (0, 1)
        ]
        line = tables.iteration_table({"T": rows}).splitlines()[2]
        middle = "+2.0 (TreeRL: tokens of highest surprisal)"  # least squares: 2 above, the others 1 below
        assert line == f"| T | 3 | 10.0 | {middle} | 3 | 3 | 2 | 0 |"  # at equal iterations GRPO and TreeRL end alike

    def test_branches_with_signal_are_compared_over_the_iterations_that_both_have(self):
        shares = {"s_treerl": ([0.5, 0.7, 0.1], [0.8]), "s_atb": ([0.7, 0.9], [0.9, 0.2])}
        rows = [
            row("main", preset, seed, 0.1, 0.5) | {"series": {"branches_valid": valid}}
            for preset, own in shares.items()
            for seed, valid in enumerate(own)
        ]
        line = tables.branch_table({"S": rows}).splitlines()[2]
        assert line.startswith("| S | 2 | 0.700 | 0.850 | +15.0 (")  # 0.6, 0.8 and 0.8, 0.9: 20 and 10 points

    def test_the_page_on_record_is_what_the_rows_say(self, tmp_path, monkeypatch):
        page = (ROOT / "docs/results.md").read_text()
        assert page.count("<!-- table ") == page.count("<!-- end -->") > 5
        (tmp_path / "docs").mkdir()
        (tmp_path / "docs/results.md").write_text(page)
        monkeypatch.chdir(tmp_path)
        for drawn in ("curves", "gains", "base_figures"):  # they need matplotlib
            monkeypatch.setattr(tables, drawn, lambda found, path: None)
        tables.write_all(ROOT / "docs/results")
        assert (tmp_path / "docs/results.md").read_text() == page


TENS = ("twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety", "hundred", "thousand")
ONES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve")
TEENS = ("thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen")


def tokens(text: str) -> list[str]:
    """The words of a problem, names among them, without numbers; shares no code with what made the split."""
    words = "".join(char if char.isalpha() else " " for char in text.lower()).split()
    return [word for word in words if word not in (*ONES, *TEENS, *TENS)]


class TestGradeSchool:
    def test_formulas_become_steps_and_wrong_ones_do_not(self):
        assert evidence_p.steps_of("42+26+31=99") == ["42 + 26 = 68", "68 + 31 = 99"]
        assert evidence_p.steps_of("(31+32)/9=7") == ["31 + 32 = 63", "63 / 9 = 7"]
        assert evidence_p.steps_of("3/4*2=1.5") == ["3 / 4 = 0.75", "0.75 * 2 = 1.5"]
        for formula in ("10/3=3", "1/3*3=1", "17/10=1 r7", "GCD(14,7)=7", "9=9", "1/0=1", "((2=2"):
            assert evidence_p.steps_of(formula) is None, formula

    def test_no_held_out_problem_is_near_one_learned_from(self, real_data):
        made = evidence_p.make_data(real_data)
        assert {name: len(rows) for name, rows in made.items()} == {
            "warmup": 6459,
            "train": 2466,
            "dev": 658,
            "mawps": 484,
            "svamp": 1000,
            "gsm8k": 1319,
        }
        texts = {name: [row.get("problem") or row["prompt"] for row in rows] for name, rows in made.items()}
        for name in ("warmup", "train", "dev"):
            assert len({" ".join(re.findall(r"\w+", text.lower())) for text in texts[name]}) == len(texts[name])
        learned = [tokens(text) for name in ("warmup", "train", "dev") for text in texts[name]]
        held_out = [tokens(text) for name in ("mawps", "svamp", "gsm8k") for text in texts[name]]
        assert not {tuple(sorted(words)) for words in learned} & {tuple(sorted(words)) for words in held_out}
        common = {word for words in learned for word in words} & {word for words in held_out for word in words}
        columns = {word: i for i, word in enumerate(sorted(common))}

        def incidence(problems: list[list[str]]) -> np.ndarray:
            found = np.zeros((len(problems), len(columns)), np.float32)
            for line, words in zip(found, problems, strict=True):
                line[[columns[word] for word in words if word in columns]] = 1
            return found

        both = incidence(held_out) @ incidence(learned).T
        sizes = [np.array([len(set(words)) for words in problems]) for problems in (held_out, learned)]
        either = sizes[0][:, None] + sizes[1] - both
        assert 0.5 < (both / either).max() < 0.7  # words in both by words in either: 0.6 is where they are left out
        assert {r["response"].count("\\boxed{") for r in made["warmup"]} == {1}
        assert min(r["response"].count("\n\n") for r in made["warmup"]) == 2  # a step between the first and the answer


QUEUE = """
name = "q"
rates = [1e-5, 2e-5]
[warmup]
output = "base"
tokens = 1500
evaluations = 1
evaluation_tasks = 2
workers = 0
"task.operations" = [2, 2]
"task.modulus" = 5
"shape.layers" = 1
"shape.width" = 32
"shape.heads" = 2
"shape.kv-heads" = 1
[stages.sweep]
seeds = [3]
presets = ["demo_grpo"]
[stages.sweep.overrides]
"model.path" = "base"
"run.iterations" = 1
"algo.prompts" = 1
"algo.group" = 4
"evaluation.tasks" = 2
"evaluation.samples" = 1
"data.train_tasks" = 8
"data.tasks.operations" = [2, 2]
"data.tasks.modulus" = 5
[stages.main]
seeds = [0]
presets = ["demo_grpo", "demo"]
rates = [1e-5]
[stages.main.overrides]
"model.path" = "nowhere"
"""


def test_a_worker_whose_queue_is_gone_takes_no_cell(tmp_path, monkeypatch):
    class Gone:
        is_alive = staticmethod(lambda: False)

    monkeypatch.setattr(evidence.multiprocessing, "parent_process", Gone)
    monkeypatch.setattr(evidence.os, "dup2", lambda *_: None)
    monkeypatch.setattr(evidence, "finish", lambda *_: pytest.fail("took a cell"))
    monkeypatch.setattr(evidence.tasks, "make_tasks", evidence.tasks.make_tasks)
    evidence.work(0, [evidence.Cell("main", "demo", 0, 1e-4)], None, tmp_path, float("inf"))
    assert not list(tmp_path.glob("*.lock"))


@pytest.mark.slow
def test_a_queue_makes_its_model_runs_its_cells_once_and_names_those_that_fail(tmp_path):
    (tmp_path / "q.toml").write_text(QUEUE)

    def command(*stages: str) -> subprocess.CompletedProcess[str]:
        words = [str(ROOT / "benchmarks/evidence.py"), "run", "q.toml", "--workers", "2", "--stage", *stages]
        return subprocess.run([sys.executable, *words], cwd=tmp_path, capture_output=True, text=True, check=False)

    first = command("sweep")
    assert first.returncode == 0, first.stderr
    assert "warm-up of base" in first.stdout
    assert "sweep: 2 cells to run" in first.stdout
    found = [json.loads(line) for line in (tmp_path / "docs/results/q.jsonl").read_text().splitlines()]
    assert [f["cell"] for f in found] == [
        {"stage": "sweep", "preset": "demo_grpo", "seed": 3, "rate": rate} for rate in (1e-5, 2e-5)
    ]
    assert found[0]["iterations"] == 1
    assert found[0]["tokens"] == found[0]["series"]["tokens"][0] > 4
    again = command("sweep", "main")  # the first is done, the second has no model
    assert "warm-up" not in again.stdout
    assert "sweep: 0 cells to run" in again.stdout
    assert again.returncode == 1
    named = [line for line in again.stdout.splitlines() if "failed" in line]
    assert [line.split(" failed")[0] for line in named] == ["main-demo-1e-05-0", "main-demo_grpo-1e-05-0"]


@pytest.mark.parametrize("file", sorted((ROOT / "benchmarks").glob("evidence_*.toml")), ids=lambda file: file.stem)
def test_every_cell_of_every_queue_is_a_config_whose_parts_fit(file):
    from attnrl.cli.flags import read_flags
    from attnrl.cli.warmup import WarmupFlags
    from attnrl.config import load_config
    from attnrl.launch.parts import check_parts

    queue = evidence.read_queue(file)
    cells = []
    for stage, wanted in queue.stages.items():
        cells += queue.cells(stage, _swept([*wanted["presets"], wanted.get("rate_of", "")]))
    assert len(cells) == len(set(cells)) > 10
    for cell in {(c.stage, c.preset): c for c in cells}.values():
        config = load_config(cell.preset, queue.overrides(cell))
        assert config.update.lr == cell.rate
        assert config.model.path == queue.warmups[-1]["output"]
        check_parts(config)
    for before, asked in zip([{}, *queue.warmups], queue.warmups, strict=False):
        flags, _ = read_flags(WarmupFlags, evidence.words(asked), "", flat="training")
        assert flags.training.tokens == asked["tokens"]
        assert flags.task.forks == tuple(asked.get("task.forks", ()))
        assert not before or asked["model"] == before["output"]


def _swept(presets: list[str]) -> list[dict]:
    return [row("sweep", preset, 100, 1e-4, 0.5) for preset in presets]
