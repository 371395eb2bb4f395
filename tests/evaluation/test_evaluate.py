"""The evaluation loop over a fake backend: numbers by hand, kills, resumption, comparison."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from attnrl.errors import ConfigError, DataError, TrainingError
from attnrl.evaluation import Report, Response, compare, evaluate
from attnrl.evaluation.log import open_log
from attnrl.evaluation.results import table_rows
from attnrl.evaluation.sampling import all_jobs, request_seed
from attnrl.types import Prompt, Rollout, Sampling, Verdict, as_floats, as_ids
from processes import wait_until

HERE = Path(__file__).parent
_spec = importlib.util.spec_from_file_location("evaluation_fake", HERE / "fake.py")
fake = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(fake)


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(directory.iterdir()) if path.suffix != ".parquet"}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """An uninterrupted evaluation: its directory and report."""
    directory = tmp_path_factory.mktemp("whole")
    return directory, fake.run(directory, fake.FakeBackend())


def test_a_log_says_after_each_chunk_how_far_it_is(tmp_path, capfd) -> None:
    report = fake.run(tmp_path, fake.FakeBackend(), chunk=64)
    drawn = [[r.right for r in report.responses[:count]] for count in (64, 128)]  # 160 in all; the last says nothing
    said = [f"{len(done)} of 160 responses, {100 * sum(done) / len(done):.1f} % right" for done in drawn]
    assert capfd.readouterr().err.splitlines() == said
    fake.run(None, fake.FakeBackend(), chunk=None)
    assert capfd.readouterr().err == "", "one chunk, as in training"


def test_numbers_are_those_of_the_responses(whole) -> None:
    _, report = whole
    assert len(report.responses) == 30 * 4 + 20 * 2
    easy = [r for r in report.responses if r.benchmark == "easy"]
    assert report.tables["easy"]["pass@1"] == pytest.approx(sum(r.reward for r in easy) / 120)
    both = [
        any(r.right for r in easy if r.row == row and r.sample in pair)
        for row in range(1, 31)
        for pair in [(0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3)]
    ]
    assert report.tables["easy"]["pass@2"] == pytest.approx(sum(both) / len(both))
    # the fake's answers are right exactly where its stream says so and the text was not cut off
    for r in easy:
        assert r.right == (f"boxed{{{r.gold[0]}}}." in r.response and r.finish == "stop")
    cut = [r for r in report.responses if r.finish == "length"]
    assert cut
    assert all(r.rule == "truncated" and r.tokens == 60 and not r.reward for r in cut)
    assert report.average["pass@1"] == pytest.approx(
        (report.tables["easy"]["pass@1"] + report.tables["hard"]["pass@1"]) / 2
    )


def test_a_report_shows_itself_in_short(whole) -> None:
    _, report = whole
    right = 100 * sum(r.right for r in report.responses if r.benchmark == "hard") / 40
    assert repr(report).startswith("<Report of 160 responses: easy ")
    assert f"hard {right:.1f} % right; metrics() has the numbers>" in repr(report)
    assert repr(Report(())) == "<Report of 0 responses: nothing; metrics() has the numbers>"


def test_the_files_say_the_same(whole) -> None:
    directory, report = whole
    results = json.loads((directory / "results.json").read_text())
    assert results["benchmarks"] == report.tables
    assert results["average"] == report.average
    rows = pq.read_table(directory / "problems.parquet").to_pylist()
    assert len(rows) == 50
    assert np.mean([row["pass@1"] for row in rows if row["benchmark"] == "hard"]) == report.tables["hard"]["pass@1"]
    assert sum(row["right"] for row in rows) == sum(r.right for r in report.responses)
    lines = (directory / "results.md").read_text().splitlines()
    assert lines[0].startswith("| benchmark | problems | samples | pass@1 | pass@2 |")
    assert lines[2].startswith(f"| easy | 30 | 4 | {100 * report.tables['easy']['pass@1']:.1f} [")
    assert lines[4].startswith("| Avg. |")


def test_chunks_and_files_do_not_change_the_result(whole, tmp_path) -> None:
    _, report = whole
    again = fake.run(None, fake.FakeBackend(), chunk=None)
    assert again.responses == report.responses
    assert again.metrics() == report.metrics()
    assert again.metrics()["eval/easy/pass@1"] == report.tables["easy"]["pass@1"]
    assert fake.run(tmp_path, fake.FakeBackend(), chunk=1000).tables == report.tables


@pytest.mark.parametrize("chunks", [1, 5])
def test_kill_and_resume_equals_uninterrupted(whole, tmp_path, chunks) -> None:
    directory, report = whole
    argv = [sys.executable, str(HERE / "fake.py"), str(tmp_path), str(chunks + 2)]
    process = subprocess.Popen(argv, start_new_session=True)
    log = tmp_path / "responses.jsonl"
    try:
        wait_until(lambda: log.exists() and log.read_bytes().count(b"\n") >= 8 * chunks)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    survived = log.read_bytes().count(b"\n")
    assert 8 * chunks <= survived < 160
    backend = fake.FakeBackend()
    resumed = fake.run(tmp_path, backend)
    assert backend.requests == 160 - survived
    assert resumed.responses == report.responses
    assert contents(tmp_path) == contents(directory)
    assert pq.read_table(tmp_path / "problems.parquet").equals(pq.read_table(directory / "problems.parquet"))


def test_a_torn_last_line_is_drawn_again(whole, tmp_path) -> None:
    directory, _ = whole
    lines = (directory / "responses.jsonl").read_bytes().splitlines(keepends=True)
    for cut in (1, len(lines[40]) // 2, len(lines[40]) - 1):
        place = tmp_path / str(cut)
        place.mkdir()
        (place / "settings.json").write_bytes((directory / "settings.json").read_bytes())
        (place / "responses.jsonl").write_bytes(b"".join(lines[:40]) + lines[40][:cut])
        backend = fake.FakeBackend()
        fake.run(place, backend)
        assert backend.requests == 120
        assert contents(place) == contents(directory)


def test_a_finished_evaluation_draws_nothing(whole, tmp_path) -> None:
    directory, _ = whole
    before = contents(directory)
    backend = fake.FakeBackend()
    fake.run(directory, backend)
    assert backend.requests == 0
    assert contents(directory) == before


def test_other_settings_in_the_same_directory_are_refused(whole) -> None:
    directory, _ = whole
    with pytest.raises(ConfigError, match=r"seed was 7, is now 8.*another --output"):
        fake.run(directory, fake.FakeBackend(), seed=8)
    with pytest.raises(ConfigError, match=r"temperature was 0.6, is now 1.0"):
        fake.run(directory, fake.FakeBackend(), sampling=Sampling(1.0, 0.95))


def test_other_prompts_in_the_same_directory_are_refused_in_words(tmp_path) -> None:
    def begin(**prompts: str) -> None:
        with open_log(tmp_path, {"prompts": prompts}):
            pass

    begin(easy="aa1e", hard="e2b8")
    with pytest.raises(ConfigError, match=r"another template: hard\); name another --output") as refused:
        begin(easy="aa1e", hard="ffff")
    assert "ffff" not in str(refused.value)
    with pytest.raises(ConfigError, match=r"prompts was \['easy', 'hard'\], is now \['easy'\]"):
        begin(easy="aa1e")


def test_a_directory_in_use_is_refused(tmp_path) -> None:
    class Nested(fake.FakeBackend):
        def generate(self, requests, sampling):
            fake.run(tmp_path, fake.FakeBackend())
            return super().generate(requests, sampling)

    with pytest.raises(ConfigError, match="another evaluation is writing there"):
        fake.run(tmp_path, Nested())


def test_a_broken_line_in_the_middle_is_named(whole, tmp_path) -> None:
    directory, _ = whole
    lines = (directory / "responses.jsonl").read_bytes().splitlines(keepends=True)
    (tmp_path / "settings.json").write_bytes((directory / "settings.json").read_bytes())
    (tmp_path / "responses.jsonl").write_bytes(lines[0] + b'{"half": \n' + lines[1])
    with pytest.raises(DataError, match=r"responses\.jsonl:2: not a line this command wrote"):
        fake.run(tmp_path, fake.FakeBackend())


def test_k_above_samples_is_refused_before_anything_is_drawn(tmp_path) -> None:
    backend = fake.FakeBackend()
    with pytest.raises(ConfigError, match=r"pass@4 cannot be estimated from 2 samples per problem of benchmark hard"):
        fake.run(tmp_path, backend, ks=(1, 4))
    assert backend.requests == 0
    assert not list(tmp_path.iterdir())


def test_every_response_has_a_random_stream_of_its_own() -> None:
    seeds = {request_seed(s, b, r, n) for s in range(3) for b in ("a", "b") for r in range(20) for n in range(8)}
    assert len(seeds) == 3 * 2 * 20 * 8
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_truncated_answers_and_verifier_errors_are_kept_apart() -> None:
    class Fixed:
        version = 0

        def generate(self, requests, sampling):
            return [
                Rollout(as_ids([n]), as_floats([0]), "length" if n == 2 else "stop", 0) for n in range(len(requests))
            ]

    seen = []

    def grade(attempts):
        seen.extend(attempts)
        verdicts = {"0": Verdict(0.3, "judge", "0", right=True), "1": Verdict(0.9, "judge", "1", right=False)}
        return [verdicts.get(a.response, Verdict(0.0, "limit", None, "timeout")) for a in attempts]

    prompt = Prompt("u", as_ids([1]), ("0",), "p", row={"level": 3})
    report = evaluate(
        Fixed(), {"b": [prompt]}, decode=lambda ids: str(ids[0]), grade=grade, samples=4, sampling=Sampling(),
        max_tokens=5,
    )  # fmt: skip
    table = report.tables["b"]
    assert [(a.problem, a.answers, a.response, a.finish, a.tokens, a.row) for a in seen] == [
        ("p", ("0",), str(n), "length" if n == 2 else "stop", 1, {"level": 3}) for n in range(4)
    ]
    # the verdict says what is right, not the size of its reward
    assert [r.right for r in report.responses] == [True, False, False, False]
    assert (table["pass@1"], table["truncated"], table["errors"]) == (0.25, 0.25, 2)


def test_each_benchmark_has_its_own_k(tmp_path) -> None:
    """32 of AIME, however many were drawn; all samples of a benchmark nobody knows; never more than there are."""

    def responses(name: str, row: int, right: list[bool]) -> list[Response]:
        return [Response(name, row, n, f"{name} {row}", ("1",), "", float(r), r, "x") for n, r in enumerate(right)]

    rows = [
        *responses("aime24", 1, [True] + [False] * 63),
        *responses("mine", 1, [True, False, False]),
        *responses("mine", 2, [False, False]),
        *responses("math500", 1, [False, True]),
    ]
    report = Report(rows, resamples=50)
    assert [report.own_k(name) for name in ("aime24", "mine", "math500")] == [32, 2, 2]
    assert report.tables["aime24"]["pass@32"] == pytest.approx(0.5)  # one right of 64, in half of all subsets of 32
    assert report.tables["mine"]["pass@2"] == pytest.approx((2 / 3 + 0) / 2)
    assert {key for key in report.tables["math500"] if "pass" in key and "_" not in key} == {"pass@1", "pass@2"}
    assert report.average["pass@k"] == pytest.approx((0.5 + 1 / 3 + 1) / 3)
    assert report.metrics()["eval/average/pass@k"] == report.average["pass@k"]
    report.save(tmp_path)
    lines = (tmp_path / "results.md").read_text().splitlines()
    assert lines[0] == "| benchmark | problems | samples | pass@1 | pass@k | k | truncated | tokens | errors |"
    assert [line.split(" | ")[5] for line in lines[2:5]] == ["32", "2", "2"]
    assert pq.read_table(tmp_path / "problems.parquet").column("k").to_pylist() == [32, 2, 2, 2]
    one = Report(responses("mine", 1, [True]), resamples=50)
    assert "pass@k" not in table_rows(one)[0]


def test_comparison_is_paired_by_problem(whole, tmp_path) -> None:
    directory, report = whole
    better = fake.run(tmp_path / "better", fake.FakeBackend(skill=0.9))
    comparisons = {c.benchmark: c for c in compare(directory, tmp_path / "better")}
    assert list(comparisons) == ["easy", "hard", "Avg."]
    easy = comparisons["easy"]
    assert easy.a == pytest.approx(report.tables["easy"]["pass@1"])
    assert easy.b == pytest.approx(better.tables["easy"]["pass@1"])
    # the same streams: every response right at skill 0.6 is right at 0.9, so no paired difference is negative
    assert 0 < easy.low < easy.difference < easy.high
    unpaired = better.tables["easy"]["pass@1_high"] - report.tables["easy"]["pass@1_low"]
    assert easy.high < unpaired
    assert comparisons["Avg."].difference == pytest.approx((easy.difference + comparisons["hard"].difference) / 2)
    same = compare(directory, directory)
    assert all((c.difference, c.low, c.high) == (0, 0, 0) for c in same)


def test_comparison_pairs_by_content_not_by_place(tmp_path) -> None:
    def report(rewards: dict[str, float]):
        return Report(
            [Response("b", row, 0, p, ("1",), "", r, bool(r), "number") for row, (p, r) in enumerate(rewards.items())]
        )

    report({"p": 1, "q": 0, "r": 1}).save(tmp_path / "a")
    report({"r": 1, "p": 1, "q": 1}).save(tmp_path / "b")
    report({"r": 1, "p": 1}).save(tmp_path / "c")
    (comparison,) = compare(tmp_path / "a", tmp_path / "b")
    assert (comparison.a, comparison.b) == (pytest.approx(2 / 3), 1)
    # differences are 0, 1, 0: a resample's mean is a third of its draws of q, 0 with probability 8/27
    assert (comparison.low, comparison.high) == (0.0, 1.0)
    with pytest.raises(DataError, match="1 problems are in only one"):
        compare(tmp_path / "a", tmp_path / "c")
    with pytest.raises(DataError, match=r"no problems\.parquet there"):
        compare(tmp_path / "a", tmp_path / "nowhere")


def test_jobs_stand_in_the_order_of_the_report() -> None:
    a, b = (Prompt(uid, as_ids([1]), ("1",)) for uid in "ab")
    jobs = all_jobs({"x": [a, b], "y": [b]}, {"x": 2, "y": 1})
    assert jobs == [("x", 1, 0, a), ("x", 1, 1, a), ("x", 2, 0, b), ("x", 2, 1, b), ("y", 1, 0, b)]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda rows: rows[:-1], "generate of the engine Broken must return a list of 8, one a request: 7"),
        (lambda rows: [replace(r, version=1) for r in rows], "version 1, where the policy has 0"),
        (lambda rows: [replace(r, finish="eos") for r in rows], "finish 'eos'; known: stop, length"),
        (lambda rows: [replace(r, logprobs=r.logprobs[1:]) for r in rows], "are not one finite number for each"),
        (lambda rows: [replace(r, ids=r.ids[:0], logprobs=r.logprobs[:0]) for r in rows], "0 tokens, where 1 to 60"),
    ],
)
def test_an_engine_that_breaks_its_promise_is_said_and_nothing_of_it_is_kept(tmp_path, change, said) -> None:
    """By the check that the training loop has too."""

    class Broken(fake.FakeBackend):
        def generate(self, requests, sampling):
            return change(super().generate(requests, sampling))

    with pytest.raises(TrainingError, match=said):
        fake.run(tmp_path / "out", Broken())
    assert (tmp_path / "out" / "responses.jsonl").read_text() == ""
