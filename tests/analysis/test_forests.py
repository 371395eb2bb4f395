from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attnrl.algo.advantages import ESTIMATORS, leaf_rewards
from attnrl.algo.reasons import Reasons
from attnrl.analysis.forests import grouped, interest, leaf_advantages, read_rows, rebuild, thinks
from attnrl.analysis.index import index_file, pick_entries, read_entry
from attnrl.analysis.pages import branch_steps, clip, clip_page, fair_limit, forest_page, text_cutter
from attnrl.analysis.positions import fci_by_position
from attnrl.analysis.records import RunRecord, read_run
from attnrl.errors import DataError
from attnrl.run import forest_table
from attnrl.types import Branch, Forest, Prompt, Rollout, Sample, Scores, Step, Tree, Trunk, Verdict, as_floats, as_ids


def rollout(tokens: int, first: int = 1) -> Rollout:
    return Rollout(as_ids(range(first, first + tokens)), as_floats([-0.5] * tokens), "stop", 3)


def trunk(tokens: int, reward: float) -> Trunk:
    steps = (Step(0, 2), Step(2, 4), Step(4, tokens))
    return Trunk(
        rollout(tokens),
        Verdict(reward, "number", "7"),
        steps,
        Scores(as_floats([-0.5] * tokens), as_floats([0.1] * tokens), as_floats([0.3, 0.2, 0.0])),
    )


def branch(point: int, tokens: int, reward: float) -> Branch:
    return Branch(point, rollout(tokens, 50), Verdict(reward, "number"))


def forest() -> Forest:
    """Two trees. Leaves of the first: trunk right, wrong at 2, right and wrong at 4; the second: a wrong trunk."""
    grown = (branch(2, 5, 0.0), branch(4, 3, 1.0), branch(4, 2, 0.0))
    prompt = Prompt("q", as_ids([9]), ("7", "seven"), "how many?")
    return Forest(prompt, (Tree(trunk(6, 1.0), grown), Tree(trunk(5, 0.0))))


def rows_of(planted: Forest) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = forest_table(5, [planted], lambda ids: " ".join(map(str, ids.tolist()))).to_pylist()
    return rows


def record(**algo: object) -> RunRecord:
    return RunRecord("r", Path(), {"algo": algo}, {}, [{"iteration": 1.0}], ())


def test_values_and_advantages_by_hand() -> None:
    page = forest_page(rows_of(forest()), record(estimator="tree"))
    assert (page["root"], page["leaves"], page["iteration"], page["answers"]) == (0.4, 5, 5, ["7", "seven"])
    first, second = page["trees"]
    # V: 2 of 4 leaves right; below token 2: 2 of 3; the trunk's own end: 1 of 1 (Eq. 2)
    assert [(n["start"], n["stop"], n["leaves"]) for n in first["nodes"]] == [(0, 2, 4), (2, 4, 3), (4, 6, 1)]
    assert [n["value"] for n in first["nodes"]] == [0.5, 0.66667, 1]
    # A: (2V - V(root) - V(parent)) / sqrt(leaves) (Eq. 3)
    assert [n["advantage"] for n in first["nodes"]] == pytest.approx(
        [(1 - 0.4 - 0.4) / 2, (4 / 3 - 0.4 - 0.5) / 3**0.5, 2 - 0.4 - 2 / 3], abs=1e-4
    )
    assert [b["advantage"] for b in first["branches"]] == pytest.approx(
        [0 - 0.4 - 0.5, 2 - 0.4 - 2 / 3, 0 - 0.4 - 2 / 3], abs=1e-4
    )
    assert [n["advantage"] for n in second["nodes"]] == pytest.approx([-0.8])
    assert [step[:4] for step in first["steps"]] == [[0, 0.3, "1 2", 0.1], [2, 0.2, "3 4", 0.1], [4, 0, "5 6", 0.1]]
    assert (first["answer"], first["tokens"], first["branches"][0]["steps"]) == ("7", 6, ["50 51 52 53 54"])
    # before point 4: trunk, right and wrong branch, 2/3; after it the trunk alone, redrawn 1/2
    change = first["nodes"][2]["change"]
    assert (change["before"], change["after"], change["redrawn"]) == (0.66667, 1, 0.5)
    assert change["delta"] == pytest.approx(1 / 3, abs=1e-4)
    assert change["low"] < change["delta"] < change["high"]
    assert "change" not in first["nodes"][0]


def test_reasons_on_record_and_derived() -> None:
    derived = forest_page(rows_of(forest()), record(estimator="tree", rule="fci", delta=1))
    assert (derived["reason"], derived["recorded"]) == ("taught", False)
    assert [tree["reason"] for tree in derived["trees"]] == ["branched", "budget: 1 of 2 branched"]
    assert [step[4] for step in derived["trees"][0]["steps"]] == ["first", "point", "point"]
    assert [step[4] for step in derived["trees"][1]["steps"]] == [
        "first",
        "not_branched",
        "near_end: 0 of 1 steps follow",
    ]
    reasons = Reasons("filtered: mean FCI 0.1 under 0.2", ("filtered", "filtered"))
    rows = forest_table(5, [forest()], lambda ids: "x", [reasons]).to_pylist()
    page = forest_page(rows, record(estimator="tree"))
    assert (page["reason"], page["recorded"]) == ("filtered: mean FCI 0.1 under 0.2", True)
    assert [tree["reason"] for tree in page["trees"]] == ["filtered", "filtered"]


@pytest.mark.parametrize(
    ("declared", "last"),
    [
        (None, "not_branched"),  # an old run, a rule of the user's own: nothing is known of it
        ({"reads": [], "by_quantile": False}, "not_branched"),
        ({"reads": ["fci"], "by_quantile": True}, "near_end: 0 of 1 steps follow"),
    ],
)
def test_the_reasons_of_steps_go_by_what_the_rule_declared_not_by_its_name(
    declared: dict[str, object] | None, last: str
) -> None:
    known = replace(record(rule="mine:rule", delta=1), environment={"rule": declared} if declared else {})
    page = forest_page(rows_of(forest()), known)
    assert [step[4] for step in page["trees"][1]["steps"]] == ["first", "not_branched", last]


def test_right_is_what_the_verdict_says_not_the_reward(tmp_path: Path) -> None:
    """A reward of 0.9 for a wrong answer: the page, the index and the rebuilt forest say wrong."""
    first = trunk(6, 1.0)
    wrong = Trunk(first.rollout, Verdict(0.9, "tests", right=False), first.steps, first.scores)
    table = forest_table(5, [Forest(Prompt("q", as_ids([9]), ("7",), "?"), (Tree(wrong),))], lambda ids: "x")
    page = forest_page(table.to_pylist(), record())
    assert (page["trees"][0]["reward"], page["trees"][0]["right"]) == (0.9, False)
    assert page["reason"] == "all_wrong: 1 response"
    assert rebuild(table.to_pylist()).trees[0].trunk.right is False
    pq.write_table(table, tmp_path / "000005.parquet")
    assert index_file(tmp_path / "000005.parquet")[0].right == 0


def test_the_first_step_of_a_branch_that_differs() -> None:
    """The trunk says 1..6 in steps of two tokens; a branch at 2 that says 3, 4, 5, 9 leaves it in its second step."""
    alike = Branch(2, Rollout(as_ids([3, 4, 5, 9]), as_floats([-1] * 4), "stop", 1), Verdict(0.0, "number"))
    same = Branch(2, Rollout(as_ids([3, 4, 5, 6]), as_floats([-1] * 4), "stop", 1), Verdict(0.0, "number"))
    planted = Forest(Prompt("q", as_ids([9]), ("7",), "?"), (Tree(trunk(6, 1.0), (alike, same, branch(2, 3, 1.0))),))
    found = forest_page(rows_of(planted), record())["trees"][0]["branches"]
    assert [(b["place"], b["differs"]) for b in found] == [(1, 1), (1, None), (1, 0)]


def test_branches_are_cut_into_steps_in_the_light_of_their_trunk() -> None:
    cut = text_cutter(record(segmenter="blank_lines"))
    assert branch_steps("One.\n\n", "Two.\n\nThree\nlines", cut) == ["Two.\n\n", "Three\nlines"]
    assert branch_steps("One.\n\n", "a\nb", cut) == ["a\nb"]  # blank lines before it: single breaks do not cut
    assert branch_steps("", "a\nb", cut) == ["a\n", "b"]
    assert text_cutter(record(segmenter="my.module:mine"))("a\n\nb") == ["a\n\n", "b"]


def test_thinking_ends_where_it_says_so() -> None:
    assert thinks({"step_texts": ["a\n\n", "b</th", "ink>c", "d"]}) == [True, False, False, False]
    assert thinks({"step_texts": ["a", "b"]}) == [True, True]


def test_advantages_are_those_of_the_runs_estimator() -> None:
    grpo = forest_page(rows_of(forest()), record(estimator="grpo", estimator_options={"ddof": 0}))
    assert [t["nodes"][0]["advantage"] for t in grpo["trees"]] == [1, -1]
    assert [b["advantage"] for b in grpo["trees"][0]["branches"]] == [None] * 3
    released = forest_page(rows_of(forest()), record(estimator="tree", estimator_options={"train_unbranched": False}))
    assert released["trees"][1]["nodes"][0]["advantage"] is None
    assert released["trees"][0]["nodes"][0]["advantage"] == pytest.approx(0.1)
    foreign = forest_page(rows_of(forest()), record(estimator="my.module:mine"))
    assert (foreign["estimator"], foreign["own_estimator"]) == ("tree", False)


@pytest.mark.parametrize("estimator", sorted(ESTIMATORS))
def test_every_estimator_has_a_place_on_the_page(estimator: str) -> None:
    found = leaf_advantages(forest(), estimator, {})
    assert [len(tree) for tree in found] == [4, 1]
    assert found[0][0] is not None
    assert len(found[0][0]) == 6
    branch = found[0][2]
    assert (branch is None) == (estimator in ("grpo", "chain"))
    assert branch is None or len(branch) == 4 + 3  # the whole path, kept prefix first


def test_an_estimator_that_skips_leaves_leaves_them_without_advantage(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = leaf_advantages(forest(), "tree", {})

    def skipping(forest: Forest, rng: np.random.Generator) -> list[Sample]:
        samples = ESTIMATORS["tree"](forest, rng)
        return [samples[1], samples[3]]  # of a tree of four leaves and one of one

    monkeypatch.setitem(ESTIMATORS, "edge", skipping)
    found = leaf_advantages(forest(), "edge", {})
    assert [[a is not None for a in tree] for tree in found] == [[False, True, False, True], [False]]
    np.testing.assert_array_equal(found[0][1], whole[0][1])
    np.testing.assert_array_equal(found[0][3], whole[0][3])
    page = forest_page(rows_of(forest()), record(estimator="edge"))
    assert [b["advantage"] is None for b in page["trees"][0]["branches"]] == [False, True, False]


rewards = st.sampled_from([0.0, 1.0])
trees = st.tuples(rewards, st.lists(st.tuples(st.integers(1, 4), st.integers(1, 4), rewards), max_size=4))


@settings(max_examples=40, deadline=None)
@given(st.lists(trees, min_size=1, max_size=4))
def test_a_forest_survives_parquet_rows(drawn: list[tuple[float, list[tuple[int, int, float]]]]) -> None:
    grown = tuple(Tree(trunk(6, r), tuple(branch(*b) for b in branches)) for r, branches in drawn)
    planted = Forest(Prompt("q", as_ids([9]), ("7",), "?"), grown)
    back = rebuild(rows_of(planted))
    assert leaf_rewards(back).tolist() == leaf_rewards(planted).tolist()
    rng = np.random.default_rng(0)
    for a, b in zip(ESTIMATORS["tree"](planted, rng), ESTIMATORS["tree"](back, rng), strict=True):
        assert a.response.tolist() == b.response.tolist()
        assert a.advantages.tolist() == b.advantages.tolist()


def test_a_prompt_drawn_twice_makes_two_forests() -> None:
    rows = rows_of(forest())
    assert [len(f) for f in grouped([*rows, *rows])] == [5, 5]


def test_trees_that_disagree_come_first() -> None:
    overturned, mixed, alike = [[0, 1, 0], [1, 1, 1]], [[0, 0, 0], [1, 1, 1]], [[1, 1], [1, 1]]
    assert interest(overturned) > interest(mixed) > interest(alike) > interest([[1], [1]])
    assert interest(overturned) == pytest.approx(2 * (2 / 9) ** 0.5 / 2 + 0.5 * (2 / 9) ** 0.5 + 0.1)


def test_the_index_says_what_the_rows_say(tmp_path: Path, make_run: Callable[..., Path]) -> None:
    """Every number of the index against a plain reading of the whole file; the file has several row groups."""
    record = read_run(make_run(tmp_path / "run", iterations=4))
    assert [f.stem for f in record.forest_files] == ["000001", "000002", "000004"]
    file = record.forest_files[-1]
    pq.write_table(pq.read_table(file), file, row_group_size=7)
    forests = grouped(pq.read_table(file).to_pylist())
    entries = index_file(file)
    assert len(entries) == len(forests) == 6
    for entry, rows in zip(entries, forests, strict=True):
        assert (entry.iteration, entry.uid, entry.problem) == (4, rows[0]["uid"], rows[0]["problem"])
        assert entry.value == pytest.approx(np.mean([row["reward"] for row in rows]))
        assert (entry.leaves, entry.right) == (len(rows), sum(row["reward"] > 0.5 for row in rows))
        assert entry.tokens == pytest.approx(np.mean([len(row["ids"]) for row in rows]))
        trunks = [row for row in rows if row["kind"] == "trunk"]
        branched = {row["tree"] for row in rows if row["kind"] == "branch"}
        assert (entry.trees, entry.branched) == (4, len(branched))
        assert entry.fci == pytest.approx(np.mean([np.mean(row["fci"][1:]) for row in trunks]), rel=1e-5)
        read = read_entry(entry)
        assert [row["text"] for row in read] == [row["text"] for row in rows]
        assert "logprobs" not in read[0]


def test_picks_of_each_iteration(tmp_path: Path, make_run: Callable[..., Path]) -> None:
    record = read_run(make_run(tmp_path / "run", iterations=4))
    entries = [e for file in (record.forest_files[0], record.forest_files[-1]) for e in index_file(file)]
    picks = pick_entries(entries, 5)
    assert [p.iteration for p in picks] == [1] * 2 + [4] * 3
    assert picks[0].interest == max(e.interest for e in entries if e.iteration == 1)
    assert [p.interest for p in picks[2:]] == sorted((p.interest for p in picks[2:]), reverse=True)
    assert pick_entries([], 4) == []


def test_a_broken_forest_file_is_named(tmp_path: Path) -> None:
    file = tmp_path / "000001.parquet"
    file.write_bytes(b"PAR1 torn")
    with pytest.raises(DataError, match=r"000001\.parquet: not a readable forest file"):
        read_rows(file, ("uid",))
    pq.write_table(forest_table(1, [forest()], lambda ids: "").drop(["fci"]), file)
    with pytest.raises(DataError, match=r"000001\.parquet: column 'fci' is missing"):
        read_rows(file, ("uid", "fci"))


@given(st.lists(st.integers(0, 60), min_size=1, max_size=9), st.integers(10, 200))
def test_fair_limit_is_the_largest_that_fits(lengths: list[int], budget: int) -> None:
    limit = fair_limit(lengths, budget)
    assert sum(min(n, limit) for n in lengths) <= budget
    assert limit >= max(lengths) or sum(min(n, limit + 1) for n in lengths) > budget


def test_long_texts_keep_head_and_tail() -> None:
    assert clip("a\x00b\x7f\n", 9) == "a\u2400b\u2421\n"
    page = forest_page(rows_of(forest()), record())
    page["trees"][0]["branches"][0]["steps"] = ["x" * 9000 + "the end"]
    (clipped,) = clip_page(page, 1000)["trees"][0]["branches"][0]["steps"]
    assert clipped.endswith("xthe end")
    assert " more …] " in clipped
    assert len(clipped) < 1000
    assert clip_page(page, 1000)["trees"][0]["branches"][1]["steps"] == ["50 51 52"]


def test_fci_by_position_by_hand(tmp_path: Path) -> None:
    file = tmp_path / "000001.parquet"
    pq.write_table(forest_table(1, [forest()], lambda ids: ""), file)
    found = fci_by_position([file])
    assert found is not None
    # steps start at 0, 2/6, 4/6 and 0, 2/5, 4/5 of the trunks: bins 0, 6, 13 and 0, 8, 16 of 20
    scores = {i: y for i, y in enumerate(found["fci"]) if y is not None}
    assert scores == {0: 0.3, 6: 0.2, 8: 0.2, 13: 0, 16: 0}
    assert {i: s for i, s in enumerate(found["branches"]) if s} == {6: 0.33333, 13: 0.66667}
    assert found["correlation"] == -1  # FCI falls along both trunks
    assert found["trunks"] == 2
    assert fci_by_position([]) is None
