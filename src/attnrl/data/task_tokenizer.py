"""A word-level tokenizer of the task language: every word, number and blank line is one token, nothing is lost.

A space belongs to the word after it (" coins"), so that decoding is plain concatenation. Texts outside the task
language become <unk>.

Trap: transformers' AutoTokenizer replaces the tokenizer of every directory whose config.json says `qwen2` by its own
Qwen2Tokenizer, whatever tokenizer_config.json asks for, and that one drops spaces and line breaks of this language.
Use a Qwen3 or Llama model with it (tested), or load it by `PreTrainedTokenizerFast.from_pretrained`.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from attnrl.config import TaskConfig
from attnrl.data.forks import WORDS
from attnrl.data.tasks import LINES, MODULUS, NAMES, QUESTION, SENTENCES

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

SPECIAL = ("<pad>", "<eos>", "<bos>", "<unk>")
SOLUTION_WORDS = "\n".join(
    ("Plan: from and, known.\n", "Take = + - *", "Then", "Check: = , right, not", "So = \\boxed{}.")
)  # fixed words of a solution, each after the space or line break it follows there
# A problem ends its turn with a line break: the response starts on a line of its own.
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% else %}{{ '\\n' }}{% endif %}{% endfor %}"
)


def token_pattern(spec: TaskConfig) -> str:
    """The regular expression of one token; with a modulus a number is one token, otherwise a digit is."""
    number = r" ?[0-9]" if spec.modulus is None else r" ?[0-9]+"
    return rf" ?\\boxed\{{| ?[A-Za-z]+|{number}|\n\n|\n| ?[=+*-]|[.,:?}}]"


def vocabulary(spec: TaskConfig) -> list[str]:
    """The token texts of the task language, special tokens first.

    >>> vocabulary(TaskConfig(modulus=11))[:4]
    ['<pad>', '<eos>', '<bos>', '<unk>']
    >>> "\\n\\n" in vocabulary(TaskConfig()) and " 22" in vocabulary(TaskConfig()) and " 23" in vocabulary(TaskConfig())
    True
    """
    templates = [*SENTENCES.values(), *LINES.values(), MODULUS, QUESTION]
    blank = dict.fromkeys(("name", "first", "second", "value", "modulus"), "")
    texts = [template.format(**blank) for template in templates]
    words: dict[str, None] = {}
    for text in [*texts, SOLUTION_WORDS, *([f" {WORDS}"] if spec.forks else [])]:
        words.update(dict.fromkeys(re.findall(token_pattern(spec), text)))
    words.update(dict.fromkeys((" There", "There", " How", "How")))  # a sentence may open the problem or not
    count = 10 if spec.modulus is None else spec.modulus
    numbers = [str(n) for n in range(count)] + [f" {n}" for n in range(count)]
    if spec.modulus is not None:
        numbers.append(f" {spec.modulus}")
    return [*SPECIAL, *words, *numbers, *(f" {name}" for name in NAMES[: spec.names])]


def task_tokenizer(spec: TaskConfig | None = None) -> PreTrainedTokenizerFast:
    """A transformers tokenizer of the task language of `spec`; its chat template is the problem and a line break.

    Prompt and response meet at a line break, so encoding them apart or together gives the same ids.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    spec = spec or TaskConfig()
    ids = {word: i for i, word in enumerate(vocabulary(spec))}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(token_pattern(spec)), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<eos>",
        bos_token="<bos>",
        unk_token="<unk>",
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
        padding_side="left",
    )
