"""The nouns of attnrl, as frozen dataclasses.

Shapes: T tokens of a response, P tokens of a prompt, S steps of a response.
Token ids are int32 arrays, log-probs and scores float32 arrays; arrays in a record are read-only by convention.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int32]
Floats = NDArray[np.float32]
Finish = Literal["stop", "length"]


def as_ids(ids: Sequence[int] | NDArray[Any]) -> Ids:
    """The token ids as an int32 array that nobody can write to: parts and engines share it.

    >>> as_ids([1, 2]).dtype
    dtype('int32')
    >>> as_ids([1, 2])[0] = 3
    Traceback (most recent call last):
    ValueError: assignment destination is read-only
    """
    return _shared(np.asarray(ids, dtype=np.int32))


def as_floats(values: Sequence[float] | NDArray[Any]) -> Floats:
    """The values as a float32 array that nobody can write to."""
    return _shared(np.asarray(values, dtype=np.float32))


def _shared(array: NDArray[Any]) -> NDArray[Any]:
    """A view that cannot be written to; the array itself stays as it is for its owner."""
    view = array.view()
    view.flags.writeable = False
    return view


def as_metrics(values: Any) -> dict[str, float]:
    """Metrics as Python's own floats, from numbers of any kind; TypeError for anything else.

    >>> as_metrics({"policy/loss": np.float32(0.5), "mine/calls": 2})
    {'policy/loss': 0.5, 'mine/calls': 2.0}
    """
    if not isinstance(values, Mapping):
        raise TypeError(f"a dict of numbers by their name `group/name`, not {type(values).__name__}")
    found = {}
    for name, value in values.items():
        try:
            if not isinstance(name, str) or isinstance(value, str | bytes):
                raise TypeError
            found[name] = float(value)
        except (TypeError, ValueError):
            raise TypeError(f"a number for each name: {name!r} is {str(value)[:60]!r}") from None
    return found


def counted(number: int, noun: str) -> str:
    """A number and what it counts, as a message says them.

    >>> counted(1, "iteration"), counted(2, "further copy")
    ('1 iteration', '2 further copies')
    """
    many = f"{noun[:-1]}ies" if noun.endswith("y") else f"{noun}s"
    return f"{number} {noun if number == 1 else many}"


def content_hash(*parts: str) -> str:
    """A 16-digit identity of texts: what a prompt is, not where it stood in a file.

    >>> content_hash("1+1?") == content_hash("1+1?") != content_hash("1+2?")
    True
    """
    digest = hashlib.sha256("\x00".join(parts).encode("utf-8", "surrogatepass"))
    return digest.hexdigest()[:16]


@dataclass(frozen=True, slots=True, eq=False)
class Prompt:
    """One problem, templated, with token ids and reference answers (the paper's q and s_1).

    >>> Prompt(uid=content_hash("1+1?"), ids=as_ids([5, 6]), answers=("2",), problem="1+1?").source
    ''
    """

    uid: str  # identity by content
    ids: Ids  # [P] chat template applied
    answers: tuple[str, ...]  # alternatives, each right
    problem: str = ""  # the problem's own words, without template
    source: str = ""  # data set it came from
    row: dict[str, Any] = field(default_factory=dict)  # the other columns of its row, as JSON holds them


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are drawn. top_p = 1 and top_k = 0 switch truncation off.

    >>> Sampling().temperature
    1.0
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """One response to draw: the context so far, how many tokens may follow, and its own random stream.

    The context of a trunk is the prompt; the context of a branch is the prompt and the kept part of its trunk.

    >>> Request(context=as_ids([5, 6]), max_tokens=8, seed=1).max_tokens
    8
    """

    context: Ids  # [P] or [P + kept response tokens]
    max_tokens: int  # at least 1
    seed: int  # the draw depends on context, weights and this seed alone
    tree: str = ""  # "uid/trunk": a trunk and its branches name the same, for engines that route or cache by it


@dataclass(frozen=True, slots=True, eq=False)
class Rollout:
    """One sampling event: tokens drawn, their log-probs at that moment, finish reason, policy version.

    >>> Rollout(ids=as_ids([7, 2]), logprobs=as_floats([-0.1, -0.2]), finish="stop", version=0).finish
    'stop'
    """

    ids: Ids  # [T] drawn tokens, the stop token included
    logprobs: Floats  # [T] under the true sampling distribution
    finish: Finish
    version: int  # of the policy that drew it


@dataclass(frozen=True, slots=True)
class Step:
    """A reasoning step o_k: the half-open token range [start, stop) of a response.

    >>> Step(0, 4).tokens
    4
    """

    start: int
    stop: int
    thinking: bool = True  # False from the step that holds </think> on

    @property
    def tokens(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True, eq=False)
class Attempt:
    """A finished response as a reward sees it, with all that is known of its problem.

    >>> Attempt("1+1?", ("2",), "It is 2.", row={"level": 1}).row["level"]
    1
    """

    problem: str  # own words, without template
    answers: tuple[str, ...]  # alternatives, each right
    response: str  # the whole response; of a branch, prefix and continuation
    finish: Finish | None = "stop"  # "length": cut off by the length limit; None: not known
    tokens: int = 0  # of the response; 0: not known
    row: Mapping[str, Any] = field(default_factory=dict)  # the other columns of the problem's row

    @classmethod
    def of(cls, prompt: Prompt, response: Ids, finish: Finish, decode: Callable[[Ids], str]) -> Attempt:
        """What the whole response to a prompt is to a reward."""
        return cls(prompt.problem, prompt.answers, decode(response), finish, len(response), prompt.row)


RIGHT_ABOVE = 0.5  # a reward above this is that of a right answer, where nothing else says what right is


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a response earns, and whether it is right. Values and advantages use `reward`, difficulty and solve ratios
    `right`. The error kind is kept apart from "wrong": a failure of ours is no evidence.

    >>> Verdict(reward=1.0, rule="number", answer="4").right, Verdict(reward=0.9, rule="tests", right=False).right
    (True, False)
    """

    reward: float
    rule: str  # the rule that decided
    answer: str | None = None  # the extracted answer
    error: str | None = None  # None, or what of ours failed: "crash", "timeout", ...
    right: bool = None  # type: ignore[assignment]  # None: whether the reward is above RIGHT_ABOVE
    parts: dict[str, float] = field(default_factory=dict)  # the rewards it is the weighted sum of, by name

    def __post_init__(self) -> None:
        if self.right is None:
            object.__setattr__(self, "right", self.reward > RIGHT_ABOVE)


Grade = Callable[[Sequence[Attempt]], list[Verdict]]


@dataclass(frozen=True, slots=True)
class Scoring:
    """What a scoring forward is asked for.

    >>> Scoring(fci=False).delta
    4
    """

    fci: bool = True  # False: log-probs and entropy only
    delta: int = 4  # steps between a step and the text whose attention counts, Delta of Eq. 5
    key_reduce: Literal["mean", "sum"] = "mean"  # over the tokens of the step attended to
    temperature: float = 1.0  # of the sampler: scores are those of the distribution drawn from


@dataclass(frozen=True, slots=True, eq=False)
class ScoreRequest:
    """One finished response to score in a forward pass."""

    prompt: Ids  # [P]
    response: Ids  # [T]
    steps: tuple[Step, ...]  # partition of the response


@dataclass(frozen=True, slots=True, eq=False)
class Scores:
    """What one forward pass says of a response.

    >>> Scores(as_floats([-0.1]), as_floats([0.3]), as_floats([0.0])).fci.shape
    (1,)
    """

    logprobs: Floats  # [T] of the response tokens under the learner
    entropy: Floats  # [T] of the next-token distribution, nats
    fci: Floats  # [S] Forward Context Influence of each step (Eq. 6)


@dataclass(frozen=True, slots=True, eq=False)
class Trunk:
    """A rollout from the bare prompt, verified, cut into steps and scored.

    >>> rollout = Rollout(as_ids([3, 4, 2]), as_floats([-1, -2, -3]), "stop", 0)
    >>> scores = Scores(rollout.logprobs, as_floats([1, 1, 1]), as_floats([0.5, 0.0]))
    >>> trunk = Trunk(rollout, Verdict(1.0, "number", "4"), (Step(0, 2), Step(2, 3)), scores)
    >>> trunk.reward
    1.0
    """

    rollout: Rollout
    verdict: Verdict
    steps: tuple[Step, ...]
    scores: Scores

    @property
    def reward(self) -> float:
        return self.verdict.reward

    @property
    def right(self) -> bool:
        return self.verdict.right


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """The G trunks of one prompt."""

    prompt: Prompt
    trunks: tuple[Trunk, ...]

    @property
    def accuracy(self) -> float:
        """Share of right trunks, the paper's z."""
        return sum(t.right for t in self.trunks) / len(self.trunks)


@dataclass(frozen=True, slots=True, eq=False)
class Kept:
    """What a prompt filter decides of a batch of groups, and what it remembers for the next batch."""

    mask: tuple[bool, ...]  # one entry a group: whether it is branched and trained on
    memory: dict[str, Any]  # as JSON holds it
    reasons: tuple[str, ...]  # one entry a group: why it was dropped; "" where it was kept


@dataclass(frozen=True, slots=True, eq=False)
class Branch:
    """A rollout that keeps the trunk's tokens before `point` and draws the rest anew.

    >>> Branch(2, Rollout(as_ids([9]), as_floats([-1]), "stop", 1), Verdict(0.0, "number")).point
    2
    """

    point: int  # token offset in the trunk's response
    rollout: Rollout
    verdict: Verdict

    @property
    def reward(self) -> float:
        return self.verdict.reward

    @property
    def right(self) -> bool:
        return self.verdict.right


@dataclass(frozen=True, slots=True, eq=False)
class Tree:
    """A trunk with its branches; without branches, a tree of one leaf."""

    trunk: Trunk
    branches: tuple[Branch, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class Forest:
    """All trees of one prompt. Its root is the prompt, s_1."""

    prompt: Prompt
    trees: tuple[Tree, ...]
    reason: str = ""  # why the filter dropped its prompt; "": it was not dropped


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """One training row: a path from the root to a leaf.

    >>> Sample(as_ids([5]), as_ids([7, 2]), as_floats([0, 0]), as_floats([-1, -1]), uid="q").has_signal
    False
    """

    prompt: Ids  # [P]
    response: Ids  # [T]
    advantages: Floats  # [T]
    logprobs: Floats  # [T] of the policy that drew each token
    uid: str  # of the prompt: minibatches keep its samples together where they can
    mask: NDArray[np.bool_] | None = None  # [T] tokens that carry loss; None: all

    @property
    def has_signal(self) -> bool:
        """Some token that carries loss has a non-zero advantage (the paper's "valid")."""
        carries = self.advantages if self.mask is None else self.advantages[self.mask]
        return bool(np.any(carries))


@dataclass(frozen=True, slots=True, eq=False)
class State:
    """Everything of the algorithm that one iteration hands to the next; all of it is in the checkpoint.

    >>> State(batch_size=64.0).iteration
    0
    """

    batch_size: float  # B_m of Eq. 10, in prompts, never rounded here
    iteration: int = 0  # iterations done
    waiting: tuple[Group, ...] = ()  # trunks that wait for their branches
    memory: dict[str, Any] = field(default_factory=dict)  # of the prompt filter: the running mean of Eq. 8
    stream: dict[str, Any] = field(default_factory=dict)  # position of the prompt stream
    rng: dict[str, Any] = field(default_factory=dict)  # bit generator state of the run
    generated_tokens: int = 0  # drawn since the start
