"""The page's files: their types, what browsers may do with them, and that they are all there."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib.resources import files

import pytest
from starlette.testclient import TestClient

from server.app import create_app
from server.cli import build_parser
from server.keys import ApiKey
from server.routes.page import FILES, OPEN_PATHS
from tests.server.fake_engine import FakeEngine

PATHS = ["/", *(f"/page/{name}" for name in FILES)]


@pytest.fixture
def guarded(engine: FakeEngine) -> Iterator[TestClient]:
    with TestClient(create_app(engine, api_keys=[ApiKey("k", "a")])) as client:
        yield client


@pytest.mark.parametrize("path", PATHS)
def test_a_file_has_its_type_and_may_load_nothing_from_elsewhere(
    client: TestClient, path: str
) -> None:
    response = client.get(path)
    assert response.status_code == 200 and response.content
    kinds = {"js": "text/javascript", "css": "text/css", "svg": "image/svg+xml", "/": "text/html"}
    kind = kinds[path.rpartition(".")[2]]
    assert response.headers["content-type"].partition(";")[0] == kind
    assert response.headers["x-content-type-options"] == "nosniff"
    policy = dict(
        part.strip().split(" ", 1)
        for part in response.headers["content-security-policy"].split(";")
    )
    assert policy["default-src"] == "'none'" and policy["script-src"] == "'self'"
    assert policy["require-trusted-types-for"] == "'script'"
    assert "unsafe" not in str(policy) and policy["frame-ancestors"] == "'none'"


def test_unchanged_files_are_not_sent_again(client: TestClient) -> None:
    first = client.get("/page/main.js")
    tag = first.headers["etag"]
    assert first.headers["cache-control"] == "no-cache" and re.fullmatch('"[0-9a-f]{32}"', tag)
    for given in (tag, f"W/{tag}", f'"other", {tag}'):
        again = client.get("/page/main.js", headers={"if-none-match": given})
        assert again.status_code == 304 and not again.content
        assert again.headers["etag"] == tag
    other = client.get("/page/main.js", headers={"if-none-match": '"other"'})
    assert other.status_code == 200 and other.content == first.content


def test_every_file_is_served_and_every_import_leads_to_one() -> None:
    folder = files("server.page")
    there = {one.name for one in folder.iterdir() if one.name.endswith((".js", ".css", ".svg"))}
    assert there == set(FILES)
    for name in there:
        text = folder.joinpath(name).read_text()
        for imported in re.findall(r'from "\./([^"]+)"', text):
            assert imported in FILES, f"{name} imports {imported}"
    index = folder.joinpath("index.html").read_text()
    for used in re.findall(r'(?:src|href)="([^"#]+)"', index):
        assert f"/{used}" in OPEN_PATHS


def test_nothing_of_a_text_becomes_markup_and_nothing_comes_from_elsewhere() -> None:
    folder = files("server.page")
    for name in (*FILES, "index.html"):
        text = folder.joinpath(name).read_text()
        for bad in (
            "innerHTML",
            "outerHTML",
            "insertAdjacentHTML",
            "document.write",
            "eval(",
            "new Function",
            "DOMParser",
            "setHTML",
        ):
            assert bad not in text, f"{name}: {bad}"
        assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", text), name
    index = folder.joinpath("index.html").read_text()
    assert not re.search(r"<script(?![^>]*src=)|\son\w+=|style=", index)


def test_files_need_no_key_and_tell_nothing(guarded: TestClient) -> None:
    for path in PATHS:
        assert guarded.get(path).status_code == 200
    for path in (
        "/engine/facts",
        "/engine/stream",
        "/page/",
        "/page/nothing",
        "/page/../v1/models",
    ):
        assert guarded.get(path).status_code == 401, path
    assert guarded.post("/").status_code == 405


def test_a_server_without_a_page(engine: FakeEngine) -> None:
    assert build_parser("serve").parse_args(["serve", "m", "--no-page"]).page is False
    assert build_parser("serve").parse_args(["serve", "m"]).page is True
    with TestClient(create_app(engine, has_page=False)) as client:
        for path in ("/", "/page/main.js", "/engine/facts", "/engine/stream"):
            assert client.get(path).status_code == 404
    with TestClient(create_app(engine, has_page=False, api_keys=[ApiKey("k", "a")])) as client:
        assert client.get("/").status_code == 401
