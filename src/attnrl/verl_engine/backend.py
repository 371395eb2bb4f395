"""The Backend over verl, from the driver's side: seven verbs, and `begin`."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import ray
from omegaconf import OmegaConf
from ray.exceptions import RayError
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from verl.trainer.constants_ppo import get_ppo_ray_runtime_env

from attnrl.backend import check_ids, check_requests
from attnrl.config import Config
from attnrl.data.texts import stop_token_ids
from attnrl.errors import AttnRLError, ConfigError, MissingFileError, TrainingError
from attnrl.policy.passes import minibatches
from attnrl.policy.rates import Counters, learning_rate
from attnrl.ranks import verbs
from attnrl.ranks.arrival import Arrival
from attnrl.ranks.machines import seeing
from attnrl.ranks.session import Session
from attnrl.ranks.share import deal, in_order, share_packs
from attnrl.ranks.watch import Watch
from attnrl.scoring import scorer
from attnrl.scoring.scorer import ScoreReport
from attnrl.types import Ids, Request, Rollout, Sample, Sampling, ScoreRequest, Scores, Scoring
from attnrl.verl_engine import settings, worker
from attnrl.verl_engine.servers import Servers

SERVED = "the servers' {}; see data.max_prompt_tokens and sampling.max_response_tokens"


def say(line: str) -> None:
    print(f"verl: {line}", file=sys.stderr, flush=True)


class VerlBackend:
    """One policy on a Ray cluster: FSDP2 ranks that score and learn, vLLM servers that generate.

    Servers on the ranks' GPUs hold weights and cache only while they generate; every call of another verb puts them to
    sleep. Servers on GPUs of their own draw what was begun while ranks score and update, and get new weights when they
    are next asked, once all that was begun has been drawn. After each weight sync every server answers a probe: its
    log-probs must be the learner's, and after an update other ones.

    A checkpoint holds `model/` (Hugging Face format), `actor/` (shards, for any number of ranks) and `verl.json`.

    Metrics of `update` are those of the local engine; those of `metrics`:
    engine/PHASE_seconds       time in start, generate, sync, score, update, save, load, metrics
    score/...                  as of the local engine: time of the slowest rank, tokens and packs of all
    generate/shared_context    share of context tokens that a server's cache held
    sync/count                 weight syncs
    sync/logprob_gap           largest mean gap of log-probs between a server and the learner after a sync, nats
    device/peak_memory_gb      most device memory a rank held, GB (GPU only)
    """

    def __init__(
        self, config: Config, composed: Any, *, model: str, tokenizer: Any, learn: bool, run_dir: Path | None
    ) -> None:
        """`composed`: verl's config, as ours means it."""
        self.dtype = settings.dtype_of(config)
        self.overrides = settings.overrides(config, model=model, learn=learn)
        self.config = composed
        self.options, self.budget, self.seed = config.update, config.update.microbatch_tokens, config.run.seed
        self.tokenizer, self.learns = tokenizer, learn
        self.version = 0
        self.counters = Counters()
        self.scored = ScoreReport()  # since `metrics` was last asked: time of the slowest rank, tokens of all
        self.watch = Watch(config.engine.verl.phase_limit_s, say, key="engine.verl.phase_limit_s")
        self.closed = False
        say("overrides: " + " ".join(self.overrides))
        self.session = Session()
        with self._phase("start"):
            self._start(config, run_dir)

    # ---- the verbs

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Rollout]:
        """One rollout per request, in order. Requests of a tree go to one server, whose cache holds what they share."""
        return self.begin(requests, sampling)()

    def begin(self, requests: Sequence[Request], sampling: Sampling) -> Callable[[], list[Rollout]]:
        """What gives the rollouts: drawn meanwhile by servers on GPUs of their own, drawn already by others."""
        if not requests:
            return list
        check_requests(requests, self.vocabulary, {SERVED: self.config.actor_rollout_ref.rollout.max_model_len})
        if self.servers.held != self.version:
            self._sync(requests[0].context[:256])
        drawing = self.servers.begin(requests, sampling)

        def wait() -> list[Rollout]:
            with self._phase("generate"):
                return self.servers.wait(drawing)

        if self.servers.apart:
            return wait
        rollouts = wait()
        return lambda: rollouts

    def score(self, requests: Sequence[ScoreRequest], scoring: Scoring) -> list[Scores]:
        """Log-probs, entropy and FCI, each rank over its share. Paper: Eq. 4-6."""
        scorer.check_requests(requests, self.vocabulary, scoring.temperature)
        self._sleep()
        return self._score(requests, scoring, self.scored)

    def update(self, samples: Sequence[Sample]) -> dict[str, float]:
        """One pass over the samples in the local engine's minibatches; token-mean over all ranks. Paper: Eq. 1."""
        if not self.learns:
            raise ConfigError("this engine was started without a learner: it can sample and score, not train")
        check_ids([s.prompt for s in samples], self.vocabulary, "prompt of sample")
        check_ids([s.response for s in samples], self.vocabulary, "response of sample")
        self._sleep()
        plan = minibatches(samples, self.options, seed=self.seed, version=self.version)
        dealt = [share_packs(samples, rows, self.ranks, self.budget, share=self.shares) for rows in plan]
        shares = [[minibatch[rank] for minibatch in dealt] for rank in range(self.ranks)]
        lr = learning_rate(self.options, self.counters.updates)
        with self._phase("update"):
            (metrics, self.counters), *others = self._call(verbs.update, shares, self.counters)
            for other, _ in others:  # norms, skipped updates and counters are the same on every rank
                metrics.add(other)
            if metrics.norms:
                self.arrival.updated(self._call(verbs.checksum, self.dtype)[0], update=self.version + 1, lr=lr)
        self.version += 1
        lr = learning_rate(self.options, self.counters.updates)
        found: dict[str, float] = metrics.summary(lr=lr, samples=sum(map(len, plan)))
        return found

    def save(self, path: Path) -> None:
        """Write weights, optimizer and counters into the existing directory `path`; ranks draw no random numbers."""
        if not path.is_dir():
            raise MissingFileError(f"no directory {path} to save into")
        self._sleep()
        with self._phase("save"):
            self._call(verbs.save, str(path.absolute()), self.dtype)
        self.tokenizer.save_pretrained(path / "model")
        state = {"version": self.version, "ranks": self.ranks, "counters": asdict(self.counters)}
        (path / settings.STATE).write_text(json.dumps({**state, "overrides": self.overrides}, indent=2) + "\n")

    def load(self, path: Path) -> None:
        """Restore exactly what `save` wrote, by as many ranks or others."""
        state = settings.read_state(path)
        self._sleep()
        with self._phase("load"):
            self._call(verbs.load, str(path.absolute()))
            self.arrival.loaded(self._call(verbs.checksum, self.dtype)[0])
        self.servers.held = None
        self.version, self.counters = state["version"], Counters(**state["counters"])

    def metrics(self) -> dict[str, float]:
        """What the engine did since it was last asked; see the class."""
        found = self.watch.metrics() | self.scored.metrics() | self.servers.metrics() | self.arrival.metrics()
        self.scored = ScoreReport()
        if not self.closed:
            with self._phase("metrics"):
                held = max(self._call(verbs.memory))
            found |= {"device/peak_memory_gb": held} if held else {}
        return found

    def close(self) -> None:
        """End servers, ranks and, where this process started it, Ray; nothing is left behind on this machine."""
        if not self.closed:
            self.closed = True
            ray.shutdown()
            self.session.close()

    # ---- servers and ranks

    def _start(self, asked: Config, run_dir: Path | None) -> None:
        """Ray, the worker group, and the servers."""
        config, server_gpus = self.config, asked.engine.verl.server_gpus
        if not ray.is_initialized():
            environment = OmegaConf.to_container(OmegaConf.create(get_ppo_ray_runtime_env(config)))
            ray.init(**{**OmegaConf.to_container(config.ray_kwargs.ray_init), "runtime_env": environment})
            self.session.note_children()
        self.ranks = config.trainer.n_gpus_per_node * config.trainer.nnodes
        machines = [config.trainer.n_gpus_per_node] * config.trainer.nnodes
        settings.check_room([node["Resources"] for node in ray.nodes() if node["Alive"]], machines, server_gpus)
        pool = RayResourcePool(process_on_nodes=machines, max_colocate_count=settings.CPUS, name_prefix="pool")
        role = "actor_rollout_ref" if self.learns and self.options.kl_weight > 0 else "actor_rollout"
        made = RayClassWithInitArgs(cls=ray.remote(worker.Worker), config=config.actor_rollout_ref, role=role)
        self.workers = RayWorkerGroup(resource_pool=pool, ray_cls_with_init=made, device_name=config.trainer.device)
        model = Path(config.actor_rollout_ref.model.path)
        hosts = seeing(partial(self._call, verbs.look), [model] if model.is_dir() else [], run_dir)
        started = self._call(worker.start, self.options, asked.sampling.temperature)
        self.vocabulary, self.shares, generation = started[0]
        stop_ids = stop_token_ids(generation, self.tokenizer)
        self.servers = Servers(config, self.workers, pool, stop_ids, apart=server_gpus > 0)
        self.arrival = Arrival(self.dtype, self._call(verbs.checksum, self.dtype)[0])
        say(f"{self.ranks} ranks on {len(hosts)} machines, {len(self.servers.handles)} servers, {self.dtype}")

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
        return list(ray.get(self.workers.attnrl(*every)))

    def _sync(self, context: Ids) -> None:
        """Servers get the weights of the ranks and answer the probe: the first context that a run asks for."""
        if self.arrival.probe is None:
            self.arrival.probe = context
        with self._phase("sync"):
            self.servers.sync(self.version)
        with self._phase("generate"):
            self.arrival.drawn = self.servers.probe(self.arrival.probe)
        if self.servers.apart:
            self._compare()

    def _sleep(self) -> None:
        """Servers on the ranks' GPUs give their memory back; then the ranks check what they said of the probe."""
        if self.servers.held is None or self.servers.apart:
            return
        with self._phase("sync"):
            self.servers.sleep()
        self._compare()

    def _compare(self) -> None:
        """The ranks check what the servers said of the probe."""
        if asked := self.arrival.asked():
            scores = self._score(asked, Scoring(fci=False), ScoreReport())  # no part of the iteration's work
            with self._phase("sync"):
                self.arrival.arrived(scores)

    def _score(self, requests: Sequence[ScoreRequest], scoring: Scoring, report: ScoreReport) -> list[Scores]:
        shares = deal([len(r.prompt) + len(r.response) for r in requests], self.ranks)
        mine = [[requests[i] for i in share] for share in shares]
        with self._phase("score"):
            found = self._call(verbs.score, mine, scoring, self.budget)
        report.add([rank for _, rank in found])
        return in_order(shares, [scores for scores, _ in found])


def cause(error: BaseException) -> str:
    """The innermost reason, in one line: Ray's own errors begin with it, others may have a trace before it."""
    while (inner := getattr(error, "cause", None) or error.__cause__) is not None and inner is not error:
        error = inner
    said = str(error).split("\nfull_key: ")[0]  # which Hydra ends with
    lines = [line.strip() for line in said.splitlines() if line.strip()] or [""]
    return f"{type(error).__name__}: {lines[0 if isinstance(error, RayError) else -1]}"[:500]
