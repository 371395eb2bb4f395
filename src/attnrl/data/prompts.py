r"""Records to prompts: the template, the model's chat template, token ids, and the filter on length."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from attnrl.data.audit import Duplicate
from attnrl.data.records import Record
from attnrl.errors import ConfigError, DataError, listed, near
from attnrl.types import Prompt, as_ids, content_hash, counted

_CHUNK = 512  # prompts tokenized at once
_SET = {"tokenize", "add_generation_prompt", "conversation", "messages", "return_tensors"}  # not to be set again
_GIVEN = _SET | {"tools", "documents", "raise_exception", "strftime_now"}  # to every chat template, by transformers


@dataclass(frozen=True, slots=True)
class Dropped:
    """Records that became no prompt: their rows, by reason.

    >>> Dropped(overlong=("a.jsonl:3",)).report()
    '1 prompt over the length limit'
    """

    overlong: tuple[str, ...] = ()  # more than max_prompt_tokens
    repeated: tuple[str, ...] = ()  # the same problem as an earlier record
    conflicts: tuple[tuple[str, str], ...] = ()  # of these, the earlier one that is kept and one with another answer

    def __len__(self) -> int:
        return len(self.overlong) + len(self.repeated)

    def report(self) -> str:
        """What was dropped, for the console; empty if nothing was."""
        other, number = "", len(self.conflicts)
        for kept, left in self.conflicts[:1]:
            other = f" ({number} with another answer, as {left}, where {kept} is kept; data.clean leaves both out)"
        counts = (
            (len(self.overlong), "over the length limit"),
            (len(self.repeated), f"repeating an earlier one{other}"),
        )
        return ", ".join(f"{counted(n, 'prompt')} {why}" for n, why in counts if n)


def render_prompts(
    records: Sequence[Record],
    tokenizer: Any,
    *,
    template: str,
    max_prompt_tokens: int,
    system: str | None = None,
    chat_options: Mapping[str, Any] | None = None,
    unique: bool = True,
) -> tuple[list[Prompt], Dropped]:
    """The prompts of the records, and what was dropped.

    `{problem}` in the template is replaced as it stands; all other braces are the user's own. The text is one user
    message of the tokenizer's chat template, where it has one. A row's own system message stands before it, `system`
    instead of it ("": none), and `chat_options` go to the chat template. A prompt's uid is the hash of its problem and
    of the row's own system message, where it has one. `unique` keeps the first of several records with one uid, so that
    it names one prompt; benchmarks set it to False to keep their rows.
    """
    if "{problem}" not in template:
        raise ConfigError(f"template: {template!r} has no {{problem}}; write it where the problem goes")
    if max_prompt_tokens < 1:
        raise ConfigError(f"max_prompt_tokens: {max_prompt_tokens} is below 1")
    uses_chat = bool(getattr(tokenizer, "chat_template", None))
    options = dict(chat_options or {})
    _check_chat(records, uses_chat, system, options)
    if uses_chat:
        _check_read(tokenizer, options)
    prompts: list[Prompt] = []
    overlong: list[str] = []
    repeated: list[str] = []
    conflicts: list[tuple[str, str]] = []
    seen: dict[str, Record] = {}
    shortest = 0
    for start in _track(range(0, len(records), _CHUNK), "tokenizing prompts", len(records) > 4 * _CHUNK):
        chunk = records[start : start + _CHUNK]
        texts = [template.replace("{problem}", record.problem) for record in chunk]
        systems = [record.system if system is None else system or None for record in chunk]
        rendered = _render_chats(texts, systems, tokenizer, options) if uses_chat else texts
        for record, ids in zip(chunk, _token_ids(rendered, tokenizer, uses_chat), strict=True):
            own = () if system is not None or record.system is None else (record.system,)
            uid = content_hash(record.problem, *own)
            if unique and uid in seen:
                repeated.append(record.where)
                if Duplicate((seen[uid], record)).disagree():
                    conflicts.append((seen[uid].where, record.where))
            elif len(ids) > max_prompt_tokens:
                overlong.append(record.where)
                shortest = min(shortest or len(ids), len(ids))
            else:
                seen[uid] = record
                prompts.append(Prompt(uid, as_ids(ids), record.answers, record.problem, record.source, record.info))
    if records and not prompts:
        raise DataError(
            f"{records[0].source}: none of {len(records)} prompts has at most {max_prompt_tokens} tokens, "
            f"the shortest has {shortest}; raise max_prompt_tokens"
        )
    return prompts, Dropped(tuple(overlong), tuple(repeated), tuple(conflicts))


def render_benchmark(
    name: str,
    records: Sequence[Record],
    tokenizer: Any,
    *,
    max_prompt_tokens: int = 4096,
    **words: Any,
) -> list[Prompt]:
    """The prompts of a benchmark, one per row: leaving a problem out would change it, so an over-long one raises.

    `words` are the template, system message and chat options of `render_prompts`.
    """
    prompts, dropped = render_prompts(records, tokenizer, max_prompt_tokens=max_prompt_tokens, unique=False, **words)
    if dropped:
        raise DataError(
            f"benchmark {name}: {len(dropped)} of {len(records)} prompts have more than {max_prompt_tokens} tokens, "
            f"the first is {dropped.overlong[0]}; raise evaluation.max_prompt_tokens (--max-prompt-tokens)"
        )
    if said := unknown_words(prompts, tokenizer):
        raise ConfigError(f"benchmark {name}: {said}")
    return prompts


def strange_to(tokenizer: Any, prompts: Sequence[Prompt]) -> list[Prompt]:
    """The prompts that hold words which the tokenizer does not know."""
    unknown = getattr(tokenizer, "unk_token_id", None)
    return [] if unknown is None else [prompt for prompt in prompts if (prompt.ids == unknown).any()]


def unknown_words(prompts: Sequence[Prompt], tokenizer: Any) -> str:
    """How many prompts hold words that the tokenizer does not know, which, and what helps; empty where none does."""
    unknown, strange = getattr(tokenizer, "unk_token_id", None), strange_to(tokenizer, prompts)
    if not strange:
        return ""
    said = f"{len(strange):,} of {len(prompts):,} prompts hold words that this model's tokenizer does not know"
    if not getattr(tokenizer, "is_fast", False):
        return f"{said}, first in {strange[0].problem[:60]!r} or around it"
    problem = strange[0].problem
    found = tokenizer(problem, add_special_tokens=False, return_offsets_mapping=True)
    pairs = zip(found["input_ids"], found["offset_mapping"], strict=True)
    words = dict.fromkeys(problem[start:stop].strip() for token, (start, stop) in pairs if token == unknown)
    if words:
        first = ", ".join(map(repr, list(words)[:3]))
        return f"{said} ({first}); a model of made-up tasks needs tasks of its own settings"
    return f"{said}, in what stands around the problem; --data.template '{{problem}}' leaves data.template's words out"


def _check_chat(records: Sequence[Record], uses_chat: bool, system: str | None, options: Mapping[str, Any]) -> None:
    if taken := _SET & options.keys():
        raise ConfigError(f"chat_options: {min(taken)} is set already; give options that the template itself reads")
    if uses_chat:
        return
    if options:
        raise ConfigError("chat_options: this tokenizer has no chat template that could read them; leave them out")
    if system:
        raise ConfigError("system: a system message needs a chat template; put it into the template instead")
    if system is None and (own := next((record for record in records if record.system is not None), None)):
        raise DataError(
            f"{own.where}: the row has a system message, and this tokenizer has no chat template to write it; "
            'leave such messages out (data.system = "") or put the words into data.template'
        )


def _check_read(tokenizer: Any, options: Mapping[str, Any]) -> None:
    """Raise where an option is none that the chat template reads: Jinja takes any name, and would leave it unread."""
    read = _variables(tokenizer, options)
    unread = [] if read is None else sorted(options.keys() - read - {"chat_template"})
    if read is not None and unread:
        known = sorted(read - _GIVEN - set(getattr(tokenizer, "special_tokens_map", ())))
        raise ConfigError(
            f"data.chat_options.{unread[0]}: the model's chat template does not read it, so it would change nothing; "
            f"it reads {listed(known)}{near(unread[0], known)}"
        )


def _variables(tokenizer: Any, options: Mapping[str, Any]) -> set[str] | None:
    """The names that the chat template of these options reads; None where its source does not tell."""
    from jinja2 import Environment, TemplateError
    from jinja2.meta import find_referenced_templates, find_undeclared_variables
    from transformers import PreTrainedTokenizerBase

    if getattr(type(tokenizer), "apply_chat_template", None) is not PreTrainedTokenizerBase.apply_chat_template:
        return None  # a tokenizer that writes chats in its own way
    try:
        source = tokenizer.get_chat_template(options.get("chat_template"), options.get("tools"))
    except ValueError as error:
        raise ConfigError(f"data.chat_options: {error}") from None
    try:  # {% generation %} is a tag of transformers' own, and sets nothing
        source = re.sub(r"\{%-?\s*(end)?generation\s*-?%\}", "", source)
        tree = Environment(extensions=["jinja2.ext.loopcontrols"]).parse(source)
    except TemplateError:
        return None  # rendering says what is wrong with it
    return None if any(find_referenced_templates(tree)) else find_undeclared_variables(tree)


def _render_chats(texts: list[str], systems: list[str | None], tokenizer: Any, options: Mapping[str, Any]) -> list[str]:
    """The texts as the chat template writes them, opened for the response."""
    from jinja2 import TemplateError

    rendered: list[str] = []
    for text, system in zip(texts, systems, strict=True):
        chat = [] if system is None else [{"role": "system", "content": system}]
        chat.append({"role": "user", "content": text})
        try:
            rendered.append(tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True, **options))
        except TemplateError as error:
            what = "a system message" if system is not None else "a prompt"
            message = f"the model's chat template refuses {what}: {error}; see data.system and data.chat_options"
            raise ConfigError(message) from error
    return rendered


def _token_ids(texts: list[str], tokenizer: Any, uses_chat: bool) -> list[list[int]]:
    if uses_chat:
        # the chat template wrote every special token itself; asking for them again would double the BOS token
        return [list(row) for row in tokenizer(texts, add_special_tokens=False)["input_ids"]]
    ids = [list(row) for row in tokenizer(texts, add_special_tokens=True)["input_ids"]]
    # a tokenizer may close a text with EOS; a prompt that ends so tells the model that the response is over
    eos = getattr(tokenizer, "eos_token_id", None)
    return [row[:-1] if len(row) > 1 and row[-1] == eos else row for row in ids]


def _track(steps: range, label: str, shown: bool) -> Any:
    if not shown:
        return steps
    from rich.console import Console
    from rich.progress import track

    console = Console(stderr=True)
    return track(steps, label, console=console, transient=True, disable=not console.is_terminal)
