"""Records from every layout and file kind, row errors, and the real files with their known traps."""

import datetime
import gzip
import hashlib
import json
import os
import re
import socket
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from attnrl.data.files import pick_split
from attnrl.data.records import last_boxed, load_records, parse_answers, strip_instruction
from attnrl.errors import DataError, MissingFileError

SUFFIX = r" Let's think step by step and output the final answer within \boxed{}."


def write_jsonl(path: Path, rows: list[dict]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("row", "layout", "problem", "answers"),
    [
        (
            {"prompt": [{"role": "user", "content": "1+1?" + SUFFIX}], "reward_model": {"ground_truth": "2"}},
            "prompt/reward_model",
            "1+1?",
            ("2",),
        ),
        (
            {"prompt": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "x?"}],
             "reward_model": {"ground_truth": ["0.01\n", "0.02\n", "0.02"], "style": "rule"}},
            "prompt/reward_model",
            "x?",
            ("0.01", "0.02"),
        ),
        (
            {"prompt": [{"role": "user", "content": "y?"}],
             "reward_model": {"ground_truth": {"question": "y?", "solution": r"\boxed{7}", "target": "8"}}},
            "prompt/reward_model",
            "y?",
            ("8",),
        ),
        ({"question": "eggs?", "answer": "16-3=<<16-3=13>>13\n#### 1,300"}, "question/answer", "eggs?", ("1,300",)),
        ({"problem": "p?", "answer": 14.0, "solution": r"\boxed{15}"}, "problem/answer", "p?", ("14",)),
        (
            {"problem": "p?", "solution": r"a \boxed{1} b $\boxed{\frac{1}{2}}$.", "level": "Level 5"},
            "problem/solution",
            "p?",
            (r"\frac{1}{2}",),
        ),
        ({"question": "q?", "final_answer": ["$3$"]}, "question/final_answer", "q?", ("$3$",)),
        ({"input": "How many ?", "target": 2.5}, "input/target", "How many ?", ("2.5",)),
        (
            {"Body": "Two groups of 3 pears", "Question": "How many pears?", "Answer": 6.0},
            "body/question/answer",
            "Two groups of 3 pears, How many pears?",
            ("6",),
        ),
        (
            {"body": "Seven apples.", "question": "How many?", "answer": "9 (apples)"},
            "body/question/answer",
            "Seven apples. How many?",
            ("9",),
        ),
        ({"prompt": "bare {x} text", "answer": "1"}, "prompt/answer", "bare {x} text", ("1",)),
    ],
)  # fmt: skip
def test_layouts(tmp_path, row, layout, problem, answers):
    records = load_records(write_jsonl(tmp_path / "rows.jsonl", [row]))
    assert records.layout == layout
    assert records[0].problem == problem
    assert records[0].answers == answers
    assert records[0].where == "rows.jsonl:1"


def test_the_same_rows_from_every_file_kind(tmp_path):
    rows = [{"problem": f"{n}+\u2028{n}?", "answer": str(2 * n), "level": n} for n in range(5)]
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    (tmp_path / "a.jsonl").write_text(text, encoding="utf-8")
    (tmp_path / "b.json").write_text(json.dumps(rows), encoding="utf-8")
    (tmp_path / "c.json").write_text(json.dumps({"data": rows}), encoding="utf-8")
    (tmp_path / "d.json").write_text(json.dumps({k: [row[k] for row in rows] for k in rows[0]}), encoding="utf-8")
    (tmp_path / "e.jsonl.gz").write_bytes(gzip.compress(text.encode()))
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "f.parquet")
    for file in sorted(tmp_path.iterdir()):
        records = load_records(file)
        assert [(r.problem, r.answers, r.info["level"], r.row) for r in records] == [
            (row["problem"], (row["answer"],), row["level"], n) for n, row in enumerate(rows, start=1)
        ], file.name


def test_directory_takes_the_split(tmp_path):
    (tmp_path / "data").mkdir()
    for split, answer in (("train", "1"), ("test", "2")):
        write_jsonl(tmp_path / "data" / f"{split}-00000-of-00001.jsonl", [{"question": "q", "answer": answer}])
    assert load_records(tmp_path, split="test")[0].answers == ("2",)
    with pytest.raises(MissingFileError, match=r"'dev'.*train-00000"):
        load_records(tmp_path, split="dev")


def test_a_directory_of_files_of_no_split_says_what_to_do(tmp_path):
    (tmp_path / "notes.csv").write_text("a,b\n")
    with pytest.raises(MissingFileError, match=r"no data file in this directory; what is read is \.parquet"):
        load_records(tmp_path)
    write_jsonl(tmp_path / "a.jsonl", [{"question": "q", "answer": "1"}])
    assert load_records(tmp_path)[0].answers == ("1",)  # the only one
    write_jsonl(tmp_path / "b.jsonl", [{"question": "q", "answer": "2"}])
    message = (
        r"none has 'train' as a word of its name, such as train-1\.jsonl; it has: a\.jsonl, b\.jsonl; name the files"
    )
    with pytest.raises(MissingFileError, match=message):
        load_records(tmp_path)
    for name in ("train-1.jsonl", "more_train.jsonl"):
        write_jsonl(tmp_path / name, [{"question": name, "answer": "3"}])
    assert sorted(record.problem for record in load_records(tmp_path)) == ["more_train.jsonl", "train-1.jsonl"]


def test_several_configurations_are_refused():
    names = ["main/test-0.parquet", "socratic/test-0.parquet", "README.md"]
    with pytest.raises(DataError, match=r"main, socratic.*CONFIG"):
        pick_split(names, "test", None)
    assert pick_split(names, "test", "main") == ["main/test-0.parquet"]
    assert pick_split(["contest.jsonl", "test.jsonl"], "test", None) == ["test.jsonl"]


def test_rows_without_problem_or_answer_are_kept_apart(tmp_path):
    rows = [
        {"question": "a?", "answer": "1"},
        {"question": "b?", "answer": "  \n"},
        {"question": " ", "answer": "2"},
        {"question": "c?", "answer": None},
    ]
    file = write_jsonl(tmp_path / "rows.jsonl", rows)
    records = load_records(file)
    assert [r.problem for r in records] == ["a?"]
    assert records.rows == 4
    assert [(s.where, s.reason) for s in records.skipped] == [
        ("rows.jsonl:2", "empty answer"),
        ("rows.jsonl:3", "empty problem"),
        ("rows.jsonl:4", "empty answer"),
    ]
    assert "3 left out (empty answer; empty problem): rows 2, 3, 4" in records.report()
    with pytest.raises(DataError, match=r"rows\.jsonl:2: empty answer; fix or remove the row"):
        load_records(file, strict=True)


def test_a_row_without_the_column_is_left_out_like_one_with_an_empty_cell(tmp_path):
    file = write_jsonl(tmp_path / "rows.jsonl", [{"problem": "a?", "answer": "1"}, {"problem": "b?"}])
    records = load_records(file)
    assert [(s.where, s.reason) for s in records.skipped] == [("rows.jsonl:2", "no column with a problem or an answer")]
    with pytest.raises(DataError, match=r"rows\.jsonl:2: unknown layout, unlike rows before it.*drop_bad_rows = true"):
        load_records(file, strict=True)
    first = write_jsonl(tmp_path / "first.jsonl", [{"problem": "b?"}, {"problem": "a?", "answer": "1"}])
    records = load_records(first)
    assert [(r.problem, r.where) for r in records] == [("a?", "first.jsonl:2")]
    assert [s.where for s in records.skipped] == ["first.jsonl:1"]
    assert records.report() == (
        f"{first}: 2 rows, layout problem/answer; 1 left out (no column with a problem or an answer): rows 1"
    )
    with pytest.raises(DataError, match=r"first\.jsonl:1: unknown layout"):
        load_records(first, strict=True)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("bad.jsonl", '{"question": "a"}\n', r"bad\.jsonl:1: unknown layout, columns found: question; known layouts"),
        ("bad.jsonl", '{"question": "a", "answer": "1"}\n{oops\n', r"bad\.jsonl:2 \(line 2\): not JSON"),
        ("bad.jsonl", "[1, 2]\n", r"bad\.jsonl:1: a row must be an object"),
        ("bad.jsonl", "", r"no usable row: it is empty"),
        ("bad.jsonl", '{"question": "a", "answer": ""}\n', r"all 1 were left out, bad\.jsonl:1: empty answer"),
        ("ok.csv", "problem,answer\n1+1?,2\n", r"ok\.csv:1 \(line 1\): not JSON .*; CSV is not read: .*\.parquet"),
        ("bad.json", "3", r"holds a int, not a list of rows"),
        ("bad.parquet", "no parquet", r"not a readable parquet file"),
    ],
)  # fmt: skip
def test_bad_files_name_the_row_and_the_fix(tmp_path, name, content, message):
    (tmp_path / name).write_text(content, encoding="utf-8")
    with pytest.raises(DataError, match=message):
        load_records(tmp_path / name)


def test_a_table_of_a_spreadsheet_is_said_to_be_none_that_is_read(tmp_path):
    (tmp_path / "rows.xlsx").write_bytes(b"PK\x03\x04\xff\xfe")
    with pytest.raises(DataError, match=r"rows\.xlsx: not UTF-8 text \(byte 4\); XLSX is not read: what is read is"):
        load_records(tmp_path / "rows.xlsx")


def test_columns_of_one_s_own_names(tmp_path):
    rows = [{"Task": "1+1?", "key": 2, "answer": "nonsense", "level": 3}, {"Task": "2+2?", "answer": "4"}]
    file = write_jsonl(tmp_path / "rows.jsonl", rows)
    records = load_records(file, columns={"problem": "task", "answer": "key"})
    assert [(r.problem, r.answers, r.info) for r in records] == [("1+1?", ("2",), {"answer": "nonsense", "level": 3})]
    assert [s.where for s in records.skipped] == ["rows.jsonl:2"]
    assert [r.answers for r in load_records(file, columns={"problem": "Task"})] == [("nonsense",), ("4",)]
    with pytest.raises(DataError, match=r"rows\.jsonl:1: no column 'gold', which data\.columns names; .*Task, key"):
        load_records(file, columns={"answer": "gold"})
    with pytest.raises(DataError, match=r"rows\.jsonl:1: unknown layout.*data\.columns = "):
        load_records(file)  # an answer, but nothing known as a problem


def test_all_other_columns_are_kept_as_json_holds_them(tmp_path):
    row = {
        "problem": "1+1?", "answer": 2, "level": 3, "Tests": ["a", "b"], "none": None, "blob": b"\x00" * 9,
        "when": datetime.datetime(2026, 1, 1), "nan": float("nan"), "text": "x" * 70_000,
    }  # fmt: skip
    pq.write_table(pa.Table.from_pylist([row]), tmp_path / "rows.parquet")
    (record,) = load_records(tmp_path / "rows.parquet")
    assert (record.answers, record.info) == (("2",), {"level": 3, "Tests": ["a", "b"]})
    verl = {"prompt": [{"role": "user", "content": "1?"}], "reward_model": {"ground_truth": 1, "style": "rule"}}
    (record,) = load_records(write_jsonl(tmp_path / "verl.jsonl", [verl | {"data_source": "mine"}]))
    assert record.info == {"reward_model": verl["reward_model"], "data_source": "mine"}


def test_a_row_s_system_message_is_kept(tmp_path):
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+1?"}]
    rows = [{"prompt": chat, "answer": "2"}, {"prompt": chat[1:], "answer": "2"}]
    assert [(r.problem, r.system) for r in load_records(write_jsonl(tmp_path / "rows.jsonl", rows))] == [
        ("1+1?", "Be brief."),
        ("1+1?", None),
    ]


@pytest.mark.parametrize("answer", [7, 7.0, "7", [7], {"ground_truth": 7}])
def test_whole_numbers_are_answers(tmp_path, answer):
    file = write_jsonl(tmp_path / "rows.jsonl", [{"problem": "3+4?", "answer": answer}])
    assert load_records(file)[0].answers == ("7",)


def test_multi_turn_chats_are_left_out(tmp_path):
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    rows = [{"prompt": turns, "answer": "1"}, {"prompt": turns[:1], "answer": "1"}]
    records = load_records(write_jsonl(tmp_path / "rows.jsonl", rows))
    assert [r.problem for r in records] == ["a"]
    assert "one user message" in records.skipped[0].reason


@pytest.mark.parametrize(
    "wrapped",
    [
        "Find $\\boxed{n}$.\n\nPlease reason step by step, and put your final answer within \\boxed{}.",
        "Find $\\boxed{n}$." + SUFFIX,
        'Find $\\boxed{n}$. Let\'s think step by step and output the final answer after "####".',
        "Solve the following math problem step by step. The last line of your response should be of the form "
        "Answer: $Answer (without quotes) where $Answer is the answer to the problem.\n\nFind $\\boxed{n}$.\n\n"
        'Remember to put your answer on its own line after "Answer:".',
    ],
)
def test_instructions_are_removed(wrapped):
    assert strip_instruction(wrapped) == "Find $\\boxed{n}$."


def test_boxes_of_the_problem_itself_stay():
    problem = r"Fill \[\boxed{} - \boxed{}\] with digits. Let's think about the smallest difference."
    assert strip_instruction(problem) == problem


def test_boxed_answers():
    assert last_boxed(r"\boxed{\{1, 2\}}") == r"\{1, 2\}"
    assert last_boxed(r"\boxed{1} and \boxed{2") == "1"
    assert last_boxed("none") is None
    assert parse_answers("a long solution\nwithout a box", "solution") == ()
    assert parse_answers(r"$\frac12$", "solution") == (r"$\frac12$",)


def test_a_name_that_is_neither_file_nor_hub_set():
    with pytest.raises(MissingFileError, match=r"missing\.parquet: no such file"):
        load_records("missing.parquet")


HUB_FILES = {
    "main/train-00000-of-00001.jsonl": b'{"question": "1+1?", "answer": "sum\\n#### 2"}\n',
    "main/test-00000-of-00001.jsonl": b'{"question": "2+2?", "answer": "sum\\n#### 4"}\n',
    "README.md": b"# sums",
}


class Hub(BaseHTTPRequestHandler):
    """The two calls of the hub's protocol that loading needs, for one data set."""

    def log_message(self, *args):
        pass

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        path = self.path.partition("?")[0]
        if path == "/api/datasets/people/sums/tree/main":
            body = json.dumps([{"type": "file", "path": n, "size": len(b), "oid": "0"} for n, b in HUB_FILES.items()])
            return self.answer(body.encode(), "application/json")
        if path in ("/api/datasets/people/sums", "/api/datasets/people/sums/revision/main"):
            body = {"id": "people/sums", "sha": "c" * 40, "siblings": [{"rfilename": name} for name in HUB_FILES]}
            return self.answer(json.dumps(body).encode(), "application/json")
        file = re.fullmatch(r"/datasets/people/sums/resolve/\w+/(.*)", path)
        if file and file[1] in HUB_FILES:
            return self.answer(HUB_FILES[file[1]], "application/octet-stream")
        return self.send_error(404)

    def answer(self, body, kind):
        self.send_response(200)
        for name, value in (
            ("Content-Type", kind),
            ("Content-Length", str(len(body))),
            ("ETag", f'"{hashlib.sha256(body).hexdigest()}"'),
            ("X-Repo-Commit", "c" * 40),
        ):
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)


@pytest.fixture
def hub(tmp_path):
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    environment = {"HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}", "HF_HOME": str(tmp_path / "hf")}
    yield {**os.environ, **environment, "HF_HUB_DISABLE_XET": "1"}
    server.shutdown()


def test_hub_data_sets_load_by_name(hub):
    # in a process of its own: huggingface_hub reads its address once, when it is imported
    script = """
import sys
from attnrl.data.records import load_records
from attnrl.errors import MissingFileError
for source in ("people/sums", "hf:people/sums:test", "hf:people/sums/main:test"):
    record = load_records(source)[0]
    print(record.problem, record.answers[0], record.where)
for source in ("hf:people/sums:dev", "people/nothing"):
    try:
        load_records(source)
    except MissingFileError as error:
        print(error)
"""
    done = subprocess.run([sys.executable, "-c", script], env=hub, capture_output=True, text=True, timeout=120)
    lines = done.stdout.splitlines()
    assert lines[:3] == [
        "1+1? 2 people/sums/main/train-00000-of-00001.jsonl:1",
        "2+2? 4 people/sums/main/test-00000-of-00001.jsonl:1",
        "2+2? 4 people/sums/main/test-00000-of-00001.jsonl:1",
    ], done.stderr
    assert "no file for split 'dev'" in lines[3]
    assert "people/nothing: no such file here, and as the hub data set 'people/nothing' it could not" in lines[4]
    again = subprocess.run(
        [sys.executable, "-c", script], env={**hub, "HF_HUB_OFFLINE": "1"}, capture_output=True, text=True, timeout=120
    )
    assert again.stdout.splitlines()[:3] == lines[:3], again.stderr  # from the cache, without a network


def test_an_unreachable_hub_is_said_at_once(tmp_path):
    """Nothing listens at the first address; the second takes the connection and never answers."""
    script = """
from attnrl.data.records import load_records
from attnrl.errors import MissingFileError
try:
    load_records("people/sums")
except MissingFileError as error:
    print(error)
"""
    with socket.socket() as refusing, socket.socket() as silent:
        for listener in (refusing, silent):
            listener.bind(("127.0.0.1", 0))
        silent.listen()
        for listener, reason in ((refusing, "refused"), (silent, "no answer within 4 seconds|timed out")):
            address = f"http://127.0.0.1:{listener.getsockname()[1]}"
            environment = {**os.environ, "HF_ENDPOINT": address, "HF_HOME": str(tmp_path / "hf")}
            environment.pop("HF_HUB_OFFLINE", None)
            done = subprocess.run(
                [sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=60
            )
            said = rf"people/sums: no such file here, and the hub \({address}\) cannot be reached: .*({reason})"
            assert re.match(said, done.stdout), (done.stdout, done.stderr)


@pytest.fixture(scope="module")
def data_dir() -> Path:
    if "ATTNRL_DATA" not in os.environ:
        pytest.skip("ATTNRL_DATA is not set: the real data files are not here")
    return Path(os.environ["ATTNRL_DATA"])


@pytest.mark.parametrize(
    ("file", "rows", "skipped"),
    [
        ("eval/aime24.parquet", 30, []),
        ("eval/aime25.parquet", 30, []),
        ("eval/amc23.parquet", 40, []),
        ("eval/math500.parquet", 500, []),
        ("eval/minerva.parquet", 272, []),
        ("eval/olympiad.parquet", 674, []),
        ("eval/gsm8k_test.jsonl.gz", 1319, []),
        ("train/gsm8k_train.jsonl.gz", 7473, []),
        ("train/deepscaler_train.parquet", 40315, [6328, 6336, 6408, 6415, 38209, 38211]),
        ("train/math_train_7500_with_solutions.parquet", 7500, [5341, 5343, 6627, 7301]),
        ("easy/asdiv.jsonl.gz", 2215, []),
        ("easy/svamp.jsonl.gz", 1000, []),
        ("easy/mawps_singleop.jsonl.gz", 562, []),
        ("easy/mawps_addsub.jsonl.gz", 395, []),
        ("easy/mawps_multiarith.jsonl.gz", 600, []),
        ("easy/mawps_singleeq.jsonl.gz", 508, []),
    ],
)
def test_real_files(data_dir, file, rows, skipped):
    records = load_records(data_dir / file)
    assert records.rows == rows
    assert [int(s.where.rpartition(":")[2]) - 1 for s in records.skipped] == skipped  # the list counts from 0
    assert {s.reason for s in records.skipped} <= {"empty answer"}
    for record in records:
        assert "output the final answer within" not in record.problem
        assert all(answer and answer == answer.strip() for answer in record.answers)


def test_deepscaler_prompt_gives_its_own_problem_column(data_dir):
    # the file has the problem twice: inside the instruction, and bare in a column that verl files need not have
    file = data_dir / "train/deepscaler_train.parquet"
    bare = pq.read_table(file, columns=["problem"]).column("problem").to_pylist()
    records = load_records(file)
    assert {r.row for r in records} | {int(s.where.rpartition(":")[2]) for s in records.skipped} == set(
        range(1, len(bare) + 1)
    )
    assert [r.problem for r in records] == [bare[r.row - 1].strip() for r in records]


def test_an_empty_cell_of_a_table_of_floats_is_no_answer(tmp_path):
    file = tmp_path / "a.parquet"
    pq.write_table(pa.table({"problem": ["1+1?", "1+2?"], "answer": [2.0, float("nan")]}), file)
    found = load_records(file)
    assert [(r.where, r.answers) for r in found] == [("a.parquet:1", ("2",))]
    assert [(s.where, s.reason) for s in found.skipped] == [("a.parquet:2", "empty answer")]


def test_columns_that_rewards_cannot_see_are_named(tmp_path):
    file = tmp_path / "a.jsonl"
    rows = [{"problem": f"{i}?", "answer": i, "level": i, "tests": "x" * (70_000 * i), "note": None} for i in range(2)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = load_records(file)
    assert [sorted(r.info) for r in found] == [["level", "tests"], ["level"]]
    assert found.unseen == ("tests",)
