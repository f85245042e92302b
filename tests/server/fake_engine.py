"""A scripted stand-in for the engine: the same methods, no model, every delay under control."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

from prometheus_client import CollectorRegistry, Gauge

from jaxserve.client.input_processor import InputProcessor, PreparedRequest
from jaxserve.config.engine_config import EngineConfig
from jaxserve.errors import EngineDeadError
from jaxserve.outputs import (
    CompletionOutput,
    Logprob,
    PositionLogprobs,
    RequestMetrics,
    RequestOutput,
)
from jaxserve.params.beam_search_params import BeamSearchParams
from jaxserve.params.pooling_params import PoolingParams
from jaxserve.params.sampling_params import RequestOutputKind, SamplingParams
from jaxserve.request.queueing import Queueing
from jaxserve.scheduling.ledger import Ledger
from jaxserve.scheduling.ledger_accounts import RequestWork
from tests.resolved_config import resolved_config

VOCAB_SIZE = 0x110000


class FakeTokenizer:
    """One token a character, its code point the token id."""

    vocab_size = 256
    chat_template = "fake"
    eos_token_id = None
    takes_late_system = True

    def __init__(self) -> None:
        self.byte_table = _Bytes()

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return ([2] if add_special_tokens else []) + [ord(one) for one in text]

    def beginning(self, text: str, most: int) -> str:
        return text[:most]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        return "".join(chr(one) for one in ids if one != 2)

    def token_text(self, token_id: int) -> str:
        return chr(token_id)

    def convert_ids_to_tokens(self, ids: Iterable[int]) -> list[str | None]:
        return [chr(one) for one in ids]

    def render_chat(
        self,
        messages: Sequence[dict[str, Any]],
        *,
        add_generation_prompt: bool,
        continue_final_message: bool,
        mark: bool,
        chat_template: str | None = None,
        tools: Sequence[dict[str, Any]] = (),
        **kwargs: Any,
    ) -> str:
        turns = "".join(f"({tool['function']['name']})" for tool in tools)
        turns += "".join(f"[{one['role']}]{one['content']}" for one in messages)
        turns = (chat_template or "") + turns
        return (
            turns
            + "".join(str(one) for one in kwargs.values())
            + ("[assistant]" if add_generation_prompt else "")
        )

    def info(self) -> dict[str, Any]:
        return {"tokenizer_class": "Fake", "chat_template": self.chat_template}

    def encode_chat(
        self, text: str, chat_template: str | None = None, *, add_special_tokens: bool = False
    ) -> list[int]:
        return self.encode(text, add_special_tokens)


class _Bytes:
    def __getitem__(self, token_id: int) -> bytes:
        return chr(token_id).encode()


class FakeEngine:
    """Answers every prompt with `reply`, one character a token.

    Attributes:
        times: of each request.
        reply: the text of completion 0; completion i starts with the digit i when n > 1.
        delay: seconds before each token.
        replies: the texts of all completions, in place of `reply`.
        fail_after, failure: raise `failure` after that many tokens.
        reports: what features have told of each completion by its end.
        abort_after: end the request with finish_reason "abort" after that many tokens.
        abort_reason: its stop_reason then.
        started, aborted, finished: request ids, in order.
        params: the sampling parameters of each request; limits: most tokens of each; turns: when
            and how urgent; beams: its search.
        rooms: clients and requests for which it was asked for room; room_error: what it says.
        ledger: of what was let in.
    """

    def __init__(
        self,
        reply: str = "hello",
        max_model_len: int = 64,
        labels: tuple[str, ...] = (),
        **config: Any,
    ) -> None:
        self.asked = EngineConfig(model="/models/fake", max_model_len=max_model_len, **config)
        self.config = resolved_config(max_model_len=max_model_len, **config)
        self.tokenizer: Any = FakeTokenizer()
        self.model_config: Any = SimpleNamespace(
            vocab_size=VOCAB_SIZE,
            eos_token_ids=(),
            num_layers=2,
            hidden_size=8,
            labels=labels,
            matryoshka=(),
            images=None,
        )
        self.max_model_len = max_model_len
        self.labels = labels
        self._inputs = InputProcessor(self.config, self.model_config, self.tokenizer)
        registry = CollectorRegistry()
        self.refused: list[str] = []
        self.metrics = SimpleNamespace(registry=registry, record_refused=self.refused.append)
        Gauge("jaxserve:num_requests_running", "running", registry=registry)
        self.is_ready = True
        self.is_dead = self.is_restarting = self.is_draining = False
        self.error: BaseException | None = None
        self.refusal: str | None = None
        self.silence: str | None = None
        self.states: list[str] = []
        self.reply = reply
        self.delay = 0.0
        self.replies: list[str] | None = None
        self.reports: dict[str, list[Any]] | None = None
        self.abort_after: int | None = None
        self.abort_reason: str | None = None
        self.fail_after: int | None = None
        self.failure: Callable[[], Exception] = lambda: EngineDeadError("gone at 0x7f00/secret")
        self.started: list[str] = []
        self.aborted: list[str] = []
        self.finished: list[str] = []
        self.params: list[SamplingParams] = []
        self.beams: list[BeamSearchParams | None] = []
        self.limits: list[int] = []
        self.prompts: list[list[int]] = []
        self.cache_salts: list[str | None] = []
        self.poolings: list[PoolingParams | None] = []
        self.num_generated: Counter[str] = Counter()
        self.unread: dict[str, int] = {}
        self.shut_down = False
        self.num_resets = 0
        self.rooms: list[tuple[str, int]] = []
        self.ledger = Ledger(self.config)
        self.room_error: Exception | None = None
        self.turns: list[Queueing] = []
        self.times = RequestMetrics(0.0, 1.0, None, 2.0, 3.0)

    async def wait_ready(self) -> None:
        while not self.is_ready:
            await asyncio.sleep(0.01)

    def warm_up(self) -> None: ...

    async def reset_prefix_cache(self) -> None:
        self.num_resets += 1

    async def shutdown(self) -> None:
        self.shut_down = True
        self.is_dead = True

    def generate(
        self, prompt: Any, params: SamplingParams, request_id: str, **queueing: Any
    ) -> AsyncIterator[RequestOutput]:
        return self.stream(self._inputs.prepare(prompt, params, request_id))

    def check_room(self, client: str = "", requests: int = 1) -> None:
        self.rooms.append((client, requests))
        if self.room_error is not None:
            raise self.room_error
        self.ledger.check(client, requests)

    @contextmanager
    def admitted(self, prepared: Sequence[PreparedRequest]) -> Iterator[None]:
        works = {one.request_id: _work(one) for one in prepared}
        self.ledger.admit(works)
        try:
            yield
        finally:
            for name in works:
                self.ledger.ended(name)

    def unread_bytes(self, request_id: str) -> int:
        return self.unread.get(request_id, 0)

    async def prepare(self, *request: Any) -> PreparedRequest:
        return self._inputs.prepare(*request)

    async def stream(
        self, prepared: PreparedRequest, *, on_drop: Callable[[int], None] | None = None
    ) -> AsyncIterator[RequestOutput]:
        token_ids, request_id = prepared.group.prompt_token_ids, prepared.request_id
        limit = prepared.group.stop_rule.max_tokens
        params = prepared.params
        self.started.append(request_id)
        self.params.append(params)
        self.beams.append(prepared.group.beams)
        self.limits.append(limit)
        self.prompts.append(token_ids)
        self.poolings.append(prepared.group.pooling)
        self.cache_salts.append(prepared.group.cache_salt)
        self.turns.append(prepared.group.queueing)
        done = False
        try:
            async for output in self._outputs(token_ids, params, limit, request_id):
                done = output.finished
                if (
                    prepared.group.pooling is not None
                    and output.outputs[0].finish_reason != "abort"
                ):
                    output.embedding = [float(token_ids[0]), 0.1][: len(self.labels) or None]
                yield output
        finally:
            (self.finished if done else self.aborted).append(request_id)
            if not done and on_drop is not None:
                on_drop(self.num_generated[request_id])

    async def _outputs(
        self, token_ids: list[int], params: SamplingParams, limit: int, request_id: str
    ) -> AsyncIterator[RequestOutput]:
        texts = [(str(i) if params.n > 1 else "") + self.reply for i in range(params.n)]
        texts = self.replies or texts
        reasons = ["length" if len(text) > limit else "stop" for text in texts]
        texts = [text[:limit] for text in texts]

        def output(outputs: list[CompletionOutput], finished: bool) -> RequestOutput:
            prompt_logprobs = None
            if params.prompt_logprobs is not None:
                scored = [_logprobs(one, params.prompt_logprobs) for one in token_ids[1:]]
                prompt_logprobs = [None, *scored]
            return RequestOutput(
                request_id, None, token_ids, outputs, finished, prompt_logprobs, self.times, 3
            )

        def completion(index: int, text: str, last: bool) -> CompletionOutput:
            ids = [ord(one) for one in text]
            logprobs = None
            if params.needs_logprobs:
                named = {t: Logprob(-9.0, None, chr(t)) for t in params.logprob_token_ids or ()}
                logprobs = [named | _logprobs(one, params.logprobs or 0) for one in ids]
            reason = reasons[index] if last else None
            told = self.reports if last else None
            return CompletionOutput(index, text, ids, None, logprobs, reason, reports=told)

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
                    ended = [completion(i, "", True) for i in range(params.n)]
                    for one in ended:
                        if one.finish_reason == "abort":
                            one.stop_reason = self.abort_reason
                    yield output(ended, True)
                    return
                total += 1
                self.num_generated[request_id] = total
                last = step == len(text) - 1
                if params.output_kind is RequestOutputKind.DELTA:
                    finished = last and index == len(texts) - 1
                    yield output([completion(index, text[step], last)], finished)
        if params.output_kind is RequestOutputKind.FINAL_ONLY:
            yield output([completion(i, text, True) for i, text in enumerate(texts)], True)


def _work(prepared: PreparedRequest) -> RequestWork:
    group = prepared.group
    turn, asked = group.queueing, group.num_output_asked
    size = len(group.prompt_token_ids)
    return RequestWork(turn.client, size, len(group.sequence_ids), num_output=asked)


def _logprobs(token_id: int, count: int) -> PositionLogprobs:
    """The token itself is the second best; the best ones are the code points after it."""
    entries = {token_id: Logprob(-0.5, 2, chr(token_id))}
    for rank in range(1, count + 1):
        if rank != 2:
            other = token_id + rank
            entries[other] = Logprob(-0.25 * rank, rank, chr(other))
    return entries
