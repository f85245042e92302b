"""A client of fake engines, each in a process of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from jaxserve.config.engine_config import EngineConfig, Isolation
from jaxserve.isolation.process_client import ProcessClient
from jaxserve.isolation.replicas import ReplicaClient
from jaxserve.observability.step_clock import ClientClock
from jaxserve.outputs import RequestOutput
from jaxserve.params.sampling_params import RequestOutputKind, SamplingParams
from tests.jaxserve.isolation.fake_child import next_token
from tests.waiting import until

MODULE = "tests.jaxserve.isolation.fake_child"
CONFIG = EngineConfig(
    model="fake", max_model_len=512, max_num_seqs=4, block_size=8, skip_tokenizer_init=True
)


class Serving:
    """A client, and what came of its requests."""

    def __init__(self, client: Any, news: threading.Event):
        self.client, self.news = client, news
        self.tokens: dict[str, list[int]] = {}
        self.ends: dict[str, Any] = {}
        self.died = 0

    def prepared(self, name: str, prompt: Any, length: int = 30, n: int = 1) -> Any:
        params = SamplingParams(
            n=n, max_tokens=length, seed=len(name), output_kind=RequestOutputKind.DELTA
        )
        return self.client.inputs.prepare(prompt, params, name)

    def add(self, name: str, prompt: Any, length: int = 30, n: int = 1) -> None:
        self.client.add(self.prepared(name, prompt, length, n))

    def turn(self) -> None:
        assert self.news.wait(20), "nothing came"
        self.news.clear()
        for output in self.client.outputs():
            self.take(output)
        for name, error in self.client.take_failures().items():
            self.ends[name] = error

    def take(self, output: RequestOutput) -> None:
        for one in output.outputs:
            self.tokens.setdefault(f"{output.request_id}.{one.index}", []).extend(one.token_ids)
        if output.finished:
            self.ends[output.request_id] = output.outputs[0].finish_reason

    def until(self, done: Callable[[], bool]) -> None:
        while not done():
            self.turn()

    def finish(self) -> None:
        self.until(lambda: not self.client.has_work)


@contextmanager
def serving(
    *, spare: bool = False, config: EngineConfig = CONFIG, **settings: Any
) -> Iterator[Serving]:
    news = threading.Event()
    isolation = Isolation(module=MODULE, spare=spare, **settings)
    kind = ProcessClient if config.data_parallel_size == 1 else ReplicaClient
    client = kind(config, ClientClock(), news.set, isolation)
    client.start()
    try:
        until(lambda: client.is_ready or client.is_dead)
        assert not client.is_dead, client.error
        until(lambda: all(one.is_ready for one in getattr(client, "_engines", ())))
        yield Serving(client, news)
    finally:
        client.close()
        client.join()


def expected(name: str, prompt: list[int], length: int, index: int = 0) -> list[int]:
    tokens: list[int] = []
    while len(tokens) < length:
        tokens.append(next_token(len(name) + index, prompt + tokens))
    return tokens
