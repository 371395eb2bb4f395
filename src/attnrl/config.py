"""The whole configuration: frozen, typed, ranges on fields; defaults < TOML < flags.

A preset is a sparse TOML file: it holds only what differs from the defaults below, or from the preset it names as
`base`. Unknown keys and values out of range raise ConfigError, which names the key.
"""

from __future__ import annotations

import difflib
import json
import tomllib
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from attnrl.errors import ConfigError, MissingFileError

# A list of names, or one name by itself: `--data.train rows.parquet`.
Names = Annotated[tuple[str, ...], BeforeValidator(lambda value: (value,) if isinstance(value, str) else value)]


# A key that only says how to execute, or how far a run goes: a resumed run may have another value.
MAY_CHANGE: dict[str, Any] = {"may_change": True}


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)


class ModelConfig(Section):
    """The policy."""

    path: str = Field("deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B", min_length=1)
    """Directory or hub name of a Hugging Face decoder-only model; "demo" is the tiny model shipped with attnrl."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Weights of the policy; optimizer state is float32 always. auto: bfloat16 on CUDA, float32 on CPU."""
    lora_rank: int = Field(0, ge=0)
    """Rank of LoRA adapters; 0 trains full weights."""
    lora_alpha: float = Field(32.0, gt=0)
    """Scale of LoRA adapters."""
    lora_targets: Names = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    """Linear layers that get LoRA adapters."""


class LocalConfig(Section):
    """The engine on one machine, CPU or one CUDA GPU."""

    sampler: Literal["auto", "own", "vllm"] = "auto"
    """What draws responses: own, vllm (extra vllm, CUDA), or auto: the one that was measured to be faster here."""
    device: str = "auto"
    """auto (CUDA where there is one), cpu, cuda."""
    threads: int | None = Field(None, ge=1, json_schema_extra=MAY_CHANGE)
    """CPU threads of torch; None: torch's own choice. Tiny models gain little from a second one."""
    rows: int = Field(256, ge=1, json_schema_extra=MAY_CHANGE)
    """Responses drawn at the same time."""


class VerlConfig(Section):
    """The engine on a cluster: verl with Ray, FSDP2 and vLLM (extra verl)."""

    nodes: int = Field(1, ge=1, json_schema_extra=MAY_CHANGE)
    """Machines."""
    gpus_per_node: int = Field(8, ge=1, json_schema_extra=MAY_CHANGE)
    """GPUs, and ranks, of each."""
    overrides: Names = Field((), json_schema_extra=MAY_CHANGE)
    """Further settings of verl, as `key=value`."""
    phase_limit_s: float = Field(3600.0, gt=0, json_schema_extra=MAY_CHANGE)
    """Longest time of one start, generation, sync, scoring, update or checkpoint, seconds; then stack traces, and the
    run ends."""


class EngineConfig(Section):
    """What runs generate, score and update; a preset may hold settings of several."""

    name: str = "local"
    """local, verl, or your own as package.module:factory."""
    options: dict[str, Any] = {}
    """Keyword options of your own factory."""
    local: LocalConfig = LocalConfig()
    verl: VerlConfig = VerlConfig()


TaskKind = Literal["more", "fewer", "times", "plus", "minus"]
Fork = Literal["hub", "method", "turn", "pair"]


def _within(bottom: int, top: int) -> AfterValidator:
    """A check that a pair is a range within these bounds."""

    def check(pair: tuple[int, int]) -> tuple[int, int]:
        if not bottom <= pair[0] <= pair[1] <= top:
            raise PydanticCustomError("range", f"give a range within {bottom} to {top}, smallest first")
        return pair

    return AfterValidator(check)


class TaskConfig(Section):
    """Made-up dependency-graph tasks; used where data.train or evaluation.benchmarks names "tasks".

    Ranges are inclusive.

    >>> TaskConfig(operations=(2, 4), modulus=11).numbers
    11
    """

    operations: Annotated[tuple[int, int], _within(1, 20)] = (4, 12)
    """Fewest and most computations the asked quantity needs, within 1 to 20."""
    modulus: int | None = Field(23, ge=5, le=1000)
    """Counts are taken modulo this, so that small models can learn single steps; None: plain counts."""
    largest: int = Field(99, ge=18)
    """Largest count where there is no modulus."""
    distractors: Annotated[tuple[int, int], _within(0, 20)] = (0, 4)
    """Fewest and most quantities that are not needed."""
    sides: Annotated[tuple[int, int], _within(0, 4)] = (0, 1)
    """Fewest and most side chains that join the main chain."""
    givens: int = Field(3, ge=0)
    """Most given counts that serve as second operands."""
    checks: Annotated[tuple[int, int], _within(0, 20)] = (0, 2)
    """Fewest and most re-computations of an earlier count in a solution."""
    slips: float = Field(0.0, ge=0, lt=1)
    """Chance that a computation of a solution first goes wrong and is corrected by a check."""
    errors: float = Field(0.0, ge=0, lt=1)
    """Chance that a computation of a solution goes wrong and stays so; problems and answers are not touched."""
    plan_entries: int = Field(3, ge=1)
    """Quantities per step of a solution's plan."""
    wording: Literal["sentences", "list", "equations"] = "sentences"
    """How problems read; equations are quoted word for word by the solutions, which is easiest for small models."""
    kinds: tuple[TaskKind, ...] = ("more", "fewer", "times", "plus", "minus")
    """Operations in use; more and fewer always are."""
    names: int = Field(40, ge=2, le=40)
    """Size of the vocabulary of names."""
    forks: tuple[Fork, ...] = ()
    """Kinds of decisive step, drawn at random: hub, method, turn, pair; none: tasks without one. docs/tasks.md."""
    routine: Annotated[tuple[int, int], _within(0, 20)] = (2, 8)
    """With forks: fewest and most computations before the decision; `operations` come after it."""
    doubts: float = Field(0.0, ge=0, le=2 / 3)
    """With forks: mean chance that a solution decides wrongly; problems and answers are not touched."""
    style: int = Field(1, ge=1, le=4)
    """With forks: number of words that may open a step of a solution."""
    seed: int = 0
    """Seed of the generator; train and test are disjoint for any two seeds."""

    @property
    def most_names(self) -> int:
        """The number of names the largest task of this kind uses."""
        if self.forks:
            return self.routine[1] + self.operations[1] + 6
        return self.operations[1] + 1 + self.sides[1] + self.givens + self.distractors[1]

    @property
    def numbers(self) -> int:
        """The number of counts that can occur: 0 to numbers - 1."""
        return self.largest + 1 if self.modulus is None else self.modulus

    @model_validator(mode="after")
    def _fit_together(self) -> Self:
        if self.errors and self.modulus is None:
            raise PydanticCustomError("tasks", "errors above 0 need a modulus")
        if not {"more", "fewer"} <= set(self.kinds):
            raise PydanticCustomError("tasks", "kinds must hold 'more' and 'fewer'")
        if self.sides[1] and not {"plus", "minus"} & set(self.kinds):
            raise PydanticCustomError("tasks", "sides above 0 need 'plus' or 'minus' among the kinds: they join by it")
        if self.forks and (self.modulus is None or self.modulus % 2 == 0 or self.wording != "equations"):
            raise PydanticCustomError("tasks", "forks need an odd modulus and wording = 'equations'")
        if self.most_names > self.names:
            parts = "routine + operations + 6" if self.forks else "operations + 1 + sides + givens + distractors"
            need = f"these tasks need {self.most_names} names ({parts})"
            raise PydanticCustomError("tasks", f"{need} and there are {self.names}; lower one of the ranges")
        return self


class DataConfig(Section):
    """Prompts."""

    train: Names = ("agentica-org/DeepScaleR-Preview-Dataset",)
    """Files (parquet, json, jsonl, .gz), hub names, or "tasks"."""
    train_tasks: int = Field(20_000, ge=1)
    """How many made-up tasks to train on, where train names "tasks"."""
    template: str = "{problem} Let's think step by step and output the final answer within \\boxed{}."
    """Text around a problem, before the model's chat template. Paper: Table 5."""
    max_prompt_tokens: int = Field(1024, ge=1)
    """Longer prompts are left out, and counted."""
    columns: dict[Literal["problem", "answer"], str] = {}
    """Columns that hold problem and answer, where they have names of their own: {problem = "...", answer = "..."}."""
    system: str | None = None
    """System message before every problem; None: the row's own, where it has one."""
    chat_options: dict[str, Any] = {}
    """Options of the model's chat template, such as {enable_thinking = false}."""
    drop_bad_rows: bool = False
    """Leave out rows without a problem or an answer and say which; otherwise the first one is an error."""
    decontaminate: Names = ()
    """Benchmarks whose problems are dropped from the training set."""
    clean: bool = False
    """Leave out problems that state their answer, that have conflicting answers, and repeated ones."""
    directory: str | None = None
    """Folder with eval/*.parquet; by default the environment variable ATTNRL_DATA, then the hub."""
    tasks: TaskConfig = TaskConfig()


class SamplingConfig(Section):
    """How responses are drawn in training."""

    temperature: float = Field(1.0, gt=0)
    """Softmax temperature."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Nucleus; training takes 1 only: a truncated distribution is not the learner's, and ratios would be wrong."""
    top_k: int = Field(0, ge=0)
    """As top_p; training takes 0 only, no truncation."""
    max_response_tokens: int = Field(8192, ge=1)
    """Response limit, tokens; a branch may use what its prefix left of it."""

    @field_validator("top_p", "top_k")
    @classmethod
    def _draws_what_the_learner_learns(cls, value: float, info: ValidationInfo) -> float:
        whole = cls.model_fields[info.field_name or ""].default
        if value != whole:
            raise ValueError(
                f"must be {whole} in training: log-probs of a truncated distribution are not the learner's, so "
                f"probability ratios would be wrong; use sampling.temperature here, evaluation.top_p for evaluation"
            )
        return value


class RewardConfig(Section):
    """One reward of a response; several add up by weight."""

    name: str
    """math (the verifier), exact, format, overlong, gym, or your own as package.module:function."""
    weight: float = 1.0
    """Factor in the sum of all rewards."""
    options: dict[str, Any] = {}
    """Keyword options of the reward."""


def as_rewards(value: Any) -> Any:
    """A list of rewards from a name, a table, or a list of either."""
    rows = value if isinstance(value, list | tuple) else [value]
    return tuple({"name": row} if isinstance(row, str) else row for row in rows)


class AlgoConfig(Section):
    """The algorithm: parts by name, and their knobs."""

    schedule: str = "one_step_off_policy"
    """One generation call an iteration (one_step_off_policy, Sec. 3.3); trunks, then branches, then update (on_policy);
    the same with prompts drawn until a batch has signal (dynamic, DAPO); or package.module:function."""
    prompts: int = Field(64, ge=1)
    """Prompts of the first batch, and the target train batch in prompts."""
    group: int = Field(6, ge=1)
    """Trunks per prompt, G."""
    segmenter: str = "blank_lines"
    """How responses become steps: blank_lines, lines, sentences, every_n_tokens, or package.module:function."""
    segmenter_options: dict[str, Any] = {}
    """Keyword options of the segmenter."""
    delta: int = Field(4, ge=1)
    """Steps between a step and the text whose attention counts, Delta of Eq. 5."""
    key_reduce: Literal["mean", "sum"] = "mean"
    """Over the tokens of the step attended to."""
    mode: Literal["paper", "released"] = "paper"
    """Whether steps that cannot branch are left out of quantile and mean FCI, or count as zeros."""
    rule: str = "fci"
    """Where to branch: fci, surprisal, entropy, random_steps, uniform, every_step, fixed_segments, low_probability,
    none; the controls first_steps, position, fci_residual, fci_mean, step_entropy, oracle (docs/results.md); or
    package.module:function."""
    rule_options: dict[str, Any] = {}
    """Keyword options of the rule."""
    points: int = Field(2, ge=1)
    """Branch points per tree, N."""
    width: int = Field(2, ge=1)
    """New branches per point."""
    top_fraction: float = Field(0.2, gt=0, le=1)
    """Share of steps that are candidates, rho of Eq. 7."""
    min_gap_tokens: int = Field(0, ge=0)
    """Smallest distance of branch points from the start and each other, tokens."""
    filter: str = "attention"
    """Which prompts are branched and trained on: attention (Eq. 8), all, not_all_right (Sec. 4.3), has_spread (DAPO),
    or package.module:function."""
    filter_options: dict[str, Any] = {}
    """Keyword options of the filter: scope = "easy" (prompts with all trunks right) or "all" for attention."""
    budget: str = "difficulty"
    """Trees per prompt (Eq. 9): difficulty, all, or package.module:function."""
    budget_options: dict[str, Any] = {}
    """Keyword options of the budget rule."""
    adaptive_batch: bool = True
    """Follow Eq. 10; otherwise every batch has `prompts` prompts."""
    history: float = Field(0.9, ge=0, lt=1)
    """Weight of the last batch size, lambda of Eq. 10."""
    max_prompts: int = Field(256, ge=1)
    """Upper bound of the batch size, prompts."""
    estimator: str = "tree"
    """Advantages: tree (Eq. 3), grpo, treerl, edge, treepo, tree_grpo, chain, fr3e, or package.module:function."""
    estimator_options: dict[str, Any] = {}
    """Keyword options of the estimator."""
    credit: str = "none"
    """Weights on each token's advantage: none, top_entropy (arXiv 2506.01939), or package.module:function."""
    credit_options: dict[str, Any] = {}
    """Keyword options of the credit."""
    drop: Literal["samples", "prompts", "none"] = "samples"
    """What is left out of the update for want of signal."""
    grade_truncated: bool = False
    """Grade responses cut off by the length limit; otherwise they count as wrong."""

    @model_validator(mode="after")
    def _batch_fits(self) -> AlgoConfig:
        if self.prompts > self.max_prompts:
            raise ValueError(f"prompts = {self.prompts} is above max_prompts = {self.max_prompts}; raise that too")
        return self


class UpdateConfig(Section):
    """The policy update, Eq. 1."""

    loss: str = "clip"
    """Per-token loss: clip (Eq. 1), cispo, gspo, or package.module:function."""
    loss_options: dict[str, Any] = {}
    """Keyword options of the loss."""
    lr: float = Field(1e-6, gt=0)
    """Learning rate of AdamW."""
    lr_warmup_updates: int = Field(0, ge=0)
    """Updates of linear warm-up."""
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """After the warm-up: constant, or down to 0 at lr_decay_updates."""
    lr_decay_updates: int | None = Field(None, ge=1)
    """Updates, warm-up included, after which linear and cosine have come down to 0."""
    betas: tuple[float, float] = (0.9, 0.999)
    """AdamW's averages."""
    weight_decay: float = Field(0.01, ge=0)
    """AdamW's weight decay."""
    clip_low: float = Field(0.2, gt=0, lt=1)
    """Ratio is clipped at 1 - clip_low."""
    clip_high: float = Field(0.28, gt=0)
    """Ratio is clipped at 1 + clip_high."""
    dual_clip: float | None = Field(None, gt=1)
    """Bound of the loss for negative advantages; None: none."""
    importance_cap: float | None = Field(None, gt=0)
    """Truncated importance weight for the gap between sampler and learner; None: none."""
    importance_mask: tuple[float, float] | None = None
    """Masked importance weight, instead: 0 outside these bounds, such as [0.5, 2.0]; None: none."""
    kl_weight: float = Field(0.001, ge=0)
    """Weight of the k3 KL to the frozen start policy; 0 keeps no reference in memory."""
    entropy_weight: float = 0.0
    """Weight of the entropy bonus."""
    minibatches: int | None = Field(2, ge=1)
    """Optimizer steps an iteration: samples are split evenly into so many; None: by minibatch_samples."""
    minibatch_samples: int | None = Field(None, ge=1)
    """Samples per optimizer step, at most; then minibatches must be none."""
    microbatch_tokens: int = Field(16_384, ge=1, json_schema_extra=MAY_CHANGE)
    """Packed tokens per forward and backward; does not change the result."""
    logit_chunk_tokens: int | None = Field(None, ge=1, json_schema_extra=MAY_CHANGE)
    """Tokens whose logits are in memory at a time, None: as many as fit 512 MiB; does not change the result."""
    share_prefixes: bool = Field(True, json_schema_extra=MAY_CHANGE)
    """Run once over the tokens that samples of a tree share; does not change the result beyond rounding."""
    gradient_checkpointing: bool = Field(True, json_schema_extra=MAY_CHANGE)
    """Recompute activations in the backward pass."""
    max_grad_norm: float = Field(1.0, gt=0)
    """Gradients are clipped to this global norm."""
    max_bad_updates: int = Field(5, ge=1)
    """Updates with a non-finite gradient are skipped; so many in a row stop the run."""

    @field_validator("betas")
    @classmethod
    def _betas_are_weights(cls, betas: tuple[float, float]) -> tuple[float, float]:
        if not all(0 <= beta < 1 for beta in betas):
            raise ValueError("both must be at least 0 and below 1")
        return betas

    @field_validator("importance_mask")
    @classmethod
    def _bounds_in_order(cls, bounds: tuple[float, float] | None) -> tuple[float, float] | None:
        if bounds is not None and not 0 <= bounds[0] < bounds[1]:
            raise ValueError("must be two bounds, the lower one first and at least 0")
        return bounds

    @model_validator(mode="after")
    def _keys_fit_together(self) -> Self:
        if self.minibatches is not None and self.minibatch_samples is not None:
            raise ValueError('minibatch_samples is set beside minibatches: set minibatches = "none"')
        if self.minibatches is None and self.minibatch_samples is None:
            raise ValueError("set minibatches or minibatch_samples; minibatches = 1 makes one update of all samples")
        if self.importance_cap is not None and self.importance_mask is not None:
            raise ValueError("importance_cap and importance_mask are two ways to do one thing: set one of them")
        if self.lr_schedule == "constant" and self.lr_decay_updates is not None:
            raise ValueError('lr_decay_updates is set but lr_schedule is "constant": set it to "linear" or "cosine"')
        if self.lr_schedule != "constant":
            if self.lr_decay_updates is None:
                raise ValueError(
                    f'lr_schedule = "{self.lr_schedule}" needs lr_decay_updates: the updates of the whole run'
                )
            if self.lr_decay_updates <= self.lr_warmup_updates:
                raise ValueError("lr_decay_updates must be greater than lr_warmup_updates: it counts them too")
        return self


class VerifyConfig(Section):
    """How rewards are run: limits of worker processes and of calls."""

    workers: int | None = Field(None, ge=1, json_schema_extra=MAY_CHANGE)
    """Worker processes; None: one per core, at most 4."""
    timeout_s: float = Field(5.0, gt=0)
    """Wall limit of one answer, seconds."""
    memory_mb: int = Field(2048, ge=256, json_schema_extra=MAY_CHANGE)
    """Memory limit of one worker, MB."""
    concurrency: int = Field(64, ge=1, json_schema_extra=MAY_CHANGE)
    """Calls of an async reward that run at the same time."""
    async_timeout_s: float = Field(60.0, gt=0)
    """Wall limit of one call of an async reward, seconds."""
    max_error_share: float = Field(0.5, ge=0, le=1)
    """A batch of which a larger share are errors of ours stops the run with the cause."""


class EvaluationConfig(Section):
    """Held-out evaluation during training."""

    every: int = Field(0, ge=0)
    """Evaluate every so many iterations, and before the first and after the last; 0: never."""
    benchmarks: Names = ("aime24", "aime25", "amc23", "math500", "minerva", "olympiad")
    """Names of benchmarks, files, or "tasks"."""
    tasks: int = Field(256, ge=1)
    """How many held-out made-up tasks, where benchmarks names "tasks"."""
    samples: int | None = Field(None, ge=1)
    """Responses per problem; None: each benchmark's own number."""
    temperature: float = Field(0.6, ge=0)
    """Softmax temperature; 0 is greedy."""
    top_p: float = Field(0.95, gt=0, le=1)
    """Nucleus."""
    max_response_tokens: int = Field(32_768, ge=1)
    """Response limit, tokens."""
    max_prompt_tokens: int = Field(4096, ge=1)
    """Prompt limit, tokens; a longer prompt is an error: leaving problems out would change the benchmark."""
    ks: tuple[int, ...] | None = None
    """The k of pass@k, at most `samples`; None: each benchmark's own (paper: 32 for AIME and AMC, 4 for the rest)."""


class RunConfig(Section):
    """The run."""

    iterations: int = Field(500, ge=1, json_schema_extra=MAY_CHANGE)
    """Iterations of the loop."""
    seed: int = Field(0, ge=0)
    """Seed of everything that is random."""
    generated_tokens: int | None = Field(None, ge=1, json_schema_extra=MAY_CHANGE)
    """Stop once so many tokens were generated, for comparisons at equal cost; None: no limit."""
    checkpoint_every: int = Field(10, ge=1, json_schema_extra=MAY_CHANGE)
    """Write a checkpoint every so many iterations, and at the end."""
    keep_checkpoints: int = Field(2, ge=1, json_schema_extra=MAY_CHANGE)
    """Older checkpoints are deleted."""
    keep_best: str | None = Field(None, json_schema_extra=MAY_CHANGE)
    """A metric, such as "eval/math500/pass@1": the checkpoint with its highest value is kept in best/; None: none."""
    save_rollouts_every: int = Field(1, ge=0, json_schema_extra=MAY_CHANGE)
    """Write forests to parquet every so many iterations; 0: never."""
    trackers: tuple[Literal["tensorboard", "trackio", "wandb"], ...] = Field((), json_schema_extra=MAY_CHANGE)
    """Trackers that mirror metrics.jsonl."""


class Config(Section):
    """All of a run."""

    about: str = Field("", json_schema_extra=MAY_CHANGE)
    """What the preset is, in one line."""
    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    sampling: SamplingConfig = SamplingConfig()
    reward: Annotated[tuple[RewardConfig, ...], BeforeValidator(as_rewards)] = (RewardConfig(name="math"),)
    """Rewards, added up by weight; the first one says which responses are right."""
    algo: AlgoConfig = AlgoConfig()
    update: UpdateConfig = UpdateConfig()
    verify: VerifyConfig = VerifyConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    engine: EngineConfig = EngineConfig()
    run: RunConfig = RunConfig()


def presets() -> dict[str, str]:
    """Name and one-line description of every preset that comes with attnrl."""
    files = {p.name.removesuffix(".toml"): p for p in resources.files("attnrl.presets").iterdir() if ".toml" in p.name}
    return {name: str(tomllib.loads(files[name].read_text("utf-8")).get("about", "")) for name in sorted(files)}


def load_config(preset: str, overrides: Mapping[str, Any] | None = None) -> Config:
    """The resolved config of a preset with dotted overrides on top. A preset is named, or given as the path of a TOML
    file or of a run's config.json; "" stands for the defaults.

    >>> load_config("attnrl_1p5b", {"algo.points": 3}).algo.points
    3
    """
    values = read_preset(preset) if preset else {}
    for key, value in (overrides or {}).items():
        _put(values, key, value)
    values = _with_nothing(values, _optional_keys())
    try:
        return Config.model_validate(values)
    except ValidationError as error:
        raise ConfigError(explain(error, preset)) from None


def read_preset(name: str, above: tuple[str, ...] = ()) -> dict[str, Any]:
    """The values of a preset, those of its `base` underneath."""
    if name in above:
        raise ConfigError(f"preset {name!r} is its own base, by way of {' -> '.join(above)}")
    text = _preset_text(name)
    try:
        values = json.loads(text) if name.endswith(".json") else tomllib.loads(text)
    except ValueError as error:
        raise ConfigError(f"{name}: not valid {name.rpartition('.')[2].upper()}: {error}") from None
    base = values.pop("base", None)
    return values if base is None else _merge(read_preset(str(base), (*above, name)), values)


def _preset_text(name: str) -> str:
    if name.endswith((".toml", ".json")):
        path = Path(name)
        if not path.is_file():
            raise MissingFileError(f"config file {name} does not exist")
        try:
            return path.read_text("utf-8")
        except UnicodeDecodeError as error:
            raise ConfigError(f"{name}: not UTF-8 text ({error.reason})") from None
    file = resources.files("attnrl.presets") / f"{name}.toml"
    if not file.is_file():
        near = difflib.get_close_matches(name, presets(), n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise ConfigError(f"no preset {name!r}; {hint}`attnrl presets` lists them, a path must end in .toml")
    return file.read_text("utf-8")


def _merge(under: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """`over` on top of `under`, section by section; option tables are replaced whole."""
    merged = dict(under)
    for key, value in over.items():
        deep = isinstance(value, dict) and isinstance(merged.get(key), dict) and not key.endswith("_options")
        merged[key] = _merge(merged[key], value) if deep else value
    return merged


def _put(values: dict[str, Any], key: str, value: Any) -> None:
    """Set a dotted key in nested tables."""
    *path, last = key.split(".")
    for name in path:
        values = values.setdefault(name, {})
        if not isinstance(values, dict):
            raise ConfigError(f"{key}: {name} is a value, not a section")
    values[last] = value


def _with_nothing(values: dict[str, Any], optional: set[str], prefix: str = "") -> dict[str, Any]:
    """The values with "none" as nothing under keys that may be empty: TOML and flags have no other word for it."""
    made = {}
    for name, value in values.items():
        if isinstance(value, dict):
            value = _with_nothing(value, optional, f"{prefix}{name}.")
        empty = isinstance(value, str) and value.lower() == "none" and f"{prefix}{name}" in optional
        made[name] = None if empty else value
    return made


def explain(error: ValidationError, where: str) -> str:
    """Every mistake of a validation as `key: what is wrong`, with the nearest known key for a wrong one."""
    lines = []
    for item in error.errors():
        key = ".".join(str(part) for part in item["loc"])
        if item["type"] == "extra_forbidden":
            near = difflib.get_close_matches(key, keys(), n=1)
            hint = f"; did you mean {near[0]}?" if near else "; `attnrl config --help` lists the keys"
            lines.append(f"unknown key {key}{hint}")
        else:
            got = "" if isinstance(item["input"], dict | BaseModel) else f", got {item['input']!r}"
            lines.append(f"{key}: {_said(item)}{got}")
    return f"{where}: " + "\n  ".join(lines)


def _said(item: Any) -> str:
    """What a validation says: pydantic's own sentences in our lower case, our own as they are."""
    ours = item.get("ctx", {}).get("error")
    return str(ours) if item["type"] == "value_error" and ours else str(item["msg"]).lower()


def _optional_keys(section: type[BaseModel] = Config, prefix: str = "") -> set[str]:
    """Dotted keys that may be none; elsewhere "none" is a name like any other."""
    found = {f"{prefix}{n}" for n, f in section.model_fields.items() if type(None) in get_args(f.annotation)}
    for name, field in section.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            found |= _optional_keys(field.annotation, f"{prefix}{name}.")
    return found


def may_change(section: type[BaseModel] = Config, prefix: str = "") -> set[str]:
    """Dotted keys that may have another value when a run is resumed."""
    found: set[str] = set()
    for name, field in section.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            found |= may_change(field.annotation, f"{prefix}{name}.")
        elif field.json_schema_extra == MAY_CHANGE:
            found.add(f"{prefix}{name}")
    return found


def keys(section: type[BaseModel] = Config, prefix: str = "") -> dict[str, str]:
    """Every dotted key with its line of documentation."""
    found: dict[str, str] = {}
    for name, field in section.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            found |= keys(field.annotation, f"{prefix}{name}.")
        else:
            found[f"{prefix}{name}"] = " ".join((field.description or "").split())
    return found
