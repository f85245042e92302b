"""A streaming client of any server with an OpenAI-compatible API, that watches the clock."""

from __future__ import annotations

import asyncio
import json
import ssl
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import httpx

from jaxserve.bench.datasets import BenchPrompt
from jaxserve.bench.serve_options import ENDPOINTS
from jaxserve.errors import JaxServeError, ValidationError


@dataclass(slots=True)
class RequestTimes:
    """What became of one request. Times are seconds of one monotonic clock.

    Attributes:
        sent: when the request was sent.
        prompt_tokens: as the server counted them; as we did where it does not say.
        output_tokens: likewise; then each piece of output is taken for a token.
        chunks: when each piece of output came.
        text: the output.
        error: why it failed; empty when it did not.
        counted: whether the tokens were counted.
        ended: whether the stream came to its end.
    """

    sent: float
    prompt_tokens: int = 0
    output_tokens: int = 0
    chunks: list[float] = field(default_factory=list)
    text: str = ""
    error: str = ""
    counted: bool = False
    ended: bool = False

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
        """Mean time of a token after the first; None with one token, or all in one piece."""
        if min(self.output_tokens, len(self.chunks)) < 2:
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
        base_url: such as http://127.0.0.1:8000; a final /v1, as other clients want it, is dropped.
        backend: a key of ENDPOINTS.
        endpoint: path, in place of the backend's own.
        model: name that the server knows.
        body: further fields of every request: temperature, ignore_eos, ...
        api_key: bearer token.
        headers: further headers of every request.
        verify: whether the certificate of an https server is checked.
    """

    base_url: str
    backend: str
    model: str
    endpoint: str | None = None
    body: dict[str, Any] = field(default_factory=dict)
    api_key: str | None = None
    headers: dict[str, str] = field(default_factory=dict)
    verify: bool = True

    def __post_init__(self) -> None:
        try:
            url = httpx.URL(self.base_url)
        except httpx.InvalidURL as error:
            raise ValidationError("base_url", self.base_url, f"a URL ({error})") from error
        if url.scheme not in ("http", "https") or not url.host:
            raise ValidationError("base_url", self.base_url, "http://HOST:PORT or https://HOST")
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
        if prompt.priority:
            body["priority"] = prompt.priority
        return body | self.body


def open_client(target: Target) -> httpx.AsyncClient:
    """A client without limits of its own: a load test must not queue in the client."""
    key = {"Authorization": f"Bearer {target.api_key}"} if target.api_key else {}
    return httpx.AsyncClient(
        base_url=target.base_url.rstrip("/").removesuffix("/v1"),
        headers=key | target.headers,
        timeout=None,
        # certificates are slow to load and only https needs them
        verify=target.verify and target.base_url.startswith("https"),
        limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
    )


async def wait_until_ready(client: httpx.AsyncClient, seconds: float, model: str | None) -> str:
    """Wait until a server answers; returns the model to ask for, by default the first it lists.

    Raises:
        ValidationError: the server wants another API key, or lists no model and none was named.
        JaxServeError: it cannot be reached within so many seconds, or its certificate is not valid.
    """
    deadline = time.monotonic() + seconds
    while True:
        try:
            response = await client.get("/v1/models")
        except httpx.HTTPError as error:
            if _is_about_tls(error):
                raise JaxServeError(
                    f"{client.base_url}: {error}; --insecure accepts any certificate"
                ) from error
            trouble = _describe(error)
        else:
            if response.status_code < 500:
                return _model_of(response, client, model)
            trouble = f"HTTP {response.status_code}"
        if time.monotonic() >= deadline:
            raise JaxServeError(f"{client.base_url} is not ready: {trouble}")
        await asyncio.sleep(0.2)


def _model_of(response: httpx.Response, client: httpx.AsyncClient, model: str | None) -> str:
    status = response.status_code
    if status in (401, 403):
        value = "***" if "Authorization" in client.headers else None
        raise ValidationError(
            "api_key", value, f"a key that {client.base_url} knows: HTTP {status}"
        )
    if model:
        return model
    try:
        return str(response.json()["data"][0]["id"])
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise ValidationError(
            "model", None, f"a name, since {response.url} lists none (HTTP {status})"
        ) from error


async def send(client: httpx.AsyncClient, target: Target, prompt: BenchPrompt) -> RequestTimes:
    """Send one request and note when each piece of its output comes."""
    times = RequestTimes(time.perf_counter(), prompt.prompt_len or 0)
    path = target.endpoint or ENDPOINTS[target.backend]
    try:
        async with client.stream("POST", path, json=target.request(prompt)) as response:
            if response.status_code != 200:
                body = (await response.aread()).decode(errors="replace")
                times.error = f"HTTP {response.status_code}: {_one_line(body)}"
                return times
            async for line in _lines(response):
                if line.startswith(b"data:"):
                    _take_event(line[5:].strip(), times)
            kind = response.headers.get("content-type", "no type")
    except httpx.HTTPError as error:
        times.error = times.error or _describe(error)
    if not times.error and not times.chunks:
        times.error = f"no output in the stream ({kind})"
    elif not times.error and not times.ended:
        times.error = "the stream broke off"
    return times


async def _lines(response: httpx.Response) -> AsyncIterator[bytes]:
    """Lines of a stream of events: only \\n ends one, while text may hold other line separators."""
    rest = b""
    async for piece in response.aiter_bytes():
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            yield line
    yield rest


def _take_event(data: bytes, times: RequestTimes) -> None:
    if data == b"[DONE]":
        times.ended = True
        return
    now = time.perf_counter()
    try:
        event = json.loads(data)
    except ValueError:
        event = None
    if not isinstance(event, dict):
        text = data.decode(errors="replace")
        times.error = times.error or f"an event that is no JSON object: {_one_line(text)}"
        return
    if event.get("error"):
        times.error = times.error or _one_line(json.dumps(event["error"]))
        return
    if event.get("choices"):
        choice = event["choices"][0]
        delta = choice.get("delta") or {}
        shown = choice.get("text") or delta.get("content") or ""
        # what a model thinks before it answers is output too, under one of two names
        thought = delta.get("reasoning_content") or delta.get("reasoning")
        finished = choice.get("finish_reason") is not None
        # a token may be no whole character yet; a chat's first chunk names the role and is no token
        token_without_text = "text" in choice and not finished
        if shown or thought or token_without_text or (finished and not times.chunks):
            times.chunks.append(now)
            times.output_tokens += 1
        times.text += shown
        times.ended = times.ended or finished
    usage = event.get("usage")
    if usage:
        times.prompt_tokens = usage.get("prompt_tokens", times.prompt_tokens)
        times.output_tokens = usage.get("completion_tokens", times.output_tokens)
        times.counted = "completion_tokens" in usage


def _is_about_tls(error: BaseException) -> bool:
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, ssl.SSLError):
        cause = cause.__cause__ or cause.__context__
    return cause is not None


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".removesuffix(": ")


def _one_line(text: str) -> str:
    return " ".join(text.split())[:500]
