"""Templates, chat templates, token ids and the length filter, with real tokenizers."""

import os
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from attnrl.config import load_config
from attnrl.data.prompts import render_benchmark, render_prompts
from attnrl.data.records import Record, load_records
from attnrl.errors import ConfigError, DataError
from attnrl.types import content_hash

WORDS = ["<unk>", "<s>", "</s>", "user:", "bot:", "sys:", "be", "brief", "one", "two", "three", "{x}", "box", "{}"]


def words_tokenizer(chat_template: str | None = None, special: str = "<s> $A") -> PreTrainedTokenizerFast:
    """A tokenizer of whole words that adds BOS by itself, as Llama's does."""
    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.post_processor = processors.TemplateProcessing(single=special, special_tokens=[("<s>", 1), ("</s>", 2)])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>", pad_token="</s>"
    )
    tokenizer.chat_template = chat_template
    return tokenizer


CHAT = (
    "{{ bos_token }}{% for m in messages %} {{ {'user': 'user:', 'system': 'sys:'}[m.role] }} {{ m.content }}"
    "{% endfor %}"
    "{% if add_generation_prompt %} bot:{% endif %}"
)


def record(problem: str, row: int = 0) -> Record:
    return Record(problem, ("2",), "f", f"f:{row}")


def words(prompt) -> list[str]:
    return [WORDS[i] for i in prompt.ids]


def test_bare_text_keeps_the_tokenizer_s_bos():
    prompts, dropped = render_prompts(
        [record("one {x} two")], words_tokenizer(), template="{problem} box {}", max_prompt_tokens=9
    )
    assert words(prompts[0]) == ["<s>", "one", "{x}", "two", "box", "{}"]
    assert prompts[0].uid == content_hash("one {x} two")
    assert (prompts[0].answers, prompts[0].problem, prompts[0].source) == (("2",), "one {x} two", "f")
    assert len(dropped) == 0
    assert dropped.report() == ""


def test_a_bare_prompt_does_not_end_in_eos():
    tokenizer = words_tokenizer(special="<s> $A </s>")
    prompts, _ = render_prompts([record("one")], tokenizer, template="{problem}", max_prompt_tokens=9)
    assert words(prompts[0]) == ["<s>", "one"]


def test_chat_template_has_one_bos_and_opens_the_response():
    tokenizer = words_tokenizer(CHAT)
    prompts, _ = render_prompts([record("one")], tokenizer, template="{problem} two", max_prompt_tokens=9)
    assert words(prompts[0]) == ["<s>", "user:", "one", "two", "bot:"]
    system, _ = render_prompts([record("one")], tokenizer, template="{problem}", max_prompt_tokens=9, system="be brief")
    assert words(system[0]) == ["<s>", "sys:", "be", "brief", "user:", "one", "bot:"]


def test_the_row_s_own_system_message_is_written_unless_one_is_set():
    tokenizer = words_tokenizer(CHAT)
    rows = [Record("one", ("2",), "f", "f:1", system="be brief"), Record("one", ("2",), "f", "f:2", {"level": 3})]
    own, dropped = render_prompts(rows, tokenizer, template="{problem}", max_prompt_tokens=9)
    assert [words(p) for p in own] == [
        ["<s>", "sys:", "be", "brief", "user:", "one", "bot:"],
        ["<s>", "user:", "one", "bot:"],
    ]
    assert not dropped  # the same words after another system message are another prompt
    assert own[0].uid != own[1].uid == content_hash("one")
    assert [p.row for p in own] == [{}, {"level": 3}]
    same, dropped = render_prompts(rows, tokenizer, template="{problem}", max_prompt_tokens=9, system="two")
    assert [words(p) for p in same] == [["<s>", "sys:", "two", "user:", "one", "bot:"]]
    assert dropped.repeated == ("f:2",)
    none, _ = render_prompts(rows, tokenizer, template="{problem}", max_prompt_tokens=9, system="")
    assert [words(p) for p in none] == [["<s>", "user:", "one", "bot:"]]
    with pytest.raises(DataError, match=r'f:1: the row has a system message.*data\.system = ""'):
        render_prompts(rows, words_tokenizer(), template="{problem}", max_prompt_tokens=9)
    bare, _ = render_prompts(rows, words_tokenizer(), template="{problem}", max_prompt_tokens=9, system="")
    assert [words(p) for p in bare] == [["<s>", "one"]]


def brief(template, **options) -> list[str]:
    """The words of a prompt under a chat template and its options."""
    tokenizer = template if isinstance(template, PreTrainedTokenizerFast) else words_tokenizer(template)
    prompts, _ = render_prompts(
        [record("one")], tokenizer, template="{problem}", max_prompt_tokens=9, chat_options=options
    )
    return words(prompts[0])


def test_an_option_that_the_chat_template_does_not_read_is_an_error_that_names_those_it_reads():
    template = CHAT + "{% if brief %} brief{% endif %}{% if tall is defined %}{{ raise_exception('no') }}{% endif %}"
    message = r"data\.chat_options\.breif: .* does not read it.*; it reads brief, tall; did you mean 'brief'\?$"
    with pytest.raises(ConfigError, match=message):
        brief(template, breif=True)
    with pytest.raises(ConfigError, match=r"data\.chat_options\.loud: .*; it reads none$"):
        brief(CHAT, loud=True)
    with pytest.raises(ConfigError, match=r"data\.chat_options\.padding: "):  # of the call, and nothing is padded
        brief(template, brief=True, padding=True)
    with pytest.raises(ConfigError, match=r"data\.chat_options\.tools: "):  # passed, and unread
        brief(template, tools=[{"name": "x"}])


@pytest.mark.parametrize(
    "end",
    [
        "{% set brief = brief if brief is defined else false %}{% if brief %} brief{% endif %}",
        "{% if brief is not defined %}{% set brief = false %}{% endif %}{% if brief %} brief{% endif %}",
        "{% macro end() %}{% if brief %} brief{% endif %}{% endmacro %}{{ end() }}",
        "{% for m in messages %}{% if not brief %}{% continue %}{% endif %} brief{% endfor %}",
        "{%- generation -%}{% if brief %} brief{% endif %}{% endgeneration %}",
    ],
)
def test_an_option_is_found_however_the_template_reads_it(end):
    assert brief(CHAT + end, brief=True) == ["<s>", "user:", "one", "bot:", "brief"]
    with pytest.raises(ConfigError, match="it reads brief;"):
        brief(CHAT + end, breif=True)


def test_special_tokens_named_templates_and_a_tokenizer_s_own_way_are_options_too():
    assert brief(CHAT, bos_token="<s> two") == ["<s>", "two", "user:", "one", "bot:"]
    named = words_tokenizer()
    named.chat_template = {"default": CHAT, "short": "{{ messages[0].content }}{% if brief %} brief{% endif %}"}
    assert brief(named) == ["<s>", "user:", "one", "bot:"]
    assert brief(named, chat_template="short", brief=True) == ["one", "brief"]
    with pytest.raises(ConfigError, match=r"data\.chat_options\.brief: .*; it reads none$"):
        brief(named, brief=True)  # the default one does not read it
    named.chat_template = {"a": CHAT, "b": CHAT}
    with pytest.raises(ConfigError, match=r"data\.chat_options: .*multiple chat templates"):
        brief(named)

    class Own(PreTrainedTokenizerFast):
        def apply_chat_template(self, chat, *, loud="two", **options):
            return f"{chat[0]['content']} {loud}"

    own = Own(tokenizer_object=words_tokenizer().backend_tokenizer, unk_token="<unk>")
    own.chat_template = CHAT
    assert brief(own, loud="three") == ["one", "three"]


def test_options_reach_the_chat_template():
    tokenizer = words_tokenizer(CHAT + "{% if brief %} brief{% endif %}")

    def render(**options):
        return render_prompts([record("one")], tokenizer, template="{problem}", max_prompt_tokens=9, **options)

    assert words(render(chat_options={"brief": True})[0][0]) == ["<s>", "user:", "one", "bot:", "brief"]
    assert words(render(chat_options={"brief": False})[0][0]) == ["<s>", "user:", "one", "bot:"]
    with pytest.raises(ConfigError, match="chat_options: tokenize is set already"):
        render(chat_options={"tokenize": True})
    with pytest.raises(ConfigError, match="chat_options: messages is set already"):
        render(chat_options={"messages": []})
    with pytest.raises(ConfigError, match="no chat template that could read them"):
        render_prompts(
            [record("one")], words_tokenizer(), template="{problem}", max_prompt_tokens=9, chat_options={"brief": True}
        )
    strict = words_tokenizer("{{ raise_exception('no system role') }}")
    with pytest.raises(ConfigError, match="chat template refuses a prompt: no system role"):
        render_prompts([record("one")], strict, template="{problem}", max_prompt_tokens=9)


def test_a_benchmark_is_rendered_whole_or_not_at_all():
    rows = [record("one", 1), record("one two three", 2), record("one", 3)]
    prompts = render_benchmark("mine", rows, words_tokenizer(), template="{problem}", max_prompt_tokens=4)
    assert [p.problem for p in prompts] == ["one", "one two three", "one"]
    with pytest.raises(DataError, match=r"mine: 1 of 3 .*more than 3 tokens, the first is f:2; raise eval"):
        render_benchmark("mine", rows, words_tokenizer(), template="{problem}", max_prompt_tokens=3)
    said = r"1 of 1 prompts hold words that this model's tokenizer does not know \('four'\); .* of its own settings$"
    with pytest.raises(ConfigError, match=said):
        render_benchmark("mine", [record("four")], words_tokenizer(), template="{problem}")
    with pytest.raises(
        ConfigError, match=r"does not know, in what stands around the problem; --data.template '{problem}'"
    ):
        render_benchmark("mine", [record("one")], words_tokenizer(), template="Solve {problem}")


def test_overlong_and_repeated_prompts_are_counted_with_their_rows():
    rows = [record("one", 0), record("one two three", 1), record("one", 2), record("two", 3)]
    prompts, dropped = render_prompts(rows, words_tokenizer(), template="{problem}", max_prompt_tokens=3)
    assert [p.problem for p in prompts] == ["one", "two"]
    assert (dropped.overlong, dropped.repeated) == (("f:1",), ("f:2",))
    assert dropped.report() == "1 prompt over the length limit, 1 prompt repeating an earlier one"
    kept, _ = render_prompts(rows, words_tokenizer(), template="{problem}", max_prompt_tokens=4, unique=False)
    assert [p.problem for p in kept] == ["one", "one two three", "one", "two"]


def test_a_repeated_problem_with_another_answer_is_named_with_the_row_that_is_kept():
    answers = (("2",), ("3",), (" $2$ ", "two"), ("2", "4"))  # the third agrees but for its spelling, the last in part
    rows = [Record("one", answer, "f", f"f:{row}") for row, answer in enumerate(answers, start=1)]
    prompts, dropped = render_prompts(rows, words_tokenizer(), template="{problem}", max_prompt_tokens=3)
    assert [prompt.answers for prompt in prompts] == [("2",)]
    assert (dropped.repeated, dropped.conflicts) == (("f:2", "f:3", "f:4"), (("f:1", "f:2"),))
    assert dropped.report() == (
        "3 prompts repeating an earlier one "
        "(1 with another answer, as f:2, where f:1 is kept; data.clean leaves both out)"
    )


def test_mistakes():
    one = [record("one")]
    with pytest.raises(ConfigError, match=r"template: 'solve it' has no \{problem\}"):
        render_prompts(one, words_tokenizer(), template="solve it", max_prompt_tokens=3)
    with pytest.raises(ConfigError, match="max_prompt_tokens: 0 is below 1"):
        render_prompts(one, words_tokenizer(), template="{problem}", max_prompt_tokens=0)
    with pytest.raises(ConfigError, match="system"):
        render_prompts(one, words_tokenizer(), template="{problem}", max_prompt_tokens=3, system="be brief")
    with pytest.raises(DataError, match=r"none of 1 prompts has at most 1 tokens, the shortest has 2"):
        render_prompts(one, words_tokenizer(), template="{problem}", max_prompt_tokens=1)


def test_real_tokenizer_and_data():
    if "ATTNRL_DATA" not in os.environ:
        pytest.skip("ATTNRL_DATA is not set: the real tokenizer is not here")
    root = Path(os.environ["ATTNRL_DATA"])
    tokenizer = AutoTokenizer.from_pretrained(root / "tokenizers/ds_r1_distill_qwen")
    rows = list(load_records(root / "train/deepscaler_train.parquet"))[:2000]
    template = load_config("").data.template
    prompts, dropped = render_prompts(rows, tokenizer, template=template, max_prompt_tokens=256)
    assert len(prompts) + len(dropped) == 2000
    assert len(dropped.overlong) > 0
    assert len({p.uid for p in prompts}) == len(prompts)
    assert max(len(p.ids) for p in prompts) <= 256
    bos = tokenizer.bos_token_id
    by_problem = {r.problem for r in rows}
    for prompt in prompts:
        assert prompt.ids[0] == bos
        assert bos not in prompt.ids[1:]
        assert prompt.problem in by_problem
    text = tokenizer.decode(prompts[0].ids)
    assert text.count("Let's think step by step") == 1
    assert (
        text
        == f"{tokenizer.bos_token}<｜User｜>{template.replace('{problem}', rows[0].problem)}<｜Assistant｜><think>\n"
    )
