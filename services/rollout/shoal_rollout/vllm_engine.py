"""The vLLM engine behind `SamplingEngine` and `SwappableEngine`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

from vllm.sampling_params import RequestOutputKind
from vllm.sampling_params import SamplingParams as EngineParams
from vllm.v1.engine.exceptions import EngineDeadError

from shoal.errors import InternalError, UnavailableError
from shoal.types import InflightMode, SamplingParams
from shoal_rollout.engine import EngineSample, StillRunningError, worker_values
from shoal_rollout.worker_layout import Plain

if TYPE_CHECKING:
    from vllm.outputs import RequestOutput
    from vllm.v1.engine.async_llm import AsyncLLM


_POLL_S = 0.02
_OUTPUT_DELAY_S = 0.2
"""Final outputs that the engine has sent reach the requests' states within this time."""


class VllmEngine:
    """`SamplingEngine` and `SwappableEngine` over one AsyncLLM."""

    def __init__(self, llm: AsyncLLM) -> None:
        self._llm = llm
        self._late_pauses: set[asyncio.Task[None]] = set()

    @property
    def is_dead(self) -> bool:
        """Whether an engine process has ended."""
        return bool(self._llm.errored)

    async def sample(self, sample_id: str, prompt_ids: list[int], params: object) -> EngineSample:
        """See `SamplingEngine.sample`."""
        try:
            collector = await self._llm.add_request(sample_id, {"type": "token", "prompt_token_ids": prompt_ids}, params)
            output = await collector.get()
        except asyncio.CancelledError:
            await self._llm.abort(sample_id)
            raise
        except EngineDeadError as error:
            raise UnavailableError("the engine process has died; this server is ending, use another one") from error
        return engine_sample(output)

    async def abort(self, sample_ids: Sequence[str]) -> None:
        """See `SamplingEngine.abort`."""
        await self._llm.abort(list(sample_ids))

    def make_params(self, sampling: SamplingParams, stop_ids: Sequence[int], seed: int | None) -> EngineParams:
        """See `SamplingEngine.make_params`."""
        return EngineParams(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            max_tokens=sampling.max_new_tokens,
            min_tokens=sampling.min_new_tokens,
            stop_token_ids=list(stop_ids),
            ignore_eos=sampling.ignore_eos,
            seed=seed,
            # The sampled token's log-probability alone, in one flat list.
            logprobs=0,
            flat_logprobs=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
            # The object belongs to this server, so the engine need not copy it.
            skip_clone=True,
        )

    async def call_workers(self, method: str, *args: Plain) -> list[Plain]:
        """See `SwappableEngine.call_workers`."""
        try:
            answers: list[Plain] = await self._llm.collective_rpc(method, args=args)
        except EngineDeadError as error:
            raise UnavailableError("the engine process has died; this server is ending") from error
        return worker_values(answers)

    async def pause(self, inflight: InflightMode, timeout_s: float) -> int:
        """See `SwappableEngine.pause`."""
        if inflight is InflightMode.WAIT:
            await self._pause_when_done(timeout_s)
            return 0
        num_running = len(self._llm.output_processor.request_states) if inflight is InflightMode.ABORT else 0
        # pause_generation() would add 20 ms of sleep, so that final outputs reach callers before it answers; nothing here needs that order.
        await self._llm.engine_core.pause_scheduler_async(mode=inflight.value, clear_cache=False)
        return num_running

    async def finish_swap(self, version: str) -> None:
        """See `SwappableEngine.finish_swap`."""
        if not await self._llm.reset_prefix_cache(reset_running_requests=True):
            raise InternalError("the engine did not give up its cached keys and values after a weight swap")
        await self._llm.update_weight_version(version)

    async def update_version(self, version: str) -> None:
        """Tag tokens sampled from now on."""
        await self._llm.update_weight_version(version)

    async def resume(self) -> None:
        """See `SwappableEngine.resume`."""
        await self._llm.resume_generation()

    async def _pause_when_done(self, timeout_s: float) -> None:
        """Hold new requests and let running ones end.

        A request that lost its cache blocks counts as new for the engine, although it has tokens: with those the engine goes on first.
        """
        deadline_s = time.monotonic() + timeout_s
        while await self._pause_idle(deadline_s):
            begun = await self._begun()
            if not begun:
                return
            await self.resume()
            await self._until_ended(begun, deadline_s)
        await self.resume()
        msg = f"{len(self._llm.output_processor.request_states)} requests did not end within {max(timeout_s, 0):.1f} s"
        raise StillRunningError(f"{msg}; the old version is served on, commit with a longer deadline or with keep or abort")

    async def _pause_idle(self, deadline_s: float) -> bool:
        """Pause once nothing runs; False if that takes too long, then the pause may still come."""
        pausing = asyncio.create_task(self._llm.engine_core.pause_scheduler_async(mode="wait", clear_cache=False), name="pause-wait")
        # Never cancelled: the engine answers once it is idle, and somebody must take the answer.
        self._late_pauses.add(pausing)
        pausing.add_done_callback(self._late_pauses.discard)
        done, _ = await asyncio.wait({pausing}, timeout=max(deadline_s - time.monotonic(), 0.0))
        for task in done:
            task.result()
        return bool(done)

    async def _begun(self) -> set[str]:
        """Requests that have tokens and have not ended."""
        end_s = time.monotonic() + _OUTPUT_DELAY_S
        while begun := {name for name, state in self._llm.output_processor.request_states.items() if _num_tokens(state)}:
            if time.monotonic() >= end_s:
                break
            await asyncio.sleep(_POLL_S / 4)
        return begun

    async def _until_ended(self, requests: Collection[str], deadline_s: float) -> None:
        states = self._llm.output_processor.request_states
        while time.monotonic() < deadline_s and any(name in states for name in requests):  # noqa: ASYNC110 - vLLM has no event for it
            await asyncio.sleep(_POLL_S)

    def shutdown(self) -> None:
        """End the engine's processes."""
        self._llm.shutdown(timeout=5)


def _num_tokens(state: Any) -> int:  # noqa: ANN401 - vLLM is not type-checked here
    return 0 if state.detokenizer is None else int(state.detokenizer.num_output_tokens())


def engine_sample(output: RequestOutput) -> EngineSample:
    """What vLLM answered for one sample. Raises: InternalError: it failed."""
    completion: Any = output.outputs[0]
    if completion.finish_reason == "error":
        raise InternalError("the engine failed this sample; its log has the reason")
    spans = completion.weight_versions
    return EngineSample(
        token_ids=completion.token_ids,
        logprobs=completion.logprobs.logprobs,
        finish_reason=completion.finish_reason,
        versions=None if spans is None else [(span.version, span.start, span.end) for span in spans],
    )
