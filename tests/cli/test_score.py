"""attnrl score on a tiny saved model."""

import json
import re
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

import attnrl
from attnrl.algo.branching import top_steps
from attnrl.algo.forest import unscored
from attnrl.cli import run
from attnrl.config import load_config
from attnrl.evaluation.results import Response
from attnrl.launch.scoring import score_settings
from attnrl.run import forest_table
from attnrl.scoring import fci
from attnrl.scoring.step_attention import deciding_head, step_attention
from attnrl.types import (
    Attempt,
    Branch,
    Forest,
    Prompt,
    Rollout,
    Step,
    Tree,
    Trunk,
    Verdict,
    as_floats,
    as_ids,
)

COLUMNS = ["row", "step", "start", "stop", "text", "fci", "entropy", "position_null"]
COLUMNS += ["thinking", "branch_point", "why"]
CHARACTERS = [chr(i) for i in range(32, 127)] + ["\n"]


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random two-layer model with one token per character."""
    path = tmp_path_factory.mktemp("model")
    vocabulary = {"<unk>": 0, "<eos>": 1} | {c: i + 2 for i, c in enumerate(CHARACTERS)}
    raw = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, unk_token="<unk>", eos_token="<eos>")
    tokenizer.save_pretrained(path)
    config = Qwen2Config(
        vocab_size=len(vocabulary),
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        initializer_range=0.4,
        eos_token_id=1,
        bos_token_id=None,
    )
    Qwen2ForCausalLM(config).float().save_pretrained(path)
    return path


STEPS = ["So a = 1.\n\n", "b = 2\n\n", "c = a + b\n\n", "that is 3.\n\n", "check\n\n", "yes, 3\n\n", "answer 3"]


def write(path: Path, rows: list[object]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def call(model: Path, source: Path, *flags: str) -> int:
    return run(["score", "--model", str(model), "--input", str(source), "--device", "cpu", *flags])


def test_one_row_per_step(model_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompt, response = "a + b?", "".join(STEPS)
    ids = [CHARACTERS.index(c) + 2 for c in prompt + response]
    rows = [
        {"prompt": prompt, "response": response},
        {"prompt_ids": ids[: len(prompt)], "response_ids": ids[len(prompt) :]},
        {"prompt": "hm", "response": "one step"},
    ]
    source, output = write(tmp_path / "in.jsonl", rows), tmp_path / "out.parquet"
    assert call(model_path, source, "--output", str(output), "--delta", "2") == 0
    table = pq.read_table(output)
    assert table.column_names == COLUMNS
    got = table.to_pylist()
    assert [r["row"] for r in got] == [1] * 7 + [2] * 7 + [3]
    assert [r["step"] for r in got] == [*range(7), *range(7), 0]
    ends = np.cumsum([len(step) for step in STEPS])
    assert [(r["start"], r["stop"]) for r in got[:7]] == list(zip([0, *ends[:-1]], ends, strict=True))
    model = AutoModelForCausalLM.from_pretrained(model_path)
    spans = [(len(prompt) + r["start"], len(prompt) + r["stop"]) for r in got[:7]]
    want = fci(model, ids, spans, delta=2)
    assert np.allclose([r["fci"] for r in got[:7]], want, rtol=0, atol=1e-6)
    assert want[0] > 0
    assert got[14]["fci"] == 0.0
    for a, b in zip(got[:7], got[7:14], strict=True):
        assert {**a, "row": 2} == b
    chosen = top_steps(want, [Step(r["start"], r["stop"]) for r in got[:7]])[:2]
    points = [r["step"] for r in got[:7] if r["branch_point"]]
    assert len(points) == 2
    assert [r["why"].partition(":")[0] for r in got[:7]].count("point") == 2
    assert (got[0]["why"], got[14]["why"]) == ("first", "first")
    assert all(r["thinking"] for r in got)
    assert set(chosen) <= set(points)
    first_two = np.mean([1 / (q + 1) for q in range(*spans[5])]) + np.mean([1 / (q + 1) for q in range(*spans[6])])
    assert got[3]["position_null"] == pytest.approx(first_two, rel=1e-5)
    assert all(0 < r["entropy"] < np.log(len(CHARACTERS) + 3) for r in got)
    out = capsys.readouterr().out
    assert "rank correlation of FCI with step position" in out
    assert "3 responses, 15 steps" in out


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"prompt": "a"}, "in.jsonl:2: field 'response' is missing"),
        ({"prompt": "a", "response": ""}, "in.jsonl:2: the response is empty"),
        ({"prompt": "a", "response": 3}, "in.jsonl:2: field 'response' must be text"),
        ({"prompt": "a", "response_ids": [1.5]}, "in.jsonl:2: field 'response_ids' must be a list of token ids"),
        ({"prompt": "a", "response_ids": [4, 5000]}, "in.jsonl:2: response token 5000 is outside"),
        ([1], "in.jsonl:2: a row must be an object with named columns, not list"),
    ],
)
def test_a_bad_line_is_named(
    row: object, said: str, model_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write(tmp_path / "in.jsonl", [{"prompt": "a", "response": "b"}, row])
    assert call(model_path, source, "--output", str(tmp_path / "o.parquet")) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "o.parquet").exists()


def test_bad_flags_are_named_before_anything_loads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write(tmp_path / "in.jsonl", [{"prompt": "a", "response": "b"}])
    nowhere = tmp_path / "no" / "o.parquet"
    for flags, said in (
        (["--output", str(nowhere)], f"--output {nowhere}: the folder {nowhere.parent} does not exist"),
        (["--output", str(tmp_path / "o.parquet"), "--html", str(nowhere)], f"--html {nowhere}: the folder"),
        (
            ["--output", str(tmp_path / "o.parquet"), "--delta", "0"],
            "algo.delta: input should be greater than or equal to 1",
        ),
        (["--output", str(tmp_path / "o.parquet"), "--top-fraction", "0"], "algo.top_fraction"),
    ):
        assert call(tmp_path / "no_model", source, *flags) == 2
        assert said in capsys.readouterr().err
    forests = tmp_path / "run" / "forests"
    forests.mkdir(parents=True)
    output = ["--output", str(tmp_path / "o.parquet")]
    for files, said in (((), "give a file in it"), (("000009", "000010"), f"such as {forests / '000010.parquet'}")):
        for name in files:
            (forests / f"{name}.parquet").touch()
        assert call(tmp_path / "no_model", tmp_path / "run", *output) == 2
        err = capsys.readouterr().err
        assert f"--input {tmp_path / 'run'} is a directory" in err
        assert said in err
    assert call(tmp_path / "no_model", tmp_path / "no.jsonl", "--output", str(tmp_path / "o.parquet")) == 2
    assert "no such file" in capsys.readouterr().err


def test_it_reads_what_eval_keeps_and_the_trunks_of_forests(model_path: Path, tmp_path: Path) -> None:
    response, problem = "".join(STEPS), "a + b?"
    ids = [CHARACTERS.index(c) + 2 for c in response]
    kept = Response.of("tasks", 3, 1, Attempt(problem, ("3",), response, tokens=len(ids)), Verdict(1.0, "number"))
    (tmp_path / "responses.jsonl").write_text(kept.to_json() + "\n")
    drawn = Rollout(as_ids(ids), as_floats([-1.0] * len(ids)), "stop", 0)
    trunk = Trunk(drawn, Verdict(1.0, "number"), (Step(0, len(ids)),), unscored(drawn, [Step(0, len(ids))]))
    branch = Branch(5, Rollout(as_ids([9, 8]), as_floats([-1, -1]), "stop", 1), Verdict(0.0, "number"))
    forest = Forest(Prompt("q", as_ids([2]), ("3",), problem), (Tree(trunk, (branch, branch)), Tree(trunk)))
    pq.write_table(forest_table(1, [forest], lambda ids: ""), tmp_path / "000001.parquet")
    found = {}
    for source in ("responses.jsonl", "000001.parquet"):
        output = tmp_path / f"{source}.scores.parquet"
        assert call(model_path, tmp_path / source, "--output", str(output), "--data.template", "{problem}") == 0
        found[source] = pq.read_table(output).to_pylist()
    assert [r["row"] for r in found["responses.jsonl"]] == [1] * 7
    assert [r["row"] for r in found["000001.parquet"]] == [1] * 7 + [4] * 7  # rows 2 and 3 are branches
    assert [r["stop"] for r in found["responses.jsonl"]] == np.cumsum([len(step) for step in STEPS]).tolist()
    assert found["000001.parquet"][:7] == found["responses.jsonl"]
    assert [r["why"] for r in found["responses.jsonl"] if not r["branch_point"]] != []
    assert all(r["thinking"] for r in found["responses.jsonl"])


def test_a_problem_gets_the_template_its_model_was_trained_with(
    model_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run/checkpoints/000001").mkdir(parents=True)
    (tmp_path / "run/checkpoints/000001/model").symlink_to(model_path)
    (tmp_path / "run/config.json").write_text(load_config("demo", {"data.template": "Q {problem} A"}).model_dump_json())
    response = "".join(STEPS)
    of_problem = write(tmp_path / "problem.jsonl", [{"problem": "a + b?", "response": response}])
    of_prompt = write(tmp_path / "prompt.jsonl", [{"prompt": "Q a + b? A", "response": response}])
    assert score_settings(str(tmp_path / "run"), {"data.template": "{problem}"})[1].data.template == "{problem}"
    assert score_settings(str(model_path)) == ("", load_config(""))
    found = []
    for source in (of_problem, of_prompt):
        assert call(tmp_path / "run", source, "--output", str(tmp_path / "o.parquet")) == 0
        found.append(pq.read_table(tmp_path / "o.parquet").to_pylist())
        said = "template from" in capsys.readouterr().out
        assert said == (source == of_problem)
    assert found[0] == found[1]


def test_a_file_that_is_no_parquet_is_named(model_path: Path, tmp_path: Path, capsys) -> None:
    (tmp_path / "rows.parquet").write_text("not this")
    assert call(model_path, tmp_path / "rows.parquet", "--output", str(tmp_path / "o.parquet")) == 2
    assert "rows.parquet: not a readable parquet file" in capsys.readouterr().err


def test_the_page_s_maps_come_from_the_one_model_that_was_loaded(
    model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loads, load = [], AutoModelForCausalLM.from_pretrained

    def counting(name, *args, **options):
        loads.append(name)
        return load(name, *args, **options)

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", counting)
    rows = [{"prompt": "a + b?", "response": "".join(STEPS)}, {"prompt": "b?", "response": "".join(STEPS[::-1])}]
    source = tmp_path / "in.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    page = tmp_path / "page.html"
    output = ["--output", str(tmp_path / "out.parquet"), "--delta", "2"]
    assert call(model_path, source, *output, "--html", str(page), "--html-rows", "1") == 0
    assert loads == [str(model_path)]
    # by hand, from a model of its own: one character a token, the prompt's six before the steps
    model = load(model_path).eval()
    ids = [CHARACTERS.index(c) + 2 for c in rows[0]["prompt"] + rows[0]["response"]]
    stops = (6 + np.cumsum([len(step) for step in STEPS])).tolist()
    spans = list(zip([6, *stops[:-1]], stops, strict=True))
    layer, head = deciding_head(fci(model, ids, spans, delta=2, reduce="none"))
    (data,) = re.findall(r'<script[^>]*type="application/json"[^>]*>(.*?)</script>', page.read_text("utf-8"), re.DOTALL)
    (response,) = json.loads(data)["responses"]
    assert (response["map"]["layer"], response["map"]["head"]) == (layer, head)
    assert response["prompt"].replace(" ", "") == "a+b?"  # words of one character are shown apart
    alpha = np.tril(step_attention(model, ids, spans, layer=layer, head=head), -1)
    for row, found in enumerate(response["map"]["rows"]):
        assert found == pytest.approx(alpha[row, : row + 1].tolist(), abs=1e-4)
    assert alpha.max() > 0.01


def test_a_user_s_words_get_the_chat_template_with_system_message_and_options(model_path: Path, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    from attnrl import score

    tokenizer = AutoTokenizer.from_pretrained(model_path)
    tokenizer.chat_template = (
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{% if loud is defined %}!{% endif %}[bot]"
    )
    AutoModelForCausalLM.from_pretrained(model_path).save_pretrained(tmp_path / "chatty")
    tokenizer.save_pretrained(tmp_path / "chatty")
    keys = {"data.system": "be-brief", "data.chat_options": {"loud": True}, "data.template": "Q: {problem}"}
    (one,) = score(tmp_path / "chatty", [("a+b?", "3")], overrides=keys, chat=True)
    assert one.text == "[system]be-brief[user]a+b?![bot]"
    (bare,) = score(tmp_path / "chatty", [("a+b?", "3")], chat=True)
    assert bare.text == "[user]a+b?[bot]"


def test_without_steps_enough_for_a_correlation_it_says_so(model_path: Path, tmp_path: Path, capsys) -> None:
    source = write(tmp_path / "in.jsonl", [{"prompt": "a", "response": "b\n\nc\n\nd"}])
    assert call(model_path, source, "--output", str(tmp_path / "o.parquet")) == 0
    printed = capsys.readouterr()
    assert "no correlation of FCI with position: it takes 7 steps or more" in printed.out
    assert "FCI is 0 throughout 1 response: no step there has 4 steps after it (--delta)" in printed.out
    assert "nan" not in printed.out + printed.err


def test_an_engine_makes_room_for_what_is_scored_and_no_more(model_path, tmp_path, monkeypatch):
    """Its limits are those of [evaluation], which scoring does not take; their defaults are more than most can read."""
    (tmp_path / "roomy.py").write_text(
        "from attnrl.local.backend import build as local\n"
        "asked = []\n"
        "def build(config, *, model, tokenizer, learn=True):\n"
        "    asked.append(config.evaluation)\n"
        "    return local(config, model=model, tokenizer=tokenizer, learn=learn)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    pairs = [("1 + 1", "is 2"), ("2", "is not 1 + 2")]
    attnrl.score(model_path, pairs, overrides={"engine.name": "roomy:build"})
    from roomy import asked

    assert [(limits.max_prompt_tokens, limits.max_response_tokens) for limits in asked] == [(5, 12)]
