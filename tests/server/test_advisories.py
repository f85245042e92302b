"""Published advisories of other servers: each has a test, or a reason why it cannot apply."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from starlette.routing import Route
from starlette.testclient import TestClient

from server.app import create_app
from server.keys import ApiKey
from server.options import Options
from server.routes import page
from tests.server.fake_engine import FakeEngine
from tests.server.test_errors import CHAT, COMPLETIONS, OK_CHAT, assert_error

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "security.md"


def test_every_line_of_the_table_names_a_test_or_a_reason() -> None:
    table = PAGE.read_text().partition("## Advisories")[2].partition("\n## ")[0]
    lines = [line for line in table.splitlines() if re.match(r"\| (CVE|GHSA|no id)", line)]
    assert len(lines) >= 30
    for line in lines:
        _, ids, threat, shown, _ = line.split("|")
        assert ids.strip() and threat.strip()
        tests = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", shown)
        assert tests or shown.strip().startswith("cannot apply: "), line
        for file, name in tests:
            assert f"def {name}(" in (ROOT / file).read_text(), f"{file}::{name}"


@pytest.mark.parametrize("guards_metrics", [False, True])
def test_every_route_but_the_probes_needs_a_key(engine: FakeEngine, guards_metrics: bool) -> None:
    options = Options(guards_metrics=guards_metrics)
    app = create_app(engine, api_keys=[ApiKey("k", "a")], options=options)
    opened = {"/health", "/ping"} | page.OPEN_PATHS
    if not guards_metrics:
        opened |= {"/metrics", "/version"}
    with TestClient(app) as client:
        for route in app.routes:
            assert isinstance(route, Route)
            for method in route.methods or ():
                response = client.request(method, route.path)
                assert (response.status_code == 401) == (route.path not in opened), route.path


@pytest.mark.parametrize("field", ["prompt_embeds", "chat_template", "guided_regex", "guided_json"])
def test_what_would_be_run_or_unpickled_is_refused(client: TestClient, field: str) -> None:
    value = "gASVIAAAAAAAAACMBXBvc2l4lIwGc3lzdGVtlJOUjAR0cnVllIWUUpQu"
    for path in (COMPLETIONS, CHAT):
        body = {**OK_CHAT, "prompt": "a", field: value}
        assert_error(client.post(path, json=body), 400, field)


URLS = [
    "http://127.0.0.1:1/",
    "http://169.254.169.254/latest",
    "http://allowed.example\\@evil.example",
    "file:///etc/passwd",
    "data:image/png;base64,AAAA",
]


@pytest.mark.parametrize("url", URLS)
@pytest.mark.parametrize("kind", ["image_url", "video_url", "input_audio"])
def test_nothing_is_fetched_for_a_client(client: TestClient, url: str, kind: str) -> None:
    part = {"type": kind, kind: {"url": url}}
    body = {"messages": [{"role": "user", "content": [part]}]}
    message = assert_error(client.post(CHAT, json=body), 400, "messages[0].content[0].type")
    assert "/" not in message.replace("image_url", "")


@pytest.mark.parametrize(
    ("tool", "field"),
    [
        ({"tools": [{"type": "function", "function": {"name": "[.*"}}]}, "tools[0].function.name"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"a": "b\0"}}}},
            "response_format.json_schema.schema",
        ),
        ({"structured_outputs": {"regex": "(a|b){1,5000}" * 9000}}, "structured_outputs.regex"),
        ({"structured_outputs": {"grammar": "root ::= \0"}}, "structured_outputs.grammar"),
    ],
    ids=["tools", "schema", "regex", "grammar"],
)
def test_patterns_of_clients_are_refused(
    client: TestClient, tool: dict[str, Any], field: str
) -> None:
    """Those that cost something to look at are sent to a real server, in a file of their own."""
    assert_error(client.post(CHAT, json={**OK_CHAT, **tool}), 400, field)


def test_compressed_bodies_are_not_unpacked(client: TestClient) -> None:
    bomb = b"\x1f\x8b\x08\x00" + b"\x00" * 1000
    headers = {"content-type": "application/json", "content-encoding": "gzip"}
    answer = client.post(COMPLETIONS, content=bomb, headers=headers)
    assert "Content-Encoding must be identity, got 'gzip'" in assert_error(answer, 415)


def test_best_of_is_no_way_to_more_completions(client: TestClient, engine: FakeEngine) -> None:
    body = {"prompt": "a", "best_of": 10**9}
    assert_error(client.post(COMPLETIONS, json=body), 400, "best_of")
    assert not engine.started


def test_a_warm_prefix_cache_is_not_told_of(client: TestClient) -> None:
    usage = client.post(COMPLETIONS, json={"prompt": "a"}).json()["usage"]
    assert usage["prompt_tokens_details"] is None


def test_nothing_of_a_prompt_is_logged(
    client: TestClient, engine: FakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    secret = "swordfish"
    caplog.set_level("INFO")
    for path in (COMPLETIONS, CHAT, "/tokenize"):
        body: dict[str, Any] = {"temperature": 0.001}
        if path == CHAT:
            body["messages"] = [{"role": "user", "content": secret}]
        else:
            body["prompt"] = secret
        for more in ({}, {"n": -1}, {"stream": True}, {"unknown": secret}, {"user": secret}):
            client.post(path, json={**body, **more})
    engine.fail_after, engine.failure = 0, lambda: RuntimeError("a bug")
    assert client.post(COMPLETIONS, json={"prompt": secret}).status_code == 500
    assert "a bug" in caplog.text and secret not in caplog.text
