"""A server that speaks the part of the hub's API that huggingface_hub uses to fetch a model."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

from tests.http_serving import QuietHandler, answering

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class HubServer:
    """Repositories of one commit each, and what was asked for.

    Attributes:
        repositories: name -> file -> content.
        tokens: repositories that are gated -> the token that may read them.
        cuts: file -> bytes after which its next download ends.
        status: answered to everything, instead of what is there.
        together: downloads of weights that wait for one another.
        requests: (method, path, headers) of each, in order.
    """

    repositories: dict[str, dict[str, bytes]] = field(default_factory=dict)
    tokens: dict[str, str] = field(default_factory=dict)
    cuts: dict[str, int] = field(default_factory=dict)
    status: int | None = None
    together: threading.Barrier | None = None
    requests: list[tuple[str, str, dict[str, str]]] = field(default_factory=list)
    endpoint: str = ""

    def asked(self, method: str, ending: str) -> list[dict[str, str]]:
        """Headers of the requests with this method for a path that ends so."""
        return [h for m, path, h in self.requests if m == method and path.endswith(ending)]


@contextmanager
def serve_hub() -> Iterator[HubServer]:
    """A hub on a port of its own."""
    hub = HubServer()

    class Bound(_Handler):
        pass

    Bound.hub = hub
    server = ThreadingHTTPServer(("127.0.0.1", 0), Bound)
    server.daemon_threads = True
    with answering(server) as port:
        hub.endpoint = f"http://127.0.0.1:{port}"
        yield hub


class _Handler(QuietHandler):
    protocol_version = "HTTP/1.1"
    hub: HubServer

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        headers = {name.lower(): value for name, value in self.headers.items()}
        self.hub.requests.append((self.command, path, headers))
        if self.hub.status is not None:
            self._send(self.hub.status, b"")
            return
        api = re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/(revision|tree)/([^/]+))?", path)
        file = re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path)
        found = api or file
        repo = found[1] if found else ""
        revision = (api[3] if api else file[2] if file else None) or "main"
        files = self.hub.repositories.get(repo)
        if files is None:
            self._refuse(401, "RepoNotFound", "Repository not found")
        elif revision not in ("main", COMMIT):
            self._refuse(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        elif api and api[2] == "tree":
            self._send_json([_entry(name, data) for name, data in files.items()])
        elif api:
            siblings = [{"rfilename": name} for name in files]
            self._send_json({"id": repo, "sha": COMMIT, "siblings": siblings})
        elif file:
            self._send_file(repo, file[3], files)

    def _send_file(self, repo: str, name: str, files: dict[str, bytes]) -> None:
        token = self.hub.tokens.get(repo)
        if token is not None and self.headers.get("Authorization") != f"Bearer {token}":
            self._refuse(403, "GatedRepo", f"Access to model {repo} is restricted")
            return
        if name not in files:
            self._refuse(404, "EntryNotFound", f"{name} not found")
            return
        data = files[name]
        headers = {"ETag": f'"{_sha(data)}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
        start = 0
        if (asked := self.headers.get("Range")) is not None:
            start = int(re.fullmatch(r"bytes=(\d+)-", asked)[1])  # type: ignore[index]
            headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
        if self.command == "GET" and name.endswith(".safetensors") and self.hub.together:
            self.hub.together.wait(10)
        cut = self.hub.cuts.pop(name, None) if self.command == "GET" else None
        self._send(206 if start else 200, data[start:], headers, cut)

    def _send_json(self, value: Any) -> None:
        self._send(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _refuse(self, status: int, code: str, message: str) -> None:
        self._send(status, b"", {"X-Error-Code": code, "X-Error-Message": message})

    def _send(
        self,
        status: int,
        body: bytes,
        headers: dict[str, str] | None = None,
        cut: int | None = None,
    ) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body[:cut])
        self.close_connection = self.close_connection or cut is not None


def _entry(name: str, data: bytes) -> dict[str, Any]:
    return {"type": "file", "path": name, "size": len(data), "oid": _sha(data)}


def _sha(data: bytes) -> str:
    return hashlib.sha1(data).hexdigest()
