"""Which replica a request goes to, by its body."""

from __future__ import annotations

import json
from itertools import count
from typing import Any

import pytest

from server.on_ray.choice import (
    MOST_OUTPUT,
    NO_PROMPT,
    TOKENS_A_KEY,
    Choice,
    Prompt,
    Prompts,
    prompt_of,
)
from server.on_ray.forwarding import Forwarded


def body(**fields: Any) -> bytes:
    return json.dumps({"model": "m", "max_tokens": 8} | fields).encode()


def said(*texts: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text} for text in texts]


def common(one: Prompt, other: Prompt) -> int:
    return sum(a == b for a, b in zip(one.keys, other.keys))


def test_a_conversation_that_grows_keeps_its_keys() -> None:
    first = prompt_of(body(messages=said("x" * 640)))
    second = prompt_of(body(messages=said("x" * 640, "and now?"), temperature=0.3))
    assert len(first.keys) >= 10 and common(first, second) == len(first.keys)
    assert abs(first.num_tokens - 170) < 10 and first.num_output == 8
    salted = prompt_of(body(messages=said("x" * 640), cache_salt="a"))
    tools = prompt_of(body(messages=said("x" * 640), tools=[{"type": "function"}]))
    assert common(first, salted) == common(first, tools) == 0


def test_each_api_has_a_prompt_and_what_is_none_is_nobodys() -> None:
    for fields in ({"prompt": "x" * 64}, {"prompt": [1] * 64}, {"input": "x" * 64}):
        assert prompt_of(body(**fields)).keys
    assert prompt_of(b'{"prompt": "x"}').num_output == MOST_OUTPUT
    for wrong in (b"{", b"[1]", b'{"prompt": "x", "max_tokens": "many"}'):
        assert not prompt_of(wrong).keys
    for none in (b"[1]", b'{"prompt": [NaN]}', b'{"prompt": [1e999]}', b'{"x": NaN}'):
        assert prompt_of(none) is NO_PROMPT
    for name in ("max_tokens", "max_completion_tokens", "max_output_tokens"):
        for given, output in ((8, 8), (0, 0), (-5, 0), (10**6, MOST_OUTPUT), (None, MOST_OUTPUT)):
            assert prompt_of(json.dumps({name: given}).encode()).num_output == output


def test_files_count_as_their_digests() -> None:
    def shown(data: str) -> Prompt:
        urls = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}
        source = {"type": "base64", "media_type": "image/png", "data": data}
        content = [urls, {"type": "image", "source": source}, {"type": "text", "text": "x" * 64}]
        return prompt_of(body(messages=[{"role": "user", "content": content}]))

    one, other = shown("A" * 4000), shown("B" * 4000)
    assert one.num_tokens < 150 and one.keys != other.keys and one == shown("A" * 4000)
    told = "data:image/png;base64," + "A" * 640
    assert prompt_of(body(prompt=told)).num_tokens > 160, "a text"


def test_a_prompt_is_made_once_and_what_cannot_be_made_is_told_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    made = []

    def failing(body: bytes) -> Prompt:
        made.append(body)
        if body == b"bad":
            raise RuntimeError("no such prompt")
        return Prompt((b"k",), 1, 1)

    monkeypatch.setattr("server.on_ray.choice.prompt_of", failing)
    prompts, good, bad = Prompts(), Forwarded({}, b"good"), Forwarded({}, b"bad")
    assert prompts.of(good).keys and prompts.of(good).keys and made == [b"good"]
    del good
    assert not prompts._kept
    assert prompts.of(bad) is prompts.of(Forwarded({}, b"bad")) is NO_PROMPT
    assert [one.levelname for one in caplog.records] == ["ERROR"]


def test_a_prefix_draws_requests_until_others_have_less_to_do() -> None:
    choice, prompt = Choice[str](), prompt_of(body(prompt="x" * 64 * 10))
    first = choice.choose("r0", ["a", "b"], prompt)[0]
    other = "b" if first == "a" else "a"
    choice.ended("r0", first)
    for number in range(1, 7):  # each has the output alone to compute
        assert choice.choose(f"r{number}", ["a", "b"], prompt) == [first, other]
    while choice.choose(f"r{number}", ["a", "b"], prompt)[0] == first:
        number += 1
    assert number == 21, "160 tokens of prefix are 20 answers"
    alone = Choice[str]()
    assert [alone.choose(f"r{n}", ["a", "b"], NO_PROMPT)[0] for n in range(4)] == list("abab")


def test_a_request_counts_where_it_is_and_replicas_that_have_gone_are_forgotten() -> None:
    choice, long = Choice[str](), Prompt((b"k",), TOKENS_A_KEY * 4, 100)
    first, second = choice.choose("r", ["a", "b"], long)
    choice.moved("r", second)
    choice.ended("r", first)  # it is there no more
    assert choice.choose("s", ["a", "b"], NO_PROMPT)[0] == first
    choice.ended("r", second)
    choice.ended("s")
    again = Choice[str]()
    for name, replicas, prompt in (("p", "ab", long), ("q", "b", NO_PROMPT), ("r", "a", NO_PROMPT)):
        assert again.choose(name, list(replicas), prompt)[0] == replicas[0]
        again.ended(name)
    assert again.choose("s", ["a", "b"], long)[0] == "b", "the new a has no prefix"


def test_prefixes_are_found_more_often_than_in_turn() -> None:
    """Seven users who ask four times: the share of pieces that their replica was sent before."""

    def share(choose: Any) -> float:
        sent: dict[str, set[bytes]] = {"a": set(), "b": set()}
        asked = found = 0
        for turn in range(4):
            for user in range(7):
                text = f"{user} of all " * 40 + "and more of it, " * 8 * turn
                prompt = prompt_of(body(prompt=text))
                replica = choose(prompt)
                asked += len(prompt.keys)
                found += sum(key in sent[replica] for key in prompt.keys)
                sent[replica].update(prompt.keys)
        return found / asked

    choice, turns = Choice[str](), iter("ab" * 14)

    names = count()

    def by_prefix(prompt: Prompt) -> str:
        name = f"r{next(names)}"
        chosen = choice.choose(name, ["a", "b"], prompt)[0]
        choice.ended(name)
        return chosen

    assert share(by_prefix) > share(lambda prompt: next(turns)) + 0.15
