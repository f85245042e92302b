"""A reader that does not keep up loses nothing and holds little."""

from __future__ import annotations

import asyncio
import tracemalloc

from jaxserve.client.output_queue import MOST_TOKENS, MOST_WAITING, OutputQueue
from jaxserve.outputs import CompletionOutput, Logprob, RequestOutput
from jaxserve.params.sampling_params import RequestOutputKind


def output(token: int, *, index: int = 0, last: bool = False) -> RequestOutput:
    logprobs = [{token: Logprob(-1.0, 1)}]
    reason = "length" if last else None
    one = CompletionOutput(index, f"{token},", [token], float(-token), logprobs, reason)
    return RequestOutput("r", None, [1], [one], last)


async def drained(queue: OutputQueue) -> list[RequestOutput]:
    return [await queue.get() for _ in range(len(queue._waiting))]


def test_deltas_are_put_together() -> None:
    async def main() -> None:
        queue = OutputQueue()
        queue.kind = RequestOutputKind.DELTA
        for token in range(20_000):
            queue.put_nowait(output(token, index=token % 2))
        queue.put_nowait(output(20_000, index=0, last=True))
        assert len(queue._waiting) <= MOST_WAITING + 20_000 // MOST_TOKENS + 2
        found = await drained(queue)
        for index in (0, 1):
            pieces = [one for item in found for one in item.outputs if one.index == index]
            tokens = [t for one in pieces for t in one.token_ids]
            assert tokens == [*range(index, 20_001, 2)]
            assert "".join(one.text for one in pieces) == "".join(f"{t}," for t in tokens)
            assert [t for one in pieces for lp in one.logprobs or [] for t in lp] == tokens
            assert pieces[-1].cumulative_logprob == -float(tokens[-1])
        assert found[-1].finished
        assert {one.index: one.finish_reason for one in found[-1].outputs}[0] == "length"

    asyncio.run(main())


def test_cumulative_outputs_take_each_others_place() -> None:
    async def main() -> None:
        queue = OutputQueue()
        queue.kind = RequestOutputKind.CUMULATIVE
        for token in range(1000):
            queue.put_nowait(output(token))
        found = await drained(queue)
        assert len(found) == MOST_WAITING
        assert [one.outputs[0].token_ids[0] for one in found] == [*range(MOST_WAITING - 1), 999]

    asyncio.run(main())


def test_errors_are_kept_apart() -> None:
    async def main() -> None:
        queue = OutputQueue()
        queue.kind = RequestOutputKind.DELTA
        for token in range(MOST_WAITING + 5):
            queue.put_nowait(output(token))
        queue.put_nowait(error := RuntimeError())
        assert (await drained(queue))[-1] is error

    asyncio.run(main())


def test_a_reader_is_woken_and_one_that_was_cancelled_loses_nothing() -> None:
    async def main() -> None:
        queue = OutputQueue()
        reader = asyncio.ensure_future(queue.get())
        await asyncio.sleep(0)
        queue.put_nowait(first := output(1))
        queue.put_nowait(second := output(2))
        assert await reader is first
        assert await queue.get() is second
        reader = asyncio.ensure_future(queue.get())
        await asyncio.sleep(0)
        queue.put_nowait(third := output(3))
        reader.cancel()
        await asyncio.gather(reader, return_exceptions=True)
        assert await queue.get() is third

    asyncio.run(main())


def test_an_empty_queue_is_small() -> None:
    """Each request that waits has one."""
    tracemalloc.start()
    try:
        queues = [OutputQueue() for _ in range(1000)]
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held < 300 * len(queues)
