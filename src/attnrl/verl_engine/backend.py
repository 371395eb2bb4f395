"""The Backend over verl, from the driver's side: seven verbs."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from uuid import uuid4

import ray
from omegaconf import OmegaConf
from ray.exceptions import RayError
from verl.checkpoint_engine import CheckpointEngineManager
from verl.single_controller.ray import RayClassWithInitArgs, RayWorkerGroup, ResourcePoolManager
from verl.trainer.constants_ppo import get_ppo_ray_runtime_env
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.rollout.llm_server import LLMServerManager

from attnrl.config import Config
from attnrl.errors import AttnRLError, ConfigError, DataError, MissingFileError, TrainingError
from attnrl.policy.passes import minibatches
from attnrl.policy.rates import Counters, learning_rate
from attnrl.scoring.scorer import ScoreReport, check_requests
from attnrl.types import Ids, Request, Rollout, Sample, Sampling, ScoreRequest, Scores, Scoring, as_floats, as_ids
from attnrl.verl_engine import settings, worker
from attnrl.verl_engine.arrival import SEED, TOKENS, Arrival, Checksum
from attnrl.verl_engine.session import Session
from attnrl.verl_engine.sharded import together
from attnrl.verl_engine.share import deal, share_packs
from attnrl.verl_engine.watch import Watch


def say(line: str) -> None:
    print(f"verl: {line}", file=sys.stderr, flush=True)


@dataclass(slots=True)
class Counts:
    """What happened since `metrics` was last asked."""

    context_tokens: int = 0
    cached_tokens: int = 0
    scored: ScoreReport = field(default_factory=ScoreReport)  # time of the slowest rank, tokens of all
    logprob_gap: float = 0.0
    syncs: int = 0


class VerlBackend:
    """One policy on a Ray cluster: FSDP2 ranks that score and learn, vLLM servers on the same GPUs that generate.

    Servers hold weights and cache only while they generate; every call of another verb puts them to sleep. After each
    weight sync every server answers a probe: its log-probs must be the learner's, and after an update other ones.

    A checkpoint holds `model/` (Hugging Face format), `actor/` (shards, for any number of ranks) and `verl.json`.

    Metrics of `update` are those of the local engine; those of `metrics`:
    engine/PHASE_seconds       time in start, generate, sync, score, update, save, load
    score/...                  as of the local engine: time of the slowest rank, tokens and packs of all
    generate/shared_context    share of context tokens that a server's cache held
    sync/count                 weight syncs
    sync/logprob_gap           largest mean gap of log-probs between a server and the learner after a sync, nats
    device/peak_memory_gb      most device memory a rank held, GB (GPU only)
    """

    def __init__(
        self, config: Config, *, model: str, tokenizer: Any, learn: bool = True, run_dir: Path | None = None
    ) -> None:
        on_cpu = "trainer.device=cpu" in config.engine.verl.overrides
        dtype = config.model.dtype
        self.dtype = dtype if dtype != "auto" else "float32" if on_cpu else "bfloat16"
        self.overrides = settings.overrides(config, model=model, dtype=self.dtype, learn=learn)
        self.config = settings.compose(self.overrides)
        self.options, self.temperature, self.seed = config.update, config.sampling.temperature, config.run.seed
        self.tokenizer, self.learns = tokenizer, learn
        self.stop_ids = settings.stop_ids(model, tokenizer)
        self.budget = config.update.microbatch_tokens
        self.version = 0
        self.counters = Counters()
        self.counts = Counts()
        self.watch = Watch(config.engine.verl.phase_limit_s, say)
        self.awake = False
        self.drawn: list[Rollout] = []  # answers of the servers to the probe, not looked at yet
        self.closed = False
        say("overrides: " + " ".join(self.overrides))
        self.session = Session()
        with self._phase("start"):
            self._start("actor_rollout_ref" if learn and self.options.kl_weight > 0 else "actor_rollout", run_dir)

    # ---- the seven verbs

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Rollout]:
        """One rollout per request, in order. Requests of a tree go to one server, whose cache holds what they share."""
        if not requests:
            return []
        self._check_requests(requests)
        if self.arrival.probe is None:
            self.arrival.probe = requests[0].context[:256]
        if not self.awake:
            with self._phase("sync"):
                self.sync.update_weights(global_steps=self.version)
            self.awake = True
            self.counts.syncs += 1
            with self._phase("generate"):
                self.drawn = asyncio.run(self._ask_probe())
        with self._phase("generate"):
            return asyncio.run(self._ask(requests, sampling))

    def score(self, requests: Sequence[ScoreRequest], scoring: Scoring) -> list[Scores]:
        """Log-probs, entropy and FCI, each rank over its share. Paper: Eq. 4-6."""
        self._check_scored(requests, scoring)
        self._sleep()
        return self._score(requests, scoring)

    def update(self, samples: Sequence[Sample]) -> dict[str, float]:
        """One pass over the samples in the local engine's minibatches; token-mean over all ranks. Paper: Eq. 1."""
        if not self.learns:
            raise ConfigError("this engine was started without a learner: it can sample and score, not train")
        self._check_ids([x for s in samples for x in (s.prompt, s.response)], "sample")
        self._sleep()
        plan = minibatches(samples, self.options, seed=self.seed, version=self.version)
        shares: list[list[Any]] = [[] for _ in range(self.ranks)]
        for rows in plan:
            packs = share_packs(samples, rows, self.ranks, self.budget, share=self.shares)
            for rank, mine in enumerate(packs):
                shares[rank].append([[samples[i] for i in pack] for pack in mine])
        lr = learning_rate(self.options, self.counters.updates)
        with self._phase("update"):
            found = self._call(worker.update, shares, self.options, self.temperature, self.counters)
            metrics, self.counters = together([part for part, _ in found]), found[0][1]
            if metrics.norms:
                self.arrival.updated(self._checksum(), update=self.version + 1, lr=lr)
        self.version += 1
        return metrics.summary(lr=learning_rate(self.options, self.counters.updates), samples=sum(map(len, plan)))

    def save(self, path: Path) -> None:
        """Write weights, optimizer and counters into the existing directory `path`; ranks draw no random numbers."""
        if not path.is_dir():
            raise MissingFileError(f"no directory {path} to save into")
        self._sleep()
        with self._phase("save"):
            self._call(worker.save, str(path.absolute()), self.dtype)
        self.tokenizer.save_pretrained(path / "model")
        state = {"version": self.version, "ranks": self.ranks, "counters": asdict(self.counters)}
        (path / settings.STATE).write_text(json.dumps({**state, "overrides": self.overrides}, indent=2) + "\n")

    def load(self, path: Path) -> None:
        """Restore exactly what `save` wrote, by as many ranks or others."""
        state = settings.read_state(path)
        self._sleep()
        with self._phase("load"):
            self._call(worker.load, str(path.absolute()))
            self.arrival.loaded(self._checksum())
        self.version, self.counters = state["version"], Counters(**state["counters"])

    def metrics(self) -> dict[str, float]:
        """What the engine did since it was last asked; see the class."""
        counts, self.counts = self.counts, Counts()
        found = {f"engine/{name}_seconds": took for name, took in self.watch.take().items()}
        found |= counts.scored.metrics()
        found["generate/shared_context"] = counts.cached_tokens / max(1, counts.context_tokens)
        found |= {"sync/count": float(counts.syncs), "sync/logprob_gap": counts.logprob_gap}
        if not self.closed and (held := max(self._call(worker.memory))):
            found["device/peak_memory_gb"] = held
        return found

    def close(self) -> None:
        """End servers, ranks and, where this process started it, Ray; nothing is left behind on this machine."""
        if not self.closed:
            self.closed = True
            ray.shutdown()
            self.session.close()

    # ---- servers and ranks

    def _start(self, role: str, run_dir: Path | None) -> None:
        """Ray, the worker group, the servers on the same GPUs, and the weight sync between the two."""
        config = self.config
        if not ray.is_initialized():
            environment = OmegaConf.to_container(OmegaConf.create(get_ppo_ray_runtime_env(config)))
            ray.init(**{**OmegaConf.to_container(config.ray_kwargs.ray_init), "runtime_env": environment})
            self.session.note_children()
        self.ranks = config.trainer.n_gpus_per_node * config.trainer.nnodes
        have = int(ray.cluster_resources().get("GPU", 0))
        if have < self.ranks:
            raise ConfigError(
                f"engine.verl.nodes x gpus_per_node asks for {self.ranks} GPUs, the Ray cluster has {have}"
            )
        spec = {"pool": [config.trainer.n_gpus_per_node] * config.trainer.nnodes}
        pools = ResourcePoolManager(resource_pool_spec=spec, mapping={role: "pool"})
        pools.create_resource_pool()
        pool = pools.get_resource_pool(role)
        made = RayClassWithInitArgs(cls=ray.remote(worker.Worker), config=config.actor_rollout_ref, role=role)
        self.workers = RayWorkerGroup(resource_pool=pool, ray_cls_with_init=made, device_name=config.trainer.device)
        hosts = self._look(run_dir)
        self.vocabulary, self.shares = self._call(worker.start, self.options)[0]
        self.servers = LLMServerManager.create(config=config, worker_group=self.workers, rollout_resource_pool=pool)
        engine = omega_conf_to_dataclass(config.actor_rollout_ref.rollout.checkpoint_engine)
        engine.backend = "naive"
        self.sync = CheckpointEngineManager(config=engine, actor_wg=self.workers, replicas=self.servers.get_replicas())
        self.sync.sleep_replicas()
        self.client = self.servers.get_client()
        self.arrival = Arrival(self.dtype, self._checksum())
        say(f"{self.ranks} ranks on {len(hosts)} machines, {len(self.servers.get_replicas())} servers, {self.dtype}")

    def _look(self, run_dir: Path | None) -> set[str]:
        """The machines of the ranks, all of which see the run directory and the model; before the model is loaded."""
        model = Path(self.config.actor_rollout_ref.model.path)
        paths = [model] if model.is_dir() else []
        if run_dir is None:
            return self._seen(paths)
        mark = run_dir / f".seen-{uuid4().hex}"
        mark.touch()
        try:
            return self._seen([mark, *paths])
        finally:
            mark.unlink()

    def _seen(self, paths: Sequence[Path]) -> set[str]:
        answers = self._call(worker.look, tuple(str(path.absolute()) for path in paths))
        for host, missing in answers:
            if missing:
                raise ConfigError(
                    f"machine {host} does not see {missing[0]}: run directory and model must lie on a file system that "
                    "all machines share, under the same path"
                )
        return {host for host, _ in answers}

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        """A watched phase. What fails in it ends the engine: ranks may wait in a collective for one that is gone."""
        try:
            with self.watch.phase(name):
                yield
        except BaseException as error:
            self.close()
            if isinstance(error, RayError) or not isinstance(error, AttnRLError | KeyboardInterrupt | SystemExit):
                raise TrainingError(f"{name} on the cluster failed: {cause(error)}") from None
            raise

    def _call(self, verb: Callable[..., Any], *arguments: Any) -> list[Any]:
        """What each rank answers. An argument that is a list has an entry per rank; others are the same for all."""
        rows = [[a[rank] if isinstance(a, list) else a for a in arguments] for rank in range(self.ranks)]
        every = [verb] * self.ranks, rows, [self.watch.limit_s] * self.ranks
        found: list[Any] = ray.get(self.workers.attnrl(*every))
        return found

    def _sleep(self) -> None:
        """Servers give their memory back; then the ranks check what the servers said of the probe."""
        if not self.awake:
            return
        with self._phase("sync"):
            self.sync.sleep_replicas()
        self.awake = False
        drawn, self.drawn = self.drawn, []
        if drawn and self.arrival.probe is not None:
            asked = [ScoreRequest(self.arrival.probe, d.ids, ()) for d in drawn]
            counted, self.counts.scored = self.counts.scored, ScoreReport()
            scores = self._score(asked, Scoring(fci=False))
            self.counts.scored = counted  # the probe is no part of the iteration's work
            with self._phase("sync"):
                self.counts.logprob_gap = max(self.counts.logprob_gap, self.arrival.arrived(drawn, scores))

    def _checksum(self) -> Checksum:
        found: Checksum = self._call(worker.checksum, self.dtype)[0]
        return found

    async def _ask(self, requests: Sequence[Request], sampling: Sampling) -> list[Rollout]:
        async def one(request: Request) -> Rollout:
            answer = await self.client.generate(
                request.tree or uuid4().hex,
                prompt_ids=request.context.tolist(),
                sampling_params=self._parameters(sampling, request.max_tokens, request.seed),
            )
            self.counts.cached_tokens += answer.extra_fields.get("num_cached_tokens") or 0
            return self._rollout(answer)

        self.counts.context_tokens += sum(len(r.context) for r in requests)
        return list(await asyncio.gather(*map(one, requests)))

    async def _ask_probe(self) -> list[Rollout]:
        """Each server's answer to the probe, drawn at temperature 1 without truncation."""
        assert self.arrival.probe is not None
        ids = self.arrival.probe.tolist()

        async def one(server: Any) -> Rollout:
            parameters = self._parameters(Sampling(), TOKENS, SEED)
            answer = await server.generate.remote(prompt_ids=ids, sampling_params=parameters, request_id=uuid4().hex)
            return self._rollout(answer)

        return list(await asyncio.gather(*map(one, self.servers.server_handles)))

    def _parameters(self, sampling: Sampling, max_tokens: int, seed: int) -> dict[str, Any]:
        return {
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k or -1,
            "max_tokens": max_tokens,
            "seed": seed,
            "stop_token_ids": list(self.stop_ids),
            "logprobs": True,
        }

    def _rollout(self, answer: Any) -> Rollout:
        """verl's answer as a rollout; it says "completed" for both ends of a response."""
        drawn_by = answer.extra_fields["global_steps"]
        if drawn_by != self.version:
            raise TrainingError(f"a server answered with the weights of version {drawn_by}, not {self.version}")
        if not answer.token_ids or answer.stop_reason != "completed":
            raise TrainingError(f"a server gave up a response: {answer.stop_reason}")
        finish = "stop" if answer.token_ids[-1] in self.stop_ids else "length"
        return Rollout(as_ids(answer.token_ids), as_floats(answer.log_probs), finish, self.version)  # type: ignore[arg-type]

    def _score(self, requests: Sequence[ScoreRequest], scoring: Scoring) -> list[Scores]:
        shares = deal([len(r.prompt) + len(r.response) for r in requests], self.ranks)
        mine = [[requests[i] for i in share] for share in shares]
        with self._phase("score"):
            found = self._call(worker.score, mine, scoring, self.budget)
        scores: list[Any] = [None] * len(requests)
        for share, (part, report) in zip(shares, found, strict=True):
            for index, one in zip(share, part, strict=True):
                scores[index] = one
            self.counts.scored.tokens += report.tokens
            self.counts.scored.packs += report.packs
            self.counts.scored.attention_kinds |= report.attention_kinds
            self.counts.scored.fci_kinds |= report.fci_kinds
        slowest = max((report for _, report in found), key=lambda report: report.seconds)
        self.counts.scored.seconds += slowest.seconds
        self.counts.scored.fci_seconds += slowest.fci_seconds
        return scores

    # ---- checks

    def _check_requests(self, requests: Sequence[Request]) -> None:
        longest = self.config.actor_rollout_ref.rollout.max_model_len
        for index, request in enumerate(requests):
            if len(request.context) + request.max_tokens > longest:
                raise ConfigError(
                    f"request {index}: {len(request.context)} tokens of context and {request.max_tokens} to draw "
                    f"exceed the servers' {longest}; see data.max_prompt_tokens and sampling.max_response_tokens"
                )
        self._check_ids([r.context for r in requests], "request")

    def _check_scored(self, requests: Sequence[ScoreRequest], scoring: Scoring) -> None:
        check_requests(requests, scoring.temperature)
        self._check_ids([x for r in requests for x in (r.prompt, r.response)], "scored request")

    def _check_ids(self, rows: Sequence[Ids], name: str) -> None:
        """An id outside the vocabulary would end one rank or server and leave the others waiting."""
        for row in rows:
            if not len(row) or int(row.min()) < 0 or int(row.max()) >= self.vocabulary:
                raise DataError(f"a {name} is empty or holds a token id outside the vocabulary of {self.vocabulary}")


def cause(error: BaseException) -> str:
    """The innermost reason, in one line: Ray's own errors begin with it, others may have a trace before it."""
    while (inner := getattr(error, "cause", None) or error.__cause__) is not None and inner is not error:
        error = inner
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [""]
    return f"{type(error).__name__}: {lines[0 if isinstance(error, RayError) else -1]}"[:500]
