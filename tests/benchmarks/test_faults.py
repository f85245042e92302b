"""The report of faults counts what went wrong, each under its name."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from benchmarks.verify.faults.__main__ import LENGTH, Load, longest_silence
from jaxserve.errors import EngineDeadError
from jaxserve.outputs import CompletionOutput, RequestOutput

KNOWN = [*range(LENGTH)]


class FakeEngine:
    """Gives every request its index as a mistake.

    0 none, 1 a wrong token, 2 cut, 3 an error, 4 an error of its own.
    """

    async def generate(self, prompt: list[int], *_: Any) -> AsyncIterator[RequestOutput]:
        mistake = prompt[0] - 3
        tokens = KNOWN if mistake not in (2, 4) else KNOWN[: LENGTH // 2]
        end = "length" if mistake != 4 else "error"
        for place, token in enumerate(tokens):
            await asyncio.sleep(0)
            if mistake == 3 and place == LENGTH // 3:
                raise EngineDeadError("lost")
            told = token + 1 if mistake == 1 and place == LENGTH // 2 else token
            last = place == len(tokens) - 1
            one = CompletionOutput(0, "", [told], finish_reason=end if last else None)
            yield RequestOutput("x", None, prompt, [one], last)


@pytest.mark.parametrize("unavoidable", [0, 1])
def test_each_mistake_is_counted(unavoidable: int) -> None:
    async def strike() -> None:
        pass

    async def main() -> None:
        engine: Any = FakeEngine()
        load = Load(engine, 5)
        load.expected = [KNOWN] * 5
        found = await load.meet("none", strike, unavoidable)
        # a wrong token is not the whole answer either
        assert (found.requests, found.wrong, found.cut) == (5, 1, 2)
        assert (found.lost, found.errors) == (2 - unavoidable, unavoidable)

    asyncio.run(main())


def test_silence_is_the_longest_time_without_a_token() -> None:
    assert longest_silence(5.0, [1.0, 4.0, 6.0, 9.0, 9.5]) == 3.0
    assert longest_silence(5.0, [1.0]) == 0.0
