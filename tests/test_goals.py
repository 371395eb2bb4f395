"""benchmarks/goals.py reads the files of speed_gpu.sh as its scripts write them, and says what is met."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
import generation
import goals

GPU = {"device": "NVIDIA H200", "torch": "2.11.0", "commit": "4ea5c35"}
SPEED = {"1.5B": (20_000, 50_000), "135M": (10_000, 60_000)}  # tokens/s of vLLM, of our first call


def work(of: list[int]) -> dict[str, Any]:
    names = [generation.WORK[i][0] for i in of]
    speeds = [SPEED["135M" if name.startswith("135M") else "1.5B"] for name in names]
    theirs = [{"work": name, "s": 1.0, "tok_s": speed} for name, (speed, _) in zip(names, speeds, strict=True)]
    ours = [
        {"work": name, "s": 1.0, "tok_s": speed, "again_tok_s": 1, "over_vllm": 0.1, "again_over": 0.1, "stats": {}}
        for name, (_, speed) in zip(names, speeds, strict=True)
    ]
    return {**GPU, "vllm": theirs, "vllm_seconds": 1.0, "work": ours, "work_seconds": 1.0}


def learner(cases: list[dict[str, Any]], commit: str = "4ea5c35") -> dict[str, Any]:
    named = {"shape": "1.5B", "layers": "all", "optimizer": "adamw", "seconds": 2.0}
    return {**GPU, "commit": commit, "arguments": {"tiny": "False"}, "cases": [named | c for c in cases]}


def growing(prompts: int, limit: int, factor: float | None) -> dict[str, Any]:
    found = {"prompts": prompts, "limit": limit, "seconds": {"iteration": 2.5}, "of_limit": 1.0}
    return found | ({"growth": dict.fromkeys(("generate", "score", "update", "iteration"), factor)} if factor else {})


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """What all parts write on a GPU, every goal met by a round number."""
    phases = {"generate": 5.0, "verify": 0.1, "score": 0.8, "update": 4.0, "other": 0.05, "iteration": 10.0}
    row = {f"seconds/{name}": spent for name, spent in phases.items()}
    row |= {"score/seconds": 1.0, "score/overhead": 0.25}
    plain = {"seconds": {"generate": 10.0, "score": 5.0, "update": 20.0}, "peak_gb": {"update": 60.0}}
    files: dict[str, Any] = {
        "vllm": work([0, 1, 2, 3, 4, 5, 6]),
        "small": work([7]),
        "steps": GPU
        | {"steps": [{"rows": r, "context": c, "top_p": 1.0, "ms": 2.0} for r, c in generation.STEPS]}
        | {"exact": {}},
        "mixed": GPU | {"mixed": {"mixed": {"tokens_per_second": 30_000.0}, "equal": {"tokens_per_second": 40_000.0}}},
        "learner": learner(
            [
                {"tokens": 2048, "tokens_per_second": 41_940.0, "peak_gb": 35.9},
                {"tokens": 8192, "tokens_per_second": 34_740.0, "peak_gb": 35.8},
            ]
        ),
        "plain": {
            **GPU,
            "arguments": {"shape": "1.5B"},
            "iterations": [{**row, "seconds/iteration": 99.0}, row],
            "plain": plain | {"sampler": "vllm 0.26.0", "ratios": {"iteration": 3.5}},
            "spare": {"seconds": {"update": 5.0}, "peak_gb": {"update": 20.0}, "plain_over_ours": 4.0},
        },
        "big": learner([{"shape": "7B", "tokens": 8192, "tokens_per_second": 4208.0, "peak_gb": 71.0}]),
        "growth": {
            **GPU,
            "arguments": {"shape": "mini"},
            "cases": [growing(4, 1024, None)]
            + [growing(4, n, 1.25) for n in (2048, 4096, 8192, 16384)]
            + [growing(n, 1024, 0.5) for n in (16, 64)],
        },
    }
    files["paper"] = {**GPU, "iterations": [row, row]}
    files["mixed"]["mixed"]["mixed"] |= {"cache_peak_bytes": 11_000_000_000, "cache_live_bytes": 10_000_000_000}
    for name, found in files.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(found))
    return tmp_path


def change(file: Path, *path: Any, to: Any) -> None:
    found = inner = json.loads(file.read_text())
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = to
    file.write_text(json.dumps(found))


def said(capsys: pytest.CaptureFixture[str]) -> tuple[dict[str, list[str]], str]:
    """The cells of the table by what they are of, and what stands below."""
    head, _, *rows = (text := capsys.readouterr().out).partition("\n\n")[0].splitlines()
    cells = {line.split(" | ")[0].removeprefix("| "): line.strip("| ").split(" | ")[1:] for line in [head, *rows]}
    assert {len(row) for row in cells.values()} == {len(cells["what"])}
    return cells, text.partition("\n\n")[2]


def test_every_goal_is_read_and_met(out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert goals.main([str(out)]) == 0
    rows, below = said(capsys)
    assert rows.pop("what") == ["measured", "beside what", "ratio", "goal", "met"]
    assert len(rows) == len(goals.GOALS) == 31
    assert rows["first call, 256x(128+256), tokens/s"] == ["50,000", "vLLM: 20,000", "2.5", ">= 2", "yes"]
    assert rows["first call, 135M 2048x(64+256), tokens/s"] == ["60,000", "vLLM: 10,000", "6", ">= 6", "yes"]
    assert rows["decode step, 8x4096, ms"] == ["2", "-", "-", "< 2.5", "yes"]
    assert rows["mixed lengths, tokens/s"] == ["30,000", "equal lengths: 40,000", "0.75", ">= 0.6", "yes"]
    assert rows["mixed lengths, GB of pages at the peak"] == ["11", "tokens alive: 10", "1.1", "<= 1.15", "yes"]
    before = "d9ecc0b, another machine"
    assert rows["learner, 8,192 tokens a sample, tokens/s"] == ["34,740", f"{before}: 17,370", "2", ">= 1.5", "yes"]
    assert rows["learner, 2,048 tokens a sample, peak GB"] == ["35.9", f"{before}: 35.9", "1", "<= 1", "yes"]
    assert rows["update with the least memory, s"] == ["5", "the plain way: 20", "4", ">= 2.5", "yes"]
    assert rows["update with the least memory, peak GB"] == ["20", "the plain way: 60", "0.3333", "<= 0.5", "yes"]
    assert rows["whole iteration, s"] == ["10", "the plain way, vllm 0.26.0: 35", "3.5", ">= 3", "yes"]
    assert rows["FCI in it, s"] == ["0.2", "the iteration: 10", "0.02", "< 0.03", "yes"]  # a fifth of 1 s
    assert rows["grading and bookkeeping in it, s"] == ["0.15", "the iteration: 10", "0.015", "< 0.02", "yes"]
    assert rows["learner of 7B, 8,192 tokens a sample, peak GB"] == ["71", "-", "-", "<= 141", "yes"]
    assert rows["growth, 64 prompts, limit 1,024, s"][2:] == [
        "generate 0.50, score 0.50, update 0.50", "-", "measured",
    ]  # fmt: skip
    assert (
        rows["responses of 8,192 tokens, iteration 2, s"][1]
        == "generate 5, verify 0.1, score 0.8, update 4, other 0.05"
    )
    assert {row[-1] for row in rows.values()} == {"yes", "measured"}
    assert below.splitlines() == [
        "commit 4ea5c35, device NVIDIA H200: vllm, small, steps, mixed, learner, big, plain, growth, paper"
    ]


@pytest.mark.parametrize(
    ("part", "path", "to", "row", "ratio"),
    [
        ("vllm", ("work", 0, "tok_s"), 39_999, "first call, 256x(128+256), tokens/s", "2"),
        ("steps", ("steps", 0, "ms"), 4.0, "decode step, 64x4096, ms", "-"),
        ("mixed", ("mixed", "mixed", "cache_peak_bytes"), 12e9, "mixed lengths, GB of pages at the peak", "1.2"),
        ("learner", ("cases", 0, "peak_gb"), 36.0, "learner, 2,048 tokens a sample, peak GB", "1.003"),
        ("plain", ("spare", "seconds", "update"), 10.0, "update with the least memory, s", "2"),
        ("plain", ("iterations", 1, "seconds/other"), 0.1, "grading and bookkeeping in it, s", "0.02"),
        ("plain", ("iterations", 1, "score/overhead"), 0.6, "FCI in it, s", "0.0375"),
        ("big", ("cases", 0, "peak_gb"), 141.5, "learner of 7B, 8,192 tokens a sample, peak GB", "-"),
        ("big", ("cases", 0), {"case": ["7B", 8192, "all", "adamw"], "out_of_memory": "CUDA"},
         "learner of 7B, 8,192 tokens a sample, peak GB", "-"),
    ],
)  # fmt: skip
def test_a_goal_that_is_missed_is_said_and_alone(
    out: Path, capsys: pytest.CaptureFixture[str], part: str, path: tuple[Any, ...], to: Any, row: str, ratio: str
) -> None:
    change(out / f"{part}.json", *path, to=to)
    assert goals.main([str(out)]) == 1
    rows, _ = said(capsys)
    assert [name for name, cells in rows.items() if cells[-1] == "no"] == [row]
    assert rows[row][2] == ratio


def test_what_is_missing_was_not_measured_and_is_no_miss(out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (out / "small.json").unlink()
    change(out / "mixed.json", "mixed", to={"error": "Traceback"})  # a section that failed
    change(out / "vllm.json", "work", to={"error": "Traceback"})
    change(out / "plain.json", "spare", to={"seconds": {"update": 5.0}, "peak_gb": {}})  # without a GPU
    (out / "big.json").write_text('{"cases": [')
    change(out / "growth.json", "cases", to=[growing(4, 1024, None), growing(4, 2048, 1.5)])  # cut off
    change(out / "paper.json", "iterations", 1, to={})  # it failed in the second
    assert goals.main([str(out)]) == 0
    captured = capsys.readouterr()
    assert "big.json: Expecting value" in captured.err
    lines = [line.strip("| ").split(" | ") for line in captured.out.splitlines() if line.endswith("not measured |")]
    assert {tuple(cells[1:4]) for cells in lines} == {("-", "-", "-")}
    names = [cells[0] for cells in lines]
    assert [sum(name.startswith(start) for name in names) for start in ("first", "mixed", "growth")] == [8, 2, 5]
    assert names[10] == "update with the least memory, peak GB"
    assert names[11] == "learner of 7B, 8,192 tokens a sample, peak GB"
    assert names[-1] == "responses of 8,192 tokens, iteration 2, s"
    assert len(names) == 18


def test_several_commits_stand_in_their_rows(out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    change(out / "learner.json", "commit", to="7574093")
    change(out / "paper.json", "commit", to="")
    assert goals.main([str(out)]) == 0
    rows, below = said(capsys)
    assert rows["what"][-1] == "commit"
    assert rows["learner, 2,048 tokens a sample, tokens/s"][-2:] == ["yes", "7574093"]
    assert rows["decode step, 64x4096, ms"][-2:] == ["yes", "4ea5c35"]
    assert rows["responses of 8,192 tokens, iteration 1, s"][-2:] == ["measured", "not named"]
    assert "commit 7574093, device NVIDIA H200: learner" in below.splitlines()


def test_another_learner_may_stand_in_the_place_of_the_one_before(
    out: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = learner([{"tokens": 2048, "tokens_per_second": 30_000.0, "peak_gb": 35.9}], "eb78a4f")
    (tmp_path / "before.json").write_text(json.dumps(before))
    assert goals.main([str(out), "--before", str(tmp_path / "before.json")]) == 1
    rows, _ = said(capsys)
    assert rows["learner, 2,048 tokens a sample, tokens/s"] == ["41,940", "eb78a4f: 30,000", "1.398", ">= 1.5", "no"]
    assert rows["learner, 8,192 tokens a sample, tokens/s"][-1] == "not measured"


def test_a_rehearsal_says_so(out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    change(out / "steps.json", "device", to="cpu")
    change(out / "learner.json", "arguments", "tiny", to="True")
    change(out / "plain.json", "device", to="cpu")
    change(out / "growth.json", "arguments", "shape", to="tiny")
    assert goals.main([str(out)]) == 0
    rows, below = said(capsys)
    assert {row[-1] for name, row in rows.items() if "step" in name or "iteration, s" in name} == {"rehearsal"}
    below = below.splitlines()
    assert "commit 4ea5c35, device a rehearsal: no number means anything: steps, learner, plain, growth" in below


def test_a_folder_with_none_of_the_files_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "agree.json").write_text("{}")
    assert goals.main([str(tmp_path)]) == 2
    assert goals.main([str(tmp_path / "nowhere")]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "nowhere: nothing to read; speed_gpu.sh writes big.json, growth.json, " in captured.err


def test_a_rehearsal_alone_shows_nothing(tmp_path: Path) -> None:
    steps = [{"rows": 64, "context": 4096, "top_p": 1.0, "ms": 3.0}]
    (tmp_path / "steps.json").write_text(json.dumps({"device": "cpu", "commit": "4ea5c35", "steps": steps}))
    assert goals.main([str(tmp_path)]) == 2


@pytest.mark.parametrize("torn", [{"cases": {"error": "Traceback"}}, {"cases": "text"}, [1, 2]])
def test_a_file_of_another_form_was_not_measured(out: Path, capsys: pytest.CaptureFixture[str], torn: Any) -> None:
    (out / "big.json").write_text(json.dumps(torn))
    assert goals.main([str(out)]) == 0
    assert said(capsys)[0]["learner of 7B, 8,192 tokens a sample, peak GB"][-1] == "not measured"
