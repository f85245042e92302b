"""The place in a TPU slice, asked of a metadata server; never where there is no TPU."""

from __future__ import annotations

import http.server
import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from jaxserve.processes import tpu_metadata
from jaxserve.processes.launchers import launched
from jaxserve.processes.tpu_metadata import PATH, slice_variables

SLICE = {
    PATH + "agent-worker-number": "1",
    PATH + "worker-network-endpoints": "unknown:unknown:10.0.0.5,unknown:unknown:10.0.0.6",
}


@contextmanager
def metadata(values: dict[str, str]) -> Iterator[dict[str, str]]:
    """The environment in which a metadata server has these values."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            assert self.headers["Metadata-Flavor"] == "Google"
            text = values.get(self.path)
            self.send_response(404 if text is None else 200)
            self.end_headers()
            self.wfile.write((text or "").encode())

        def log_message(self, *_: Any) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield {"GCE_METADATA_IP": f"127.0.0.1:{server.server_port}"}
        server.shutdown()


@pytest.fixture
def pci(tmp_path: Path) -> Path:
    """A bus with a network card of Google's and a TPU."""
    for name, device in (("0000:00:04.0", "0x0042"), ("0000:00:05.0", "0x0063")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "vendor").write_text("0x1ae0\n")
        (tmp_path / name / "device").write_text(f"{device}\n")
    return tmp_path


@pytest.mark.parametrize(
    ("endpoints", "first"), [("unknown:unknown:10.0.0.5,a:b:10.0.0.6", "10.0.0.5"), ("h0,h1", "h0")]
)
def test_a_host_of_a_slice_has_its_place(endpoints: str, first: str, pci: Path) -> None:
    with metadata(SLICE | {PATH + "worker-network-endpoints": endpoints}) as environ:
        place = launched(slice_variables(environ, pci))
    assert place is not None and place.coordinator is not None
    assert (place.num_processes, place.process_id) == (2, 1)
    assert place.coordinator.startswith(f"{first}:") and place.is_certain


def test_metadata_that_are_not_there_leave_the_process_alone(
    pci: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING), metadata({}) as environ:
        assert slice_variables(environ, pci) == {}
    assert "agent-worker-number: status 404" in caplog.text


def test_nothing_is_asked_without_a_tpu(
    pci: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tpu_metadata, "_asked", lambda *_: pytest.fail("it was asked"))
    assert slice_variables({"TPU_SKIP_MDS_QUERY": "1"}, pci) == {}
    (pci / "0000:00:05.0" / "device").unlink()
    assert slice_variables({}, pci) == {}, "a network card"
    assert slice_variables({}, tmp_path_factory.mktemp("none") / "none") == {}
