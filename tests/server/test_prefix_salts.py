"""Prefix cache hits of clients with different API keys, on a running engine."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.server.server_process import Server, running_server

FLAGS = ("--api-key", "sk-a", "--api-key", "sk-b", "--enable-prompt-tokens-details")
PROMPT = list(range(10, 210))


def cached(server: Server, key: str, **fields: Any) -> int:
    """Tokens of PROMPT that the engine has found."""
    body = {"prompt": PROMPT, "max_tokens": 1, **fields}
    headers = {"authorization": f"Bearer {key}"}
    answer = httpx.post(f"{server.url}/v1/completions", json=body, headers=headers, timeout=60)
    return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])


@pytest.mark.slow
def test_pages_of_one_key_are_not_found_for_another() -> None:
    with running_server("none", *FLAGS) as server:
        for salt in ({}, {"cache_salt": "mine"}):
            assert [cached(server, key, **salt) for key in ("sk-a", "sk-b")] == [0, 0]
            assert all(cached(server, key, **salt) > 100 for key in ("sk-a", "sk-b"))


@pytest.mark.slow
def test_keys_may_share_them() -> None:
    with running_server("none", *FLAGS, "--share-prefix-cache") as server:
        assert cached(server, "sk-a") == 0 and cached(server, "sk-b") > 100
