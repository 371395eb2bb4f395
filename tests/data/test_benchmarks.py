"""The table of benchmarks and its checks."""

import json
import os
from pathlib import Path

import pytest

from attnrl.config import load_config
from attnrl.data.benchmarks import BENCHMARKS, load_benchmark
from attnrl.errors import ConfigError, DataError, MissingFileError


def test_the_table_is_the_paper_s():
    six = load_config("").evaluation.benchmarks
    assert {name: (BENCHMARKS[name].rows, BENCHMARKS[name].samples) for name in six} == {
        "aime24": (30, 32),
        "aime25": (30, 32),
        "amc23": (40, 32),
        "math500": (500, 4),
        "minerva": (272, 4),
        "olympiad": (674, 4),
    }


def write(folder: Path, rows: int) -> None:
    text = "".join(json.dumps({"question": f"{n}?", "answer": f"#### {n}"}) + "\n" for n in range(rows))
    (folder / "gsm8k_test.jsonl.gz").write_text(text)  # content decides, not the suffix


def test_the_directory_may_be_the_data_or_its_eval_folder(tmp_path, monkeypatch):
    (tmp_path / "eval").mkdir()
    write(tmp_path / "eval", 1319)
    assert [r.answers[0] for r in load_benchmark("gsm8k", tmp_path)][-1] == "1318"
    assert len(load_benchmark("gsm8k", tmp_path / "eval")) == 1319
    monkeypatch.setenv("ATTNRL_DATA", str(tmp_path))
    assert len(load_benchmark("gsm8k")) == 1319


def unreachable(source, **_):
    raise MissingFileError(f"{source}: the hub cannot be reached")


def test_mistakes(tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match=r"'aime23' is unknown; known are aime24, aime25"):
        load_benchmark("aime23")
    with pytest.raises(MissingFileError, match=r"neither .*eval/aime24\.parquet nor .*aime24\.parquet exists"):
        load_benchmark("aime24", tmp_path)
    with monkeypatch.context() as patch:
        patch.delenv("ATTNRL_DATA", raising=False)
        patch.setattr("attnrl.data.benchmarks.load_records", unreachable)
        with pytest.raises(MissingFileError, match=r"benchmark aime24: .*ATTNRL_DATA .*holds eval/aime24\.parquet"):
            load_benchmark("aime24")
    write(tmp_path, 1318)
    with pytest.raises(DataError, match=r"has 1318 rows, not 1319"):
        load_benchmark("gsm8k", tmp_path)


@pytest.fixture(scope="module")
def data_dir() -> Path:
    if "ATTNRL_DATA" not in os.environ:
        pytest.skip("ATTNRL_DATA is not set: the real data files are not here")
    return Path(os.environ["ATTNRL_DATA"])


@pytest.mark.parametrize("name", BENCHMARKS)
def test_real_benchmarks(data_dir, name):
    records = load_benchmark(name, data_dir)
    assert len(records) == BENCHMARKS[name].rows
    assert all(record.answers for record in records)
    assert len({record.problem for record in records}) == len(records)


def test_several_golds_are_alternatives(data_dir):
    minerva = load_benchmark("minerva", data_dir)
    assert minerva[0].answers == ("9.6",)  # its line break is gone
    several = [record.answers for record in minerva if len(record.answers) > 1]
    assert ("0.01", "0.02") in several
    assert ("7.5 \\times 10^7", "7.5 \\times 10^7") not in several  # the same but for a line break: one answer
    olympiad = load_benchmark("olympiad", data_dir)
    assert olympiad[1].answers == ("$\\frac{1}{2 n+2}$",)  # as written: reading it is the verifier's part
