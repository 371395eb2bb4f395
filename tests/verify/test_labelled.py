"""The verifier on real labelled data, and its policy table. Needs ATTNRL_DATA."""

from __future__ import annotations

import gzip
import json
import os
import re
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from attnrl.verify import Verifier

DOC = Path(__file__).resolve().parents[2] / "docs" / "verifier.md"


@pytest.fixture(scope="module")
def data() -> Path:
    if "ATTNRL_DATA" not in os.environ:
        pytest.skip("set ATTNRL_DATA to the folder with the real data")
    return Path(os.environ["ATTNRL_DATA"])


@pytest.fixture(scope="module")
def verifier() -> Verifier:
    with Verifier(workers=1) as shared:
        yield shared


def _rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]


def test_labelled_cases(data: Path, verifier: Verifier) -> None:
    cases = _rows(data / "eval" / "verifier_dev.jsonl")
    verdicts = verifier.grade([(case["response"], case["gold"]) for case in cases])
    missed = [case for case, verdict in zip(cases, verdicts, strict=True) if bool(verdict.reward) != case["expected"]]
    false_positives = [case["id"] for case in missed if not case["expected"]]
    assert len(cases) == 413
    assert 1 - len(missed) / len(cases) >= 0.985, [case["id"] for case in missed]
    assert len(false_positives) / len(cases) <= 0.01, false_positives


def policy_table() -> dict[str, bool]:
    """Case id to decision, as the documentation states them."""
    rows = re.findall(r"^\| (pol_\d\d) \|.*\| (right|wrong) \| ", DOC.read_text(encoding="utf-8"), re.MULTILINE)
    return {case: decision == "right" for case, decision in rows}


def test_every_policy_case_is_decided_as_documented(data: Path, verifier: Verifier) -> None:
    cases = _rows(data / "eval" / "verifier_policy.jsonl")
    verdicts = verifier.grade([(case["response"], case["gold"]) for case in cases])
    said = {case["id"]: bool(verdict.reward) for case, verdict in zip(cases, verdicts, strict=True)}
    assert said == policy_table()


def test_every_benchmark_gold_equals_itself(data: Path, verifier: Verifier) -> None:
    for name, rows in (
        ("aime24", 30),
        ("aime25", 30),
        ("amc23", 40),
        ("math500", 500),
        ("minerva", 272),
        ("olympiad", 674),
    ):
        golds = pq.read_table(data / "eval" / f"{name}.parquet")["reward_model"].to_pylist()
        items = [(f"\\boxed{{{one}}}", gold["ground_truth"]) for gold in golds for one in gold["ground_truth"]]
        verdicts = verifier.grade(items)
        assert len(golds) == rows
        assert [item for item, verdict in zip(items, verdicts, strict=True) if not verdict.reward] == []


def test_training_golds_equal_themselves(data: Path, verifier: Verifier) -> None:
    answers = pq.read_table(data / "train" / "deepscaler_train.parquet", columns=["answer"])["answer"].to_pylist()
    verdicts = verifier.grade([(f"\\boxed{{{answer}}}", answer) for answer in answers])
    refused = [row for row, verdict in enumerate(verdicts) if not verdict.reward]
    empty = [row for row, verdict in enumerate(verdicts) if verdict.error == "empty_gold"]
    clipped = [row for row in refused if answers[row].count("{") > answers[row].count("}")]  # end inside a brace
    assert empty == [6328, 6336, 6408, 6415, 38209, 38211]
    assert len(clipped) == 2
    assert set(refused) == set(empty) | set(clipped)


def test_real_transcripts(data: Path, verifier: Verifier) -> None:
    """Boxed final answers agree with the labels of the transcripts; these count only what stands in a box."""
    with gzip.open(data / "transcripts" / "reasoning_transcripts.jsonl.gz", "rt", encoding="utf-8") as file:
        rows = [json.loads(line) for line in file]
    rows = [row for row in rows if row["correct"] is not None and row["gold"] is not None]
    boxed = [row for row in rows if re.search(r"\\boxed\{.", row["response"].rpartition("</think>")[2])]
    verdicts = verifier.grade([(row["response"], row["gold"]) for row in boxed])
    missed = [row for row, verdict in zip(boxed, verdicts, strict=True) if bool(verdict.reward) != row["correct"]]
    assert len(boxed) > 700
    assert missed == []
