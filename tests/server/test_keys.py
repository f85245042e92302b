"""Keys from a file, and each key's share of the server."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from jaxserve.errors import ValidationError
from server.app import create_app
from server.cli import build_parser
from server.client_limits import Limits
from server.commands.edge_flags import allowed_hosts, api_keys, edge_limits
from server.keys import ApiKey, Bucket, read_keys
from tests.server.fake_engine import FakeEngine
from tests.server.test_event_stream import Connection, wait_for

COMPLETIONS = "/v1/completions"


def write(folder: Path, text: str) -> str:
    (folder / "keys.yaml").write_text(text)
    return str(folder / "keys.yaml")


def test_a_file_of_keys(tmp_path: Path) -> None:
    text = (
        "- {key: sk-1, name: one}\n- {key: sk-2, name: two, requests_per_minute: 5, priority: 3}\n"
    )
    assert read_keys(write(tmp_path, text)) == [
        ApiKey("sk-1", "one"),
        ApiKey("sk-2", "two", requests_per_minute=5, priority=3),
    ]
    assert "sk-1" not in repr(ApiKey("sk-1", "one"))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "sk-secret",
        "- sk-secret",
        "- {key: sk-secret}",
        "- {key: '', name: one}",
        "- {key: sk-secret, name: 1}",
        "- {key: sk-secret, name: one, tokens_per_minute: 0}",
        "- {key: sk-secret, name: one, tokens_per_minute: true}",
        "- {key: sk-secret, name: one, priority: high}",
        "- {key: sk-secret, name: one, rpm: 5}",
        "- {key: sk-secret, name: one}\n- {key: sk-secret, name: two}",
        "- {key: sk-secret, name: one}\n- {key: sk-other, name: one}",
        "- {key: sk-secret, name: 'one",
        "- !!python/object/apply:os.system ['true']",
    ],
)
def test_files_that_are_none(tmp_path: Path, text: str) -> None:
    with pytest.raises(ValidationError) as error:
        read_keys(write(tmp_path, text))
    assert "--api-keys-file" in str(error.value) and "sk-secret" not in str(error.value)


def test_a_bucket_fills_up_evenly() -> None:
    now = [0.0]
    bucket = Bucket(60, lambda: now[0])
    bucket.take(60)
    assert bucket.wait() == 1.0
    now[0] = 10.0
    assert bucket.wait() == 0.0 and bucket.wait(11) == 1.0
    bucket.take(70)  # more than there is: it is paid back
    assert bucket.wait() == 61.0
    now[0] = 10000.0
    assert bucket.wait(60) == 0.0 and bucket.wait(10**9) == 0.0


def test_requests_are_counted_by_key(engine: FakeEngine) -> None:
    keys = [ApiKey("a", "first", requests_per_minute=2), ApiKey("b", "second")]
    with TestClient(create_app(engine, api_keys=keys)) as client:

        def ask(key: str) -> int:
            headers = {"authorization": f"Bearer {key}"}
            response = client.post(COMPLETIONS, json={"prompt": "a"}, headers=headers)
            if response.status_code == 429:
                assert 1 <= int(response.headers["retry-after"]) <= 30
                error = response.json()["error"]
                assert error["type"] == "RateLimitError" and "first may have 2" in error["message"]
            return response.status_code

        assert [ask("a") for _ in range(4)] == [200, 200, 429, 429]
        assert [ask("b") for _ in range(4)] == [200] * 4
        assert client.get("/health").status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_tokens_are_counted_by_key(engine: FakeEngine, stream: bool) -> None:
    keys = [ApiKey("a", "first", tokens_per_minute=10)]
    headers = {"authorization": "Bearer a"}
    with TestClient(create_app(engine, api_keys=keys)) as client:
        body = {"prompt": [5, 6, 7], "stream": stream}
        assert client.post(COMPLETIONS, json=body, headers=headers).status_code == 200
        second = client.post(COMPLETIONS, json=body, headers=headers)
        assert second.status_code == 200, "3 tokens of the prompt and 5 generated ones are left"
        third = client.post(COMPLETIONS, json=body, headers=headers)
        assert third.status_code == 429 and 30 <= int(third.headers["retry-after"]) <= 45


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/responses", {"input": "a"}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 9}),
    ],
)
def test_quotas_of_other_apis(path: str, body: dict[str, object], stream: bool) -> None:
    keys = [ApiKey("a", "first", tokens_per_minute=22)]
    headers = {"x-api-key": "a"}
    with TestClient(create_app(FakeEngine(), api_keys=keys)) as client:
        # 18 tokens of the prompt and 5 generated ones
        assert client.post(path, json=body | {"stream": stream}, headers=headers).status_code == 200
        response = client.post(path, json=body, headers=headers)
        assert response.status_code == 429 and int(response.headers["retry-after"]) > 0


def test_a_key_has_a_priority_that_a_request_cannot_better() -> None:
    engine = FakeEngine(scheduling_policy="priority")
    keys = [ApiKey("a", "first", priority=5)]
    headers = {"authorization": "Bearer a"}
    with TestClient(create_app(engine, api_keys=keys)) as client:
        for asked in (None, -9, 7):
            body = {"prompt": "a"} if asked is None else {"prompt": "a", "priority": asked}
            assert client.post(COMPLETIONS, json=body, headers=headers).status_code == 200
    assert [turn.priority for turn in engine.turns] == [5, 5, 7]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (COMPLETIONS, {"prompt": "a"}),
        (COMPLETIONS, {"prompt": "a", "stream": True}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
        ("/invocations", {"prompt": "a"}),
        ("/v1/responses", {"input": "a"}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 9}),
        ("/v1/embeddings", {"input": "a"}),
        ("/pooling", {"input": "a"}),
    ],
)
def test_each_key_has_a_prefix_cache_of_its_own(path: str, body: dict[str, object]) -> None:
    """A request finds pages with its own salt, and which it is, its key and itself decide."""

    def salts(keys: list[ApiKey], share: bool = False) -> list[str | None]:
        engine = FakeEngine(enable_embeddings=True)
        limits = Limits(share_prefix_cache=share)
        with TestClient(create_app(engine, api_keys=keys, limits=limits)) as client:
            for salt in (None, "mine", "mine"):
                for key in ("sk-a", "sk-b"):
                    headers = {"authorization": f"Bearer {key}"}
                    asked = {**body, "cache_salt": salt}
                    assert client.post(path, json=asked, headers=headers).status_code == 200
            if keys:
                headers = {"authorization": "Bearer sk-a"}
                bad = client.post(path, json={**body, "cache_salt": "x" * 1025}, headers=headers)
                assert bad.status_code == 400 and "cache_salt" in bad.text
        return engine.cache_salts

    keys = [ApiKey("sk-a", "first"), ApiKey("sk-b", "second")]
    apart = salts(keys)
    assert len(set(apart)) == 4 and apart[2:4] == apart[4:6]
    assert all(one is not None and "sk-" not in one and "mine" not in one for one in apart)
    unsalted = [None, None, "mine", "mine", "mine", "mine"]
    assert salts(keys, share=True) == salts([]) == unsalted


def args(*words: str):
    return build_parser("serve").parse_args(["serve", *words])


def test_flags(tmp_path: Path) -> None:
    file = write(tmp_path, "- {key: sk-1, name: one, priority: 2}\n")
    assert api_keys(args()) == []
    assert [k.name for k in api_keys(args("--api-key", "x", "--api-key", "y"))] == [
        "key 1",
        "key 2",
    ]
    both = args("--api-key", "x", "--api-keys-file", file, "--scheduling-policy", "priority")
    assert [k.name for k in api_keys(both)] == ["key 1", "one"]
    with pytest.raises(ValidationError, match="priority"):
        api_keys(args("--api-keys-file", file))
    with pytest.raises(ValidationError, match="no name comes twice"):
        namesake = write(tmp_path, "- {key: sk-1, name: key 1}\n")
        api_keys(args("--api-key", "x", "--api-keys-file", namesake))
    for bad in (["--api-key", ""], ["--api-key", " "], ["--api-key", "x", "--api-key", "x"]):
        with pytest.raises(ValidationError, match="--api-key"):
            api_keys(args(*bad))


def test_limits_have_flags() -> None:
    assert edge_limits(args()) == Limits()
    found = edge_limits(
        args("--max-body-bytes", "1M", "--write-timeout", "2.5", "--max-choices", "7")
    )
    assert found == Limits(max_body_bytes=2**20, write_timeout=2.5, max_choices=7)
    for bad in (["--max-body-bytes", "0"], ["--write-timeout", "nan"], ["--max-body-bytes", "1G"]):
        with pytest.raises(ValidationError):
            edge_limits(args(*bad))


def test_hosts_by_default_are_this_machines() -> None:
    assert "localhost" in allowed_hosts(args()) and "localhost" in allowed_hosts(
        args("--host", "127.0.0.2")
    )
    assert allowed_hosts(args("--host", "0.0.0.0")) == ()
    assert allowed_hosts(args("--allowed-hosts", "*")) == ()
    assert allowed_hosts(args("--allowed-hosts", "a.example")) == ("a.example",)


def test_tokens_of_an_answer_that_nobody_waits_for_any_more_are_counted() -> None:
    engine, key = FakeEngine("a" * 50), ApiKey("k", "team", tokens_per_minute=1000)
    engine.delay = 0.005
    used: list[int] = []
    app = create_app(engine, api_keys=[key])

    async def leave() -> None:
        connection = Connection(COMPLETIONS, {"prompt": "a", "max_tokens": 50})
        connection.scope["headers"].append((b"authorization", b"Bearer k"))
        serving = asyncio.ensure_future(app(connection.scope, connection.receive, connection.send))
        await wait_for(engine.num_generated.total)
        connection.gone.set()
        await serving

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("server.keys.Client.used", lambda self, tokens: used.append(tokens))
        asyncio.run(leave())
    prompt, generated = used
    assert prompt == 2 and 0 < generated == engine.num_generated.total() < 50


def test_choices_count_before_they_begin() -> None:
    """What an allowance has left is looked at when a request comes: one must not be many."""
    engine, headers = FakeEngine(), {"authorization": "Bearer a"}
    keys = [ApiKey("a", "a", tokens_per_minute=1000)]
    with TestClient(create_app(engine, api_keys=keys)) as client:
        for n, limit, status in ((50, 30, 400), (30, 30, 200), (1, 60, 200)):
            body = {"prompt": "a", "n": n, "max_tokens": limit}
            answer = client.post("/v1/completions", json=body, headers=headers)
            assert answer.status_code == status, answer.text
            if status == 400:
                error = answer.json()["error"]
                assert error["param"] == "n" and "1000 tokens" in error["message"]
