"""The private class of uvicorn: a server refuses to start where it is not the one it knows."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
import uvicorn
from uvicorn.protocols.http import httptools_impl

from checkpoints import bundled_model_path
from jaxserve.errors import ValidationError
from server import connection
from server.http_protocol import connection_class, hooks
from tests.server.server_process import ROOT


def test_the_class_is_known_and_all_that_is_overridden_is_named() -> None:
    assert connection_class() is connection.Connection
    theirs = set(vars(httptools_impl.HttpToolsProtocol)) - {"__init__", "__module__", "__doc__"}
    assert set(hooks(connection.Connection)) == theirs & set(vars(connection.Connection))
    for method in ("startup", "capture_signals"):
        assert hasattr(uvicorn.Server, method), "the supervisor overrides it"


def other_parameters(self: Any, transport: Any, more: Any) -> None: ...


def nothing(self: Any, *args: Any, **settings: Any) -> None: ...


THEIRS = httptools_impl.HttpToolsProtocol
CHANGES = {
    "version": (uvicorn, "__version__", "0.99.1", "another version"),
    "older": (uvicorn, "__version__", "0.29.0", "another version"),
    "unnamed": (uvicorn, "__version__", "main", "another version"),
    "renamed": (THEIRS, "send_400_response", None, "no send_400_response"),
    "parameters": (THEIRS, "connection_made", other_parameters, "connection_made has other"),
    "attributes": (THEIRS, "__init__", nothing, "does not make .*pipeline"),
    "answers": (
        httptools_impl.RequestResponseCycle,
        "__init__",
        nothing,
        "make chunked_encoding, disconnected, .*",
    ),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_class_that_has_changed_is_not_built_on(
    change: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, name, value, told = change
    monkeypatch.setattr(owner, name, value)
    with pytest.raises(ValidationError, match=told) as caught:
        connection_class()
    assert uvicorn.__version__ in str(caught.value) and "0.30 to 0.54" in str(caught.value)


def test_an_error_of_our_own_is_no_rename(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "server.connection", None)
    with pytest.raises(ImportError, match=r"server\.connection"):
        connection_class()


RENAMED = """
import sys
import uvicorn.protocols.http.auto  # uvicorn itself knows the new name
sys.modules["uvicorn.protocols.http.httptools_impl"] = None  # importing it by the old one fails
from server.cli import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.slow
def test_a_server_does_not_start_without_the_class() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", RENAMED, "serve", str(bundled_model_path()), "--port", "0"],
        cwd=ROOT,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
    )
    assert ended.returncode == 1
    assert ended.stdout.startswith("jaxserve: uvicorn") and ended.stdout.count("\n") == 1
    assert uvicorn.__version__ in ended.stdout and "0.30 to 0.54" in ended.stdout
