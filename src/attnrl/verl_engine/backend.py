"""The Backend over verl, from the driver's side: seven verbs."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
import ray
from omegaconf import OmegaConf
from ray.exceptions import RayError
from verl.checkpoint_engine import CheckpointEngineManager
from verl.single_controller.ray import RayClassWithInitArgs, RayWorkerGroup, ResourcePoolManager
from verl.trainer.constants_ppo import get_ppo_ray_runtime_env
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.rollout.llm_server import LLMServerManager

from attnrl.algo.minibatches import plan_minibatches
from attnrl.config import Config
from attnrl.errors import AttnRLError, ConfigError, DataError, MissingFileError, TrainingError
from attnrl.local.packing import input_length
from attnrl.policy.rates import learning_rate
from attnrl.scoring.scorer import ScoreReport, check_requests
from attnrl.types import Ids, Request, Rollout, Sample, Sampling, ScoreRequest, Scores, Scoring, as_floats, as_ids
from attnrl.verl_engine import settings
from attnrl.verl_engine.arrival import SEED, TOKENS, Arrival, Checksum
from attnrl.verl_engine.session import Session
from attnrl.verl_engine.sharded import together
from attnrl.verl_engine.share import share_packs, share_requests
from attnrl.verl_engine.watch import Watch
from attnrl.verl_engine.worker import Worker


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

    A checkpoint holds `model/` (Hugging Face format), `actor/` (verl's shards) and `verl.json`.

    Metrics of `update` are those of the local engine; those of `metrics`:
    engine/PHASE_seconds       time in start, generate, sync, score, update, save, load
    score/...                  as of the local engine: time of the slowest rank, tokens and packs of all
    generate/shared_context    share of context tokens that a server's cache held
    sync/count                 weight syncs
    sync/logprob_gap           largest mean gap of log-probs between a server and the learner after a sync, nats
    device/peak_memory_gb      most device memory a rank held, GB (GPU only)
    """

    def __init__(self, config: Config, *, model: str, tokenizer: Any, learn: bool = True) -> None:
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
        self.counters = {"updates": 0, "skipped": 0, "skipped_in_a_row": 0}
        self.counts = Counts()
        self.watch = Watch(config.engine.verl.phase_limit_s, say)
        self.awake = False
        self.drawn: list[Rollout] = []  # answers of the servers to the probe, not looked at yet
        self.closed = False
        say("overrides: " + " ".join(self.overrides))
        self.session = Session()
        with self._phase("start"):
            self._start(role="actor_rollout_ref" if learn and self.options.kl_weight > 0 else "actor_rollout")

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
        rows = [i for i, sample in enumerate(samples) if input_length(sample) > 0]
        plan = plan_minibatches(
            [samples[i].uid for i in rows],
            minibatches=self.options.minibatches,
            samples=self.options.minibatch_samples,
            rng=np.random.default_rng([self.seed, self.version]),
        )
        shares: list[list[Any]] = [[] for _ in range(self.ranks)]
        for part in plan:
            chosen = [samples[rows[i]] for i in part]
            packs = share_packs(chosen, self.ranks, self.budget, shared=self.options.share_prefixes and self.can_share)
            for rank, mine in enumerate(packs):
                shares[rank].append([[chosen[i] for i in pack] for pack in mine])
        with self._phase("update"):
            found = self._call("attnrl_update", shares, self.options, self.temperature, self.counters)
        lr = learning_rate(self.options, self.counters["updates"])
        metrics, self.counters = together([part for part, _ in found]), found[0][1]
        if self.counters["skipped_in_a_row"] >= self.options.max_bad_updates:
            raise TrainingError(
                f"{self.counters['skipped_in_a_row']} updates in a row had a non-finite loss or gradient norm; "
                "resume from an earlier checkpoint with a lower lr or float32"
            )
        if metrics.norms:
            with self._phase("update"):
                self.arrival.updated(self._checksum(), update=self.version + 1, lr=lr)
        self.version += 1
        return metrics.summary(lr=learning_rate(self.options, self.counters["updates"]), samples=len(rows))

    def save(self, path: Path) -> None:
        """Write weights, optimizer, counters and random states into the existing directory `path`."""
        if not path.is_dir():
            raise MissingFileError(f"no directory {path} to save into")
        self._sleep()
        with self._phase("save"):
            self._call("attnrl_save", str(path.absolute()), self.version, self.dtype)
        self.tokenizer.save_pretrained(path / "model")
        state = {"version": self.version, "ranks": self.ranks, "counters": self.counters, "overrides": self.overrides}
        (path / settings.STATE).write_text(json.dumps(state, indent=2) + "\n")

    def load(self, path: Path) -> None:
        """Restore exactly what `save` wrote, at the same number of ranks."""
        state = settings.read_state(path, self.ranks)
        self._sleep()
        with self._phase("load"):
            self._call("attnrl_load", str(path.absolute()))
            self.arrival.loaded(self._checksum())
        self.version, self.counters = state["version"], state["counters"]

    def metrics(self) -> dict[str, float]:
        """What the engine did since it was last asked; see the class."""
        counts, self.counts = self.counts, Counts()
        found = {f"engine/{name}_seconds": took for name, took in self.watch.take().items()}
        found |= counts.scored.metrics()
        found["generate/shared_context"] = counts.cached_tokens / max(1, counts.context_tokens)
        found |= {"sync/count": float(counts.syncs), "sync/logprob_gap": counts.logprob_gap}
        if not self.closed and (held := max(self._call("attnrl_memory"))):
            found["device/peak_memory_gb"] = held
        return found

    def close(self) -> None:
        """End servers, ranks and, where this process started it, Ray; nothing is left behind on this machine."""
        if not self.closed:
            self.closed = True
            ray.shutdown()
            self.session.close()

    # ---- servers and ranks

    def _start(self, role: str) -> None:
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
        made = RayClassWithInitArgs(cls=ray.remote(Worker), config=config.actor_rollout_ref, role=role)
        self.workers = RayWorkerGroup(resource_pool=pool, ray_cls_with_init=made, device_name=config.trainer.device)
        about = self._call("attnrl_start")
        self.vocabulary, self.can_share = about[0]["vocabulary"], about[0]["can_share"]
        self.servers = LLMServerManager.create(config=config, worker_group=self.workers, rollout_resource_pool=pool)
        engine = omega_conf_to_dataclass(config.actor_rollout_ref.rollout.checkpoint_engine)
        engine.backend = "naive"
        self.sync = CheckpointEngineManager(config=engine, actor_wg=self.workers, replicas=self.servers.get_replicas())
        self.sync.sleep_replicas()
        self.client = self.servers.get_client()
        self.arrival = Arrival(self.dtype, self._checksum())
        hosts = sorted({a["host"] for a in about})
        say(f"{self.ranks} ranks on {len(hosts)} machines, {len(self.servers.get_replicas())} servers, {self.dtype}")

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

    def _call(self, method: str, *arguments: Any) -> list[Any]:
        """What each rank answers. An argument that is a list has an entry per rank; others are the same for all."""
        rows = [a if isinstance(a, list) else [a] * self.ranks for a in (*arguments, self.watch.limit_s)]
        found: list[Any] = ray.get(getattr(self.workers, method)(*rows))
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
        found: Checksum = self._call("attnrl_checksum", self.dtype)[0]
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
        shares = share_requests([len(r.prompt) + len(r.response) for r in requests], self.ranks)
        mine = [[requests[i] for i in share] for share in shares]
        with self._phase("score"):
            found = self._call("attnrl_score", mine, scoring, self.budget)
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
