"""A scripted stand-in for the engine: the same methods, no model, every delay under control."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from types import SimpleNamespace
from typing import Any

from prometheus_client import CollectorRegistry, Gauge

from jaxserve.config import EngineConfig
from jaxserve.errors import EngineDeadError
from jaxserve.outputs import CompletionOutput, Logprob, PositionLogprobs, RequestOutput
from jaxserve.sampling_params import RequestOutputKind, SamplingParams

VOCAB_SIZE = 0x110000


class FakeTokenizer:
    """One token a character, its code point the token id."""

    vocab_size = 256
    chat_template = "fake"

    def __init__(self) -> None:
        self.byte_table = _Bytes()

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return ([2] if add_special_tokens else []) + [ord(one) for one in text]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        return "".join(chr(one) for one in ids if one != 2)

    def token_text(self, token_id: int) -> str:
        return chr(token_id)

    def convert_ids_to_tokens(self, ids: Iterable[int]) -> list[str | None]:
        return [chr(one) for one in ids]

    def apply_chat_template(
        self,
        messages: Sequence[dict[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **kwargs: Any,
    ) -> str:
        turns = "".join(f"[{one['role']}]{one['content']}" for one in messages)
        return turns + "".join(kwargs.values()) + ("[assistant]" if add_generation_prompt else "")


class _Bytes:
    def __getitem__(self, token_id: int) -> bytes:
        return chr(token_id).encode()


class FakeEngine:
    """Answers every prompt with `reply`, one character a token.

    Attributes:
        reply: the text of completion 0; completion i starts with the digit i when n > 1.
        delay: seconds before each token.
        replies: the texts of all completions, in place of `reply`.
        fail_after, failure: raise `failure` after that many tokens.
        abort_after: end the request with finish_reason "abort" after that many tokens.
        started, aborted, finished: request ids, in order.
        params: the sampling parameters of each request.
    """

    def __init__(self, reply: str = "hello", **config: Any) -> None:
        self.config = EngineConfig(model="/models/fake", **config)
        self.tokenizer = FakeTokenizer()
        self.model_config = SimpleNamespace(vocab_size=VOCAB_SIZE)
        self.max_model_len = 64
        registry = CollectorRegistry()
        self.metrics = SimpleNamespace(registry=registry)
        Gauge("jaxserve:num_requests_running", "running", registry=registry)
        self.is_ready = True
        self.is_dead = False
        self.error: BaseException | None = None
        self.reply = reply
        self.delay = 0.0
        self.replies: list[str] | None = None
        self.abort_after: int | None = None
        self.fail_after: int | None = None
        self.failure: Callable[[], Exception] = lambda: EngineDeadError("gone at 0x7f00/secret")
        self.started: list[str] = []
        self.aborted: list[str] = []
        self.finished: list[str] = []
        self.params: list[SamplingParams] = []
        self.prompts: list[list[int]] = []
        self.shut_down = False

    async def wait_ready(self) -> None:
        while not self.is_ready:
            await asyncio.sleep(0.01)

    async def shutdown(self) -> None:
        self.shut_down = True
        self.is_dead = True

    async def generate(
        self,
        prompt: dict[str, list[int]],
        params: SamplingParams,
        request_id: str,
        *,
        priority: int = 0,
        arrival_time: float | None = None,
    ) -> AsyncIterator[RequestOutput]:
        params.verify(VOCAB_SIZE, self.max_model_len, self.config.max_logprobs)
        token_ids = prompt["prompt_token_ids"]
        self.started.append(request_id)
        self.params.append(params)
        self.prompts.append(token_ids)
        done = False
        try:
            async for output in self._outputs(token_ids, params, request_id):
                done = output.finished
                yield output
        finally:
            (self.finished if done else self.aborted).append(request_id)

    async def _outputs(
        self, token_ids: list[int], params: SamplingParams, request_id: str
    ) -> AsyncIterator[RequestOutput]:
        texts = [(str(i) if params.n > 1 else "") + self.reply for i in range(params.n)]
        texts = self.replies or texts
        assert params.max_tokens is not None
        reasons = ["length" if len(text) > params.max_tokens else "stop" for text in texts]
        texts = [text[: params.max_tokens] for text in texts]

        def output(outputs: list[CompletionOutput], finished: bool) -> RequestOutput:
            prompt_logprobs = None
            if params.prompt_logprobs is not None:
                scored = [_logprobs(one, params.prompt_logprobs) for one in token_ids[1:]]
                prompt_logprobs = [None, *scored]
            return RequestOutput(
                request_id, None, token_ids, outputs, finished, prompt_logprobs, None, 3
            )

        def completion(index: int, text: str, last: bool) -> CompletionOutput:
            ids = [ord(one) for one in text]
            logprobs = None
            if params.logprobs is not None:
                logprobs = [_logprobs(one, params.logprobs) for one in ids]
            reason = reasons[index] if last else None
            return CompletionOutput(index, text, ids, None, logprobs, reason)

        total = 0
        for step in range(max(len(text) for text in texts)):
            for index, text in enumerate(texts):
                if step >= len(text):
                    continue
                await asyncio.sleep(self.delay)
                if total == self.fail_after:
                    raise self.failure()
                if total == self.abort_after:
                    # As the engine does: every completion once more, also those that had ended.
                    for other, whole in enumerate(texts):
                        if step < len(whole):
                            reasons[other] = "abort"
                    yield output([completion(i, "", True) for i in range(params.n)], True)
                    return
                total += 1
                last = step == len(text) - 1
                if params.output_kind is RequestOutputKind.DELTA:
                    finished = last and index == len(texts) - 1
                    yield output([completion(index, text[step], last)], finished)
        if params.output_kind is RequestOutputKind.FINAL_ONLY:
            yield output([completion(i, text, True) for i, text in enumerate(texts)], True)


def _logprobs(token_id: int, count: int) -> PositionLogprobs:
    """The token itself is the second best; the best ones are the code points after it."""
    entries = {token_id: Logprob(-0.5, 2, chr(token_id))}
    for rank in range(1, count + 1):
        if rank != 2:
            other = token_id + rank
            entries[other] = Logprob(-0.25 * rank, rank, chr(other))
    return entries
