"""TLS, and sockets of the file system."""

from __future__ import annotations

import argparse
import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import uvicorn

from jaxserve.errors import ValidationError
from server.app import create_app
from server.commands.edge_flags import allowed_hosts
from server.commands.socket_flags import add_socket_flags, check_socket_flags, listen_at, tls
from server.connection import Connection
from tests.server.certificate import make_certificate
from tests.server.fake_engine import FakeEngine
from tests.waiting import until

httpx = pytest.importorskip("httpx", reason="needs the extra `test`")


def parsed(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_socket_flags(parser)
    return parser.parse_args(words)


@contextmanager
def serving(listener: socket.socket, **settings: Any) -> Iterator[None]:
    config = uvicorn.Config(
        create_app(FakeEngine()), http=Connection, ws="none", log_level="critical", **settings
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    until(lambda: server.started)
    yield
    server.should_exit = True
    thread.join(10)


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    return make_certificate(tmp_path_factory.mktemp("tls"))


def test_tls_and_certificates_of_clients(certificate: tuple[str, str]) -> None:
    key, made = certificate
    args = parsed(
        "--ssl-keyfile", key, "--ssl-certfile", made, "--ssl-ca-certs", made, "--ssl-cert-reqs", "2"
    )
    check_socket_flags(args)
    listener = socket.create_server(("127.0.0.1", 0))
    url = f"https://localhost:{listener.getsockname()[1]}/health"
    with serving(listener, **tls(args)):
        context = ssl.create_default_context(cafile=made)
        with pytest.raises(httpx.TransportError):
            httpx.get(url, verify=context)
        context.load_cert_chain(made, key)
        assert httpx.get(url, verify=context).status_code == 200


def test_flags_are_checked_before_a_model_is_loaded(
    certificate: tuple[str, str], tmp_path: Path
) -> None:
    key, made = certificate
    for words, flag in (
        (["--ssl-keyfile", key], "--ssl-keyfile"),
        (["--ssl-certfile", made, "--ssl-keyfile", made], "--ssl-certfile"),
        (["--ssl-certfile", str(tmp_path / "none"), "--ssl-keyfile", key], "--ssl-certfile"),
        (["--ssl-certfile", made, "--ssl-keyfile", key, "--ssl-cert-reqs", "2"], "--ssl-cert-reqs"),
        (
            ["--ssl-certfile", made, "--ssl-keyfile", key, "--ssl-ca-certs", key],
            "--ssl-ca-certs",
        ),
    ):
        with pytest.raises(ValidationError, match=flag):
            check_socket_flags(parsed(*words))


def test_a_socket_of_the_file_system(tmp_path: Path) -> None:
    path = str(tmp_path / "s")
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(path)  # nobody listens any more
    listener = listen_at(path)
    with pytest.raises(OSError, match="in use"):
        listen_at(path)
    assert Path(path).stat().st_mode & 0o077 == 0
    with serving(listener), httpx.Client(transport=httpx.HTTPTransport(uds=path)) as client:
        assert client.get("http://any.host/health").status_code == 200
    (tmp_path / "file").write_text("mine")
    with pytest.raises(OSError, match="in use"):
        listen_at(str(tmp_path / "file"))
    assert (tmp_path / "file").read_text() == "mine"
    here = argparse.Namespace(allowed_hosts=None, uds=path, host="127.0.0.1")
    assert allowed_hosts(here) == ()
