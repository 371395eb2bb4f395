"""The vLLM servers, from the driver's side: what they are asked, and whose weights they hold."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from concurrent.futures import Future, wait
from dataclasses import asdict
from typing import Any
from uuid import uuid4

import ray
from verl.checkpoint_engine import CheckpointEngineManager
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.rollout.llm_server import LLMServerManager

from attnrl.errors import TrainingError
from attnrl.ranks.arrival import SEED, TOKENS
from attnrl.types import Ids, Request, Rollout, Sampling, as_floats, as_ids

LOOK_S = 5.0  # between two looks at the servers while weights are on their way


class Servers:
    """Servers on the ranks' GPUs, or, `apart`, on GPUs of their own.

    `held` is the version of the weights they hold; None where these are not known to be the ranks'.
    """

    def __init__(self, config: Any, workers: Any, pool: Any, stop_ids: Sequence[int], *, apart: bool) -> None:
        beside = {} if apart else {"worker_group": workers, "rollout_resource_pool": pool}
        made = LLMServerManager.create(config=config, **beside)
        options = omega_conf_to_dataclass(config.actor_rollout_ref.rollout.checkpoint_engine)
        options.backend = options.backend if apart else "naive"  # within a GPU
        self.weights = CheckpointEngineManager(config=options, actor_wg=workers, replicas=made.get_replicas())
        self.client, self.handles = made.get_client(), made.server_handles
        self.stop_ids, self.apart = stop_ids, apart
        self.context_tokens = self.cached_tokens = self.syncs = 0  # since `metrics` was last asked
        self.begun: list[Future[list[Rollout]]] = []  # and not waited for yet
        self.sleep()  # at first they hold the model as it was loaded
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, daemon=True).start()  # ends with this process

    def sleep(self) -> None:
        """Give memory, and with it the weights, back to the ranks of the same GPUs."""
        self.held: int | None = None
        if not self.apart:
            self.weights.sleep_replicas()

    def sync(self, version: int) -> None:
        """Wake, and take the weights of the ranks. What was begun must have been waited for: verl would abort it."""
        if self.begun:
            raise TrainingError("weights would change under rollouts that were begun: wait for them first")
        sending = asyncio.run_coroutine_threadsafe(self._send(version), self.loop)
        try:
            while not wait([sending], LOOK_S).done:
                self._look()
        finally:
            if not sending.done():  # the other thread waits for these
                for actor in (*self.weights.actor_wg.workers, *self.handles):
                    ray.kill(actor)
        sending.result()
        self.held = version
        self.syncs += 1

    async def _send(self, version: int) -> None:
        await self.weights.update_weights(global_steps=version)

    def _look(self) -> None:
        """Raise where a server, or its engine, is gone: ranks that send it weights wait for its answer for ever."""
        asked = [server.collective_rpc.remote("check_health") for server in self.handles]
        ray.get(ray.wait(asked, num_returns=len(asked), timeout=LOOK_S)[0])

    def begin(self, requests: Sequence[Request], sampling: Sampling) -> Future[list[Rollout]]:
        """A rollout of each request, to be waited for."""
        self.begun.append(asyncio.run_coroutine_threadsafe(self._ask(requests, sampling), self.loop))
        return self.begun[-1]

    def wait(self, drawing: Future[list[Rollout]]) -> list[Rollout]:
        rollouts = drawing.result()
        self.begun.remove(drawing)
        return rollouts

    def probe(self, context: Ids) -> list[Rollout]:
        """Each server's answer to a context, drawn at temperature 1 without truncation."""
        asked = {"prompt_ids": context.tolist(), "sampling_params": self._parameters(Sampling(), TOKENS, SEED)}
        answers = [server.generate.remote(**asked, request_id=uuid4().hex) for server in self.handles]
        return [self._rollout(answer) for answer in ray.get(answers)]

    def metrics(self) -> dict[str, float]:
        """Since last asked."""
        shared = self.cached_tokens / max(1, self.context_tokens)
        found = {"generate/shared_context": shared, "sync/count": float(self.syncs)}
        self.context_tokens = self.cached_tokens = self.syncs = 0
        return found

    async def _ask(self, requests: Sequence[Request], sampling: Sampling) -> list[Rollout]:
        async def one(request: Request) -> Rollout:
            answer = await self.client.generate(
                request.tree or uuid4().hex,
                prompt_ids=request.context.tolist(),
                sampling_params=self._parameters(sampling, request.max_tokens, request.seed),
            )
            self.cached_tokens += answer.extra_fields.get("num_cached_tokens") or 0
            return self._rollout(answer)

        self.context_tokens += sum(len(r.context) for r in requests)
        return list(await asyncio.gather(*map(one, requests)))

    def _parameters(self, sampling: Sampling, max_tokens: int, seed: int) -> dict[str, Any]:
        asked = {"max_tokens": max_tokens, "seed": seed, "stop_token_ids": list(self.stop_ids), "logprobs": True}
        return {**asdict(sampling), "top_k": sampling.top_k or -1, **asked}

    def _rollout(self, answer: Any) -> Rollout:
        """verl's answer as a rollout; it says "completed" for both ends of a response."""
        drawn_by, held = answer.extra_fields["global_steps"], self.held
        if drawn_by != held:
            raise TrainingError(f"a server answered with the weights of version {drawn_by}, not {held}")
        if not answer.token_ids or answer.stop_reason != "completed":
            raise TrainingError(f"a server gave up a response: {answer.stop_reason}")
        finish = "stop" if answer.token_ids[-1] in self.stop_ids else "length"
        return Rollout(as_ids(answer.token_ids), as_floats(answer.log_probs), finish, drawn_by)  # type: ignore[arg-type]
