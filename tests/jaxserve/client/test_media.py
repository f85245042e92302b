"""Addresses of images: what is read, and what is refused before or while it comes."""

from __future__ import annotations

import ssl
import time
from collections.abc import Iterator
from http.server import ThreadingHTTPServer
from pathlib import Path

import pytest

from jaxserve.client import media
from jaxserve.client.media import MediaReader, is_public
from jaxserve.errors import ValidationError
from tests.http_serving import QuietHandler, answering
from tests.server.certificate import make_certificate

DATA = b"\x89PNG of some kind"


class Pages(QuietHandler):
    def do_GET(self) -> None:
        name = self.path.partition("?")[0].strip("/")
        if name.startswith("to-"):
            self.send_response(302)
            self.send_header("Location", self.path[4:].replace("+", "/"))
            self.end_headers()
            return
        self.send_response(404 if name == "none" else 200)
        self.end_headers()
        if name == "slow":
            for _ in range(100):
                try:
                    self.wfile.write(b".")
                    self.wfile.flush()
                except OSError:
                    return
                time.sleep(0.02)
        elif name == "large":
            self.wfile.write(bytes(2000))
        else:
            self.wfile.write(DATA)


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    with answering(ThreadingHTTPServer(("127.0.0.1", 0), Pages)) as port:
        yield port


def reader(**how: object) -> MediaReader:
    return MediaReader(("localhost",), may_reach=lambda address: True, **how)


def test_data() -> None:
    assert reader().read("data:image/png;base64,aGVs bG8=".replace(" ", "")) == b"hello"
    assert reader().read("data:,a%20b") == b"a b"
    for wrong in ("data:image/png;base64", "data:image/png;base64,a*b=", "data:;base64,abc"):
        with pytest.raises(ValidationError, match=r"image_url='data:.*data:image/png;base64"):
            reader().read(wrong)


def test_too_much_data(monkeypatch: pytest.MonkeyPatch, port: int) -> None:
    monkeypatch.setattr(media, "MAX_BYTES", 1000)
    for url in ("data:," + "a" * 1001, "data:," + "a" * 5000, f"http://localhost:{port}/large"):
        with pytest.raises(ValidationError, match="at most 1000 bytes"):
            reader().read(url)


def test_what_is_fetched(port: int) -> None:
    at = f"http://localhost:{port}"
    assert reader().read(f"{at}/a.png?size=2") == DATA
    assert reader().read(f"{at}/to-+a.png") == DATA
    with pytest.raises(ValidationError, match="404"):
        reader().read(f"{at}/none")


@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.1:{port}/a.png",
        "http://localhost@127.0.0.1:{port}/a.png",
        "http://localhost.evil:{port}/a.png",
        "http://[::1]:{port}/a.png",
        "http://localhost:{port}/to-http:++127.0.0.1:{port}+a.png",
        "http://localhost:{port}/to-file:+++etc+passwd",
    ],
)
def test_other_hosts_are_not_asked_nor_by_redirects(port: int, url: str) -> None:
    with pytest.raises(ValidationError, match="allowed-media-domains"):
        reader().read(url.format(port=port))


def test_a_circle_of_redirects_ends(port: int) -> None:
    url = f"http://localhost:{port}/to-" + "+to-" * 5 + "+a"
    with pytest.raises(ValidationError, match="at most 3 redirects"):
        reader().read(url)


def test_a_name_of_a_private_address_is_refused(port: int) -> None:
    with pytest.raises(ValidationError, match="public addresses alone"):
        MediaReader(("localhost",)).read(f"http://localhost:{port}/a.png")
    assert is_public("93.184.216.34") and is_public("2606:2800:220:1::1")
    for private in (
        *("127.0.0.1", "10.1.2.3", "169.254.169.254", "0.0.0.0", "100.64.0.1", "224.0.0.1"),
        *("::1", "fe80::1", "fd00::1", "::ffff:127.0.0.1", "::", "::7f00:1", "fec0::1"),
        *("64:ff9b::7f00:1", "2002:7f00:1::1", "2001:0:4136:e378:8000:63bf:3fff:fdd2"),
    ):
        assert not is_public(private), private


def test_what_comes_slowly_is_cut_off(monkeypatch: pytest.MonkeyPatch, port: int) -> None:
    monkeypatch.setattr(media, "MAX_SECONDS", 0.2)
    begin = time.monotonic()
    with pytest.raises(ValidationError, match=r"not within 0\.2 s"):
        reader().read(f"http://localhost:{port}/slow")
    assert time.monotonic() - begin < 1.0


def test_what_comes_slowly_over_tls_is_cut_off(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    key, own = make_certificate(tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(own, key)
    monkeypatch.setenv("SSL_CERT_FILE", own)
    server = ThreadingHTTPServer(("127.0.0.1", 0), Pages)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    with answering(server) as port:
        at = f"https://localhost:{port}"
        assert reader().read(f"{at}/a.png") == DATA
        monkeypatch.setattr(media, "MAX_SECONDS", 0.3)
        begin = time.monotonic()
        with pytest.raises(ValidationError, match=r"not within 0\.3 s"):
            reader().read(f"{at}/slow")
        assert time.monotonic() - begin < 1.2


def test_addresses_that_are_none_are_refused(port: int) -> None:
    for name in ("\u00e9.png", "to-http:++[", "to-+\u00e9"):
        with pytest.raises(ValidationError, match="image_url"):
            reader().read(f"http://localhost:{port}/{name}")


def test_no_domain_means_no_network() -> None:
    with pytest.raises(ValidationError, match="allowed-media-domains"):
        MediaReader().read("https://example.com/a.png")
    for odd in ("ftp://host/a", "a.png", "http://[", "http://host:port/a", ""):
        with pytest.raises(ValidationError, match="image_url"):
            MediaReader(("host",)).read(odd)


def test_files(tmp_path: Path) -> None:
    inside, outside = tmp_path / "in", tmp_path / "out.png"
    inside.mkdir()
    (inside / "a b.png").write_bytes(DATA)
    outside.write_bytes(DATA)
    (inside / "link.png").symlink_to(outside)
    found = MediaReader(folder=str(inside))
    assert found.read(f"file://{inside}/a%20b.png") == DATA
    for wrong in ("../out.png", "link.png", "none.png", "", "a%00b"):
        with pytest.raises(ValidationError, match="allowed-local-media-path"):
            found.read(f"file://{inside}/{wrong}")
    with pytest.raises(ValidationError, match="allowed-local-media-path"):
        MediaReader().read(f"file://{inside}/a%20b.png")
