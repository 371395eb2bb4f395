"""The sections of the config, each key once, with its range and one line of documentation."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, ValidationInfo, field_validator, model_validator

from attnrl.config.base import MAY_CHANGE, Layers, Names, Section
from attnrl.config.taken import PART, For
from attnrl.config.tasks import TASKS, TaskConfig

# What keys are for that only some settings take.
LORA = For("model.lora_rank above 0", lambda config: config.model.lora_rank > 0)
ROWS = For("files or hub names in data.train", lambda config: any(name != "tasks" for name in config.data.train))
TRAIN_TASKS = For('"tasks" in data.train', lambda config: "tasks" in config.data.train)
FILES = For(
    "files or hub names in data.train or evaluation.benchmarks",
    lambda config: any(name != "tasks" for name in (*config.data.train, *config.evaluation.benchmarks)),
)
BENCHMARKS = For(
    "benchmarks in evaluation.benchmarks or data.decontaminate",
    lambda config: bool(config.evaluation.benchmarks or config.data.decontaminate),
)
EVALUATION = For("benchmarks in evaluation.benchmarks", lambda config: bool(config.evaluation.benchmarks))
HELD_OUT = For(
    '"tasks" or "gym:NAME" in evaluation.benchmarks',
    lambda config: any(name == "tasks" or name.startswith("gym:") for name in config.evaluation.benchmarks),
)
FCI = For("a rule or filter that reads FCI")
BRANCHES = For("a rule that branches", even_default=True)
ADAPTIVE = For("algo.adaptive_batch = true", lambda config: config.algo.adaptive_batch)
FILLED = For("algo.adaptive_batch = true, or a schedule that fills its batches")
WORKERS = For("a reward that runs in worker processes")
ASYNC = For("an async reward")


def engine(name: str) -> For:
    """Settings of an engine, which may also work inside one of the user's own."""
    return For(f"engine.name = {name!r}", lambda c: c.engine.name == name or ":" in c.engine.name, in_files=False)


class ModelConfig(Section):
    """The policy."""

    path: str = Field("deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B", min_length=1)
    """Directory or hub name of a Hugging Face decoder-only model; "demo" is the tiny model shipped with attnrl."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Weights of the policy; the optimizer's masters are float32 always. auto: bfloat16 on CUDA, float32 on CPU."""
    lora_rank: int = Field(0, ge=0)
    """Rank of LoRA adapters; 0 trains full weights."""
    lora_alpha: Annotated[float, LORA] = Field(32.0, gt=0)
    """Scale of LoRA adapters."""
    lora_targets: Annotated[Names, LORA] = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    """Linear layers that get LoRA adapters."""


class LocalConfig(Section):
    """The engine on one machine, CPU or one CUDA GPU."""

    sampler: Literal["auto", "own", "vllm"] = "auto"
    """What draws responses: own, vllm (extra vllm), or auto, which is own: it was the faster one on an H200."""
    device: str = Field("auto", pattern=r"^(auto|cpu|cuda(:\d+)?)$")
    """auto (CUDA where there is one), cpu, cuda."""
    threads: int | None = Field(None, ge=1, json_schema_extra=MAY_CHANGE)
    """CPU threads of torch; None: torch's own choice. Tiny models gain little from a second one."""
    rows: int | None = Field(None, ge=1, json_schema_extra=MAY_CHANGE)
    """Responses drawn at the same time, where memory allows; None: 256 on a CPU, 1,024 on a GPU. It changes no draw."""
    float32_logits: bool = True
    """Logits of a model in half precision are not rounded to it, in sampler (own), scorer and learner alike: their
    log-probs of one token come nearer to each other."""


class VerlConfig(Section):
    """The engine on a cluster: verl with Ray, FSDP2 and vLLM (extra verl)."""

    nodes: int = Field(1, ge=1, json_schema_extra=MAY_CHANGE)
    """Machines."""
    gpus_per_node: int = Field(8, ge=1, json_schema_extra=MAY_CHANGE)
    """GPUs, and ranks, of each."""
    server_gpus: int = Field(0, ge=0, json_schema_extra=MAY_CHANGE)
    """GPUs of their own for the servers, beside those of the ranks: they draw while ranks update (algo.schedule =
    "overlapped"). 0: servers share the ranks' GPUs and take turns."""
    overrides: Names = ()
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
    local: Annotated[LocalConfig, engine("local")] = LocalConfig()
    verl: Annotated[VerlConfig, engine("verl")] = VerlConfig()


class DataConfig(Section):
    """Prompts."""

    train: Names = ("agentica-org/DeepScaleR-Preview-Dataset",)
    """Files (parquet, json, jsonl, .gz), hub names, or "tasks"."""
    train_tasks: Annotated[int, TRAIN_TASKS] = Field(20_000, ge=1)
    """How many made-up tasks to train on, where train names "tasks"."""
    template: str = "{problem} Let's think step by step and output the final answer within \\boxed{}."
    """Text around a problem, before the model's chat template. Paper: Table 4."""
    max_prompt_tokens: int = Field(1024, ge=1)
    """Longer prompts are left out, and counted."""
    columns: Annotated[dict[Literal["problem", "answer"], str], FILES] = {}
    """Columns that hold problem and answer, where they have names of their own: {problem = "...", answer = "..."}."""
    system: str | None = None
    """System message before every problem; None: the row's own, where it has one."""
    chat_options: dict[str, Any] = {}
    """Options of the model's chat template, such as {enable_thinking = false}."""
    drop_bad_rows: Annotated[bool, ROWS] = False
    """Leave out rows without a problem or an answer and say which; otherwise the first one is an error."""
    decontaminate: Names = ()
    """Benchmarks whose problems are dropped from the training set."""
    clean: bool = False
    """Leave out problems that state their answer, that have conflicting answers, and repeated ones."""
    directory: Annotated[str | None, BENCHMARKS] = None
    """Folder with eval/*.parquet; by default the environment variable ATTNRL_DATA, then the hub."""
    tasks: Annotated[TaskConfig, TASKS] = TaskConfig()


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
    """One generation call an iteration (one_step_off_policy, Sec. 3.3); the same with the update running while the next
    trunks are drawn (overlapped); trunks, then branches, then update (on_policy); that with prompts drawn until a batch
    has signal (dynamic, DAPO); or package.module:function."""
    prompts: int = Field(64, ge=1)
    """Prompts of the first batch, and the target train batch in prompts."""
    group: int = Field(6, ge=1)
    """Trunks per prompt, G."""
    segmenter: str = "blank_lines"
    """How responses become steps: blank_lines, lines, sentences, every_n_tokens, or package.module:function."""
    segmenter_options: dict[str, Any] = {}
    """Keyword options of the segmenter."""
    delta: Annotated[int, FCI] = Field(4, ge=1)
    """Steps between a step and the text whose attention counts, Delta of Eq. 5."""
    key_reduce: Annotated[Literal["mean", "sum"], FCI] = "mean"
    """Over the tokens of the step attended to."""
    mode: Annotated[Literal["paper", "released"], PART] = "paper"
    """Whether steps that cannot branch are left out of quantile and mean FCI, or count as zeros."""
    rule: str = "fci"
    """Where to branch: fci, surprisal, entropy, random_steps, uniform, every_step, fixed_segments, low_probability,
    none; the controls first_steps, position, fci_residual, fci_mean, step_entropy, oracle (docs/results.md); or
    package.module:function."""
    rule_options: dict[str, Any] = {}
    """Keyword options of the rule."""
    points: Annotated[int, PART] = Field(2, ge=1)
    """Branch points per tree, N."""
    width: Annotated[int, BRANCHES] = Field(2, ge=1)
    """New branches per point."""
    top_fraction: Annotated[float, PART] = Field(0.2, gt=0, le=1)
    """Share of steps that are candidates, rho of Eq. 7."""
    min_gap_tokens: Annotated[int, PART] = Field(0, ge=0)
    """Smallest distance of branch points from the start and each other, tokens."""
    filter: str = "attention"
    """Which prompts are branched and trained on: attention (Eq. 8), all, not_all_right (Sec. 4.3), has_spread (DAPO),
    or package.module:function."""
    filter_options: dict[str, Any] = {}
    """Keyword options of the filter: scope = "easy" (prompts with all trunks right) or "all" for attention."""
    budget: Annotated[str, BRANCHES] = "difficulty"
    """Trees per prompt (Eq. 9): difficulty, all, or package.module:function."""
    budget_options: Annotated[dict[str, Any], BRANCHES] = {}
    """Keyword options of the budget rule."""
    adaptive_batch: bool = True
    """Follow Eq. 10; otherwise every batch has `prompts` prompts."""
    history: Annotated[float, ADAPTIVE] = Field(0.9, ge=0, lt=1)
    """Weight of the last batch size, lambda of Eq. 10."""
    max_prompts: Annotated[int, FILLED] = Field(256, ge=1)
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


class UpdateConfig(Section):
    """The policy update, Eq. 1."""

    loss: str = "clip"
    """Per-token loss: clip (Eq. 1), cispo, gspo, or package.module:function."""
    loss_options: dict[str, Any] = {}
    """Keyword options of the loss."""
    optimizer: Literal["adamw", "adamw_8bit", "adamw_offloaded"] = "adamw"
    """AdamW with its state in float32 beside the model, with moments in 8 bits, or with its state in host memory."""
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
    clip_low: Annotated[float, PART] = Field(0.2, gt=0, lt=1)
    """Ratio is clipped at 1 - clip_low."""
    clip_high: Annotated[float, PART] = Field(0.28, gt=0)
    """Ratio is clipped at 1 + clip_high."""
    dual_clip: Annotated[float | None, PART] = Field(None, gt=1)
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
    gradient_checkpointing: Layers = Field("all", json_schema_extra=MAY_CHANGE)
    """Layers that run again in the backward pass instead of keeping what they computed: all, none, the first so many,
    or auto: as few as the device's free memory allows (all on a CPU); does not change the result."""
    fused: bool = Field(True, json_schema_extra=MAY_CHANGE)
    """Our kernels for norms, rotation, gate and log-probs where they fit (CUDA, models built like Llama); changes
    rounding alone."""
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

    workers: Annotated[int | None, WORKERS] = Field(None, ge=1, json_schema_extra=MAY_CHANGE)
    """Worker processes; None: one per core, at most 4."""
    timeout_s: Annotated[float, WORKERS] = Field(5.0, gt=0)
    """Wall limit of one answer, seconds."""
    memory_mb: Annotated[int, WORKERS] = Field(2048, ge=256)
    """Memory limit of one worker beyond what its imports take, MB."""
    concurrency: Annotated[int, ASYNC] = Field(64, ge=1, json_schema_extra=MAY_CHANGE)
    """Calls of an async reward that run at the same time."""
    async_timeout_s: Annotated[float, ASYNC] = Field(60.0, gt=0)
    """Wall limit of one call of an async reward, seconds."""
    max_error_share: float = Field(0.5, ge=0, le=1, json_schema_extra=MAY_CHANGE)
    """A batch of which a larger share are errors of ours stops the run with the cause."""


class EvaluationConfig(Section):
    """Held-out evaluation during training."""

    every: int = Field(0, ge=0)
    """Evaluate every so many iterations, and before the first and after the last; 0: never."""
    benchmarks: Names = ("aime24", "aime25", "amc23", "math500", "minerva", "olympiad")
    """Names of benchmarks, files, or "tasks"."""
    tasks: Annotated[int, HELD_OUT] = Field(256, ge=1)
    """How many held-out made-up tasks, where benchmarks names "tasks"."""
    samples: Annotated[int | None, EVALUATION] = Field(None, ge=1)
    """Responses per problem; None: each benchmark's own number."""
    temperature: Annotated[float, EVALUATION] = Field(0.6, ge=0)
    """Softmax temperature; 0 is greedy."""
    top_p: Annotated[float, EVALUATION] = Field(0.95, gt=0, le=1)
    """Nucleus."""
    max_response_tokens: Annotated[int, EVALUATION] = Field(32_768, ge=1)
    """Response limit, tokens."""
    max_prompt_tokens: Annotated[int, EVALUATION] = Field(4096, ge=1)
    """Prompt limit, tokens; a longer prompt is an error: leaving problems out would change the benchmark."""
    ks: Annotated[tuple[int, ...] | None, EVALUATION] = None
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
