"""A streaming client of any server with an OpenAI-compatible API, that watches the clock."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass, field
from typing import Any

import httpx

from jaxserve.bench.datasets import BenchPrompt
from jaxserve.errors import ValidationError

ENDPOINTS = {"openai": "/v1/completions", "openai-chat": "/v1/chat/completions"}


@dataclass(slots=True)
class RequestTimes:
    """What became of one request. Times are seconds of one monotonic clock.

    Attributes:
        sent: when the request was sent.
        prompt_tokens: as the server counted them; as we did where it does not say.
        output_tokens: likewise.
        chunks: when each piece of output came.
        text: the output.
        error: why it failed; empty when it did not.
    """

    sent: float
    prompt_tokens: int = 0
    output_tokens: int = 0
    chunks: list[float] = field(default_factory=list)
    text: str = ""
    error: str = ""

    @property
    def ttft(self) -> float:
        """Time to the first token."""
        return self.chunks[0] - self.sent

    @property
    def e2el(self) -> float:
        """Time to the last token."""
        return self.chunks[-1] - self.sent

    @property
    def tpot(self) -> float | None:
        """Mean time of a token after the first; None when there is only one."""
        if self.output_tokens < 2:
            return None
        return (self.e2el - self.ttft) / (self.output_tokens - 1)

    @property
    def itl(self) -> list[float]:
        """Gaps between pieces of output."""
        return [later - earlier for earlier, later in zip(self.chunks, self.chunks[1:])]


@dataclass(frozen=True, slots=True)
class Target:
    """Where requests go, and what each of them carries.

    Attributes:
        base_url: such as http://127.0.0.1:8000.
        backend: a key of ENDPOINTS.
        endpoint: path, in place of the backend's own.
        model: name that the server knows.
        body: further fields of every request: temperature, ignore_eos, ...
        api_key: bearer token.
    """

    base_url: str
    backend: str
    model: str
    endpoint: str | None = None
    body: dict[str, Any] = field(default_factory=dict)
    api_key: str | None = None

    def __post_init__(self) -> None:
        if self.backend not in ENDPOINTS:
            raise ValidationError("backend", self.backend, f"one of {', '.join(ENDPOINTS)}")

    def request(self, prompt: BenchPrompt) -> dict[str, Any]:
        """The JSON body of one request."""
        body: dict[str, Any] = {
            "model": self.model,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.backend == "openai":
            body |= {"prompt": prompt.prompt, "max_tokens": prompt.output_len}
        else:
            if not isinstance(prompt.prompt, str):
                raise ValidationError("prompt", "token ids", "text: a chat takes no token ids")
            body["messages"] = [{"role": "user", "content": prompt.prompt}]
            body["max_completion_tokens"] = prompt.output_len
        return body | self.body


def open_client(target: Target) -> httpx.AsyncClient:
    """A client without limits of its own: a load test must not queue in the client."""
    headers = {"Authorization": f"Bearer {target.api_key}"} if target.api_key else {}
    return httpx.AsyncClient(
        base_url=target.base_url,
        headers=headers,
        timeout=None,
        limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
    )


async def first_model(client: httpx.AsyncClient) -> str:
    """The name of the first model that a server lists."""
    response = await client.get("/v1/models")
    response.raise_for_status()
    return str(response.json()["data"][0]["id"])


async def wait_until_ready(client: httpx.AsyncClient, seconds: float) -> None:
    """Wait until a server lists its models.

    Raises:
        TimeoutError: it did not within so many seconds.
    """
    deadline = time.monotonic() + seconds
    while True:
        try:
            await first_model(client)
            return
        except (httpx.HTTPError, KeyError, IndexError) as error:
            if time.monotonic() >= deadline:
                raise TimeoutError(f"{client.base_url} is not ready: {error}") from error
        await asyncio.sleep(0.2)


async def send(client: httpx.AsyncClient, target: Target, prompt: BenchPrompt) -> RequestTimes:
    """Send one request and note when each piece of its output comes."""
    times = RequestTimes(time.perf_counter(), prompt.prompt_len or 0)
    path = target.endpoint or ENDPOINTS[target.backend]
    try:
        async with client.stream("POST", path, json=target.request(prompt)) as response:
            if response.status_code != 200:
                body = (await response.aread()).decode(errors="replace")
                times.error = f"HTTP {response.status_code}: {body[:500]}"
                return times
            async for line in response.aiter_lines():
                if line.startswith("data:"):
                    _take_event(line[5:].strip(), times)
    except httpx.HTTPError as error:
        times.error = f"{type(error).__name__}: {error}"
    if not times.error and not times.chunks:
        times.error = "the stream ended without output"
    return times


def _take_event(data: str, times: RequestTimes) -> None:
    if data == "[DONE]":
        return
    now = time.perf_counter()
    event = json.loads(data)
    if "error" in event:
        times.error = json.dumps(event["error"])[:500]
        return
    if event.get("choices"):
        choice = event["choices"][0]
        text = choice.get("text") or choice.get("delta", {}).get("content") or ""
        finished = choice.get("finish_reason") is not None
        # a token may be no whole character yet; a chat's first chunk names the role and is no token
        token_without_text = "text" in choice and not finished
        if text or token_without_text or (finished and not times.chunks):
            times.chunks.append(now)
            times.output_tokens += 1
        times.text += text
    usage = event.get("usage")
    if usage:
        times.prompt_tokens = usage["prompt_tokens"]
        times.output_tokens = usage["completion_tokens"]
