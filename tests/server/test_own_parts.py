"""Features and kernels of the operator's own in a server: what requests ask and are told."""

from __future__ import annotations

import json
import math
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from starlette.testclient import TestClient

from checkpoints import bundled_model_path
from jaxserve.errors import ValidationError
from server.app import create_app
from tests.server.fake_engine import FakeEngine

ROOT = Path(__file__).parents[2]
COMPLETION = {"prompt": "ab", "max_tokens": 8}
CHAT = {"messages": [{"role": "user", "content": "ab"}], "max_tokens": 8}
ROUTES = [("/v1/completions", COMPLETION), ("/v1/chat/completions", CHAT)]


def chunks(text: str) -> list[dict[str, Any]]:
    """The choices of a stream's chunks."""
    events = re.findall(r"^data: (\{.*)$", text, flags=re.MULTILINE)
    return [choice for event in events for choice in json.loads(event)["choices"]]


@pytest.mark.parametrize(("route", "body"), ROUTES)
def test_reports_are_a_field_of_choices_that_have_some(route: str, body: dict[str, Any]) -> None:
    engine = FakeEngine()
    with TestClient(create_app(engine)) as client:
        plain = client.post(route, json=body).json()
        assert "reports" not in plain["choices"][0]
        engine.reports = {"own": [[1, math.nan], {"a": -math.inf}], "other": ["b"]}
        told = {"own": [[1, None], {"a": None}], "other": ["b"]}
        assert client.post(route, json=body).json()["choices"][0]["reports"] == told
        found = chunks(client.post(route, json=body | {"stream": True}).text)
    assert [one["reports"] for one in found if "reports" in one] == [told]
    assert found[-1]["reports"] == told and found[-1]["finish_reason"] == "stop"


def test_reports_are_a_field_of_responses() -> None:
    engine, body = FakeEngine(), {"input": "a", "max_output_tokens": 3}
    with TestClient(create_app(engine)) as client:
        assert "reports" not in client.post("/v1/responses", json=body).json()
        engine.reports = {"own": [[1, math.nan]]}
        assert client.post("/v1/responses", json=body).json()["reports"] == {"own": [[1, None]]}
        text = client.post("/v1/responses", json=body | {"stream": True}).text
    events = [json.loads(event) for event in re.findall(r"^data: (\{.*)$", text, re.MULTILINE)]
    assert events[-1]["response"]["reports"] == {"own": [[1, None]]}


def test_a_prompt_that_is_only_computed_has_reports() -> None:
    engine = FakeEngine()
    engine.reports = {"own": [1]}
    with TestClient(create_app(engine)) as client:
        body = COMPLETION | {"max_tokens": 0, "echo": True}
        (choice,) = client.post("/v1/completions", json=body).json()["choices"]
    assert (choice["text"], choice["reports"]) == ("ab", {"own": [1]})


@pytest.mark.parametrize("more", [{}, {"stream": True}])
@pytest.mark.parametrize(("route", "body"), ROUTES)
def test_a_value_that_a_feature_refuses_is_a_400(
    route: str, body: dict[str, Any], more: dict[str, Any]
) -> None:
    engine = FakeEngine()
    refusal = ValidationError("extra_args.own.strength", "a lot", "a number")
    engine.fail_after, engine.failure = 0, lambda: refusal
    with TestClient(create_app(engine)) as client:
        answer = client.post(route, json=body | more)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, "vllm_xargs.own.strength")
    assert error["message"] == "vllm_xargs.own.strength='a lot' is not supported: a number"


@pytest.mark.slow
def test_the_examples_of_the_page_serve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In an engine's process: two features and a backend of attention."""
    httpx = pytest.importorskip("httpx")
    from tests.server.server_process import running_server

    page = (ROOT / "docs" / "research.md").read_text()
    for name, text in re.findall(r"```python\n# (\w+\.py)\n(.*?)```", page, flags=re.DOTALL):
        (tmp_path / name).write_text(text)
    size = json.loads((bundled_model_path() / "config.json").read_text())["hidden_size"]
    np.save(tmp_path / "vector.npy", np.random.default_rng(0).normal(size=size))
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}{os.pathsep}{tmp_path}")
    options = {"steering": {"layer": 1, "vector": str(tmp_path / "vector.npy")}}
    flags = ["--features", "steering:Steering", "entropy:Entropy"]
    flags += ["--feature-config", json.dumps(options)]
    for kind in ("decode", "prefill"):
        flags += [f"--{kind}-backend", "plain_attention:BACKEND"]
    greedy: dict[str, Any] = {"model": "tiny", "prompt": "2 + 2 =", "temperature": 0}
    with running_server("none", *flags) as server:

        def post(**more: Any) -> Any:
            return httpx.post(f"{server.url}/v1/completions", json=greedy | more, timeout=60)

        log = "".join(server.lines)
        assert re.search("not kept: they are made by .*plain_attention", log)
        assert "kernels: decode plain_attention:BACKEND, prefill plain_attention:BACKEND" in log
        for value, field in (("a lot", "steering.strength"), (True, "steering.strength")):
            refused = post(vllm_xargs={"steering": {"strength": value}})
            assert (refused.status_code, refused.json()["error"]["param"]) == (
                400,
                f"vllm_xargs.{field}",
            )
            assert f"={value!r} is not supported: a finite number" in refused.text
        unknown = post(vllm_xargs={"steering": {"stregth": 1}}, stream=True)
        assert unknown.status_code == 400 and "an object of strength and capture" in unknown.text
        plain = post().json()["choices"][0]
        steered = post(vllm_xargs={"steering": {"strength": 40.0}}).json()["choices"][0]
        assert steered["text"] != plain["text"] and "reports" not in steered
        told = post(vllm_xargs={"entropy": True}).json()
        entropies = told["choices"][0]["reports"]["entropy"]
        assert len(entropies) == told["usage"]["completion_tokens"] and min(entropies) >= 0
        found = chunks(post(vllm_xargs={"entropy": True}, stream=True).text)
        assert found[-1]["reports"]["entropy"] == pytest.approx(entropies, abs=1e-3)
        captured = post(vllm_xargs={"steering": {"capture": True}}).json()["choices"][0]
        assert {len(row) for step in captured["reports"]["steering"] for row in step} == {size}
        assert captured["text"] == plain["text"]
