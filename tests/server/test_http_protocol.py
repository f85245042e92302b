"""The private class of uvicorn: which versions have it, and what a server is without it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request

import pytest
import uvicorn
from uvicorn.protocols.http import httptools_impl

from checkpoints import bundled_model_path
from server import connection
from server.http_protocol import HOOKS, http_protocol
from server.limits import Limits
from tests.server.server_process import ROOT, free_port

# Of uvicorn: first and last. A newer one: run tests/server/test_connection.py with it, then raise
# this and the bound in pyproject.toml. Run so far: 0.30.6, 0.34.0, 0.40.0, 0.48.0 and 0.54.0.
VERSIONS = ((0, 30), (0, 54))
# What `Connection` reads beside HOOKS; uvicorn makes it as a connection or a request begins.
READ = ("loop", "transport", "cycle", "url", "headers", "server_state", "pipeline", "connections")


def test_what_is_used_is_there_in_the_versions_that_are_named() -> None:
    version = tuple(int(part) for part in uvicorn.__version__.split(".")[:2])
    assert VERSIONS[0] <= version <= VERSIONS[1], f"uvicorn {uvicorn.__version__}: see VERSIONS"
    protocol = http_protocol(Limits())
    assert isinstance(protocol, type) and issubclass(protocol, connection.Connection)
    assert set(HOOKS) <= set(vars(connection.Connection)), "HOOKS are what Connection overrides"
    names = set(httptools_impl.HttpToolsProtocol.__init__.__code__.co_names)
    names |= set(httptools_impl.HttpToolsProtocol.on_message_begin.__code__.co_names)
    assert set(READ) <= names
    assert httptools_impl.STATUS_LINE[431].startswith(b"HTTP/1.1 431 ")
    for method in ("startup", "capture_signals"):
        assert hasattr(uvicorn.Server, method), "the supervisor overrides it"


def test_a_class_without_a_hook_is_not_built_on(monkeypatch, caplog) -> None:
    monkeypatch.delattr(httptools_impl.HttpToolsProtocol, "send_400_response")
    assert http_protocol(Limits()) == "auto"
    assert "no send_400_response" in caplog.text and uvicorn.__version__ in caplog.text


def test_an_error_of_our_own_is_no_rename(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "server.connection", None)
    with pytest.raises(ImportError, match=r"server\.connection"):
        http_protocol(Limits())


RENAMED = """
import sys
import uvicorn.protocols.http.auto  # uvicorn itself knows the new name
sys.modules["uvicorn.protocols.http.httptools_impl"] = None  # importing it by the old one fails
from server.cli import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.slow
def test_a_server_starts_and_serves_without_the_class() -> None:
    port = free_port()
    flags = ["serve", str(bundled_model_path()), "--port", str(port), "--max-num-seqs", "2"]
    flags += ["--max-model-len", "64", "--max-num-batched-tokens", "16", "--compile-ahead", "2"]
    process = subprocess.Popen(
        [sys.executable, "-c", RENAMED, *flags, "--no-compile-in-background"],
        cwd=ROOT,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        deadline = time.monotonic() + 120
        while process.poll() is None and time.monotonic() < deadline:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5)
                break
            except OSError:
                time.sleep(0.1)  # not yet listening, or 503 while it loads
        request = urllib.request.Request(
            f"http://127.0.0.1:{port}/v1/completions",
            data=json.dumps({"prompt": [5, 6, 7], "max_tokens": 3}).encode(),
            headers={"Content-Type": "application/json"},
        )
        answer = json.load(urllib.request.urlopen(request, timeout=120))
        assert answer["usage"]["completion_tokens"] >= 1
    finally:
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=60)
    assert f"uvicorn {uvicorn.__version__} is not as this jaxserve knows it" in output, output
    assert process.returncode == 0, output
