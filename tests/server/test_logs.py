"""The server's log: JSON with request ids, and no line for probes."""

from __future__ import annotations

import json
import logging
import subprocess
import sys

import pytest

from jaxserve.errors import ValidationError
from jaxserve.observability.json_log import JsonFormatter
from server.cli import build_parser
from server.commands.log_flags import unlogged_paths
from server.logs import PathFilter
from tests.server.server_process import ROOT, httpx, running_server


def access(path: str) -> logging.LogRecord:
    arguments = ("127.0.0.1:5", "GET", path, "1.1", 200)
    text = '%s - "%s %s HTTP/%s" %d'
    return logging.LogRecord("uvicorn.access", logging.INFO, "", 0, text, arguments, None)


def test_a_line_of_the_access_log_has_fields() -> None:
    line = json.loads(JsonFormatter(lambda: "abc").format(access("/v1/models?a=1")))
    assert line.pop("time").endswith("+00:00")
    assert line == {
        "level": "info",
        "logger": "uvicorn.access",
        "client": "127.0.0.1:5",
        "method": "GET",
        "path": "/v1/models?a=1",
        "http_version": "1.1",
        "status": 200,
        "request_id": "abc",
    }


def test_an_exception_is_in_the_line_of_its_message() -> None:
    try:
        raise ValueError("broken\nin two")
    except ValueError as error:
        info = (type(error), error, error.__traceback__)
    record = logging.LogRecord("jaxserve", logging.ERROR, "", 0, "it %s", ("broke",), info)
    text = JsonFormatter().format(record)
    line = json.loads(text)
    assert "\n" not in text and line["message"] == "it broke" and "request_id" not in line
    assert "ValueError: broken" in line["exception"] and line["level"] == "error"


def test_probes_are_left_out_whatever_their_query() -> None:
    paths = PathFilter(["/health", "/metrics"])
    assert not paths.filter(access("/health")) and not paths.filter(access("/metrics?a=1"))
    assert paths.filter(access("/health/x")) and paths.filter(access("/v1/models"))
    assert paths.filter(logging.LogRecord("x", logging.INFO, "", 0, "no arguments", None, None))


LOGGING = """
import logging, logging.config, sys
from server.logs import REQUEST_ID, log_config
logging.config.dictConfig(log_config("info", sys.argv[1], ["/health"]))
REQUEST_ID.set("r-1")
logging.getLogger("jaxserve.server").warning("of a request")
for path in ("/health", "/v1/models"):
    arguments = ("127.0.0.1:5", "GET", path, "1.1", 200)
    logging.getLogger("uvicorn.access").info('%s - "%s %s HTTP/%s" %d', *arguments)
"""


@pytest.mark.parametrize("form", ["text", "json"])
def test_the_configuration_is_one_that_logging_takes(form) -> None:
    command = [sys.executable, "-c", LOGGING, form]  # configuring closes what tests capture
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    assert "/health" not in done.stdout and "/v1/models" in done.stdout
    assert "of a request" in done.stderr
    if form == "json":
        assert json.loads(done.stderr)["request_id"] == "r-1"
        assert json.loads(done.stdout)["path"] == "/v1/models"


def test_paths_that_are_left_out_are_a_flag() -> None:
    parse = build_parser("serve").parse_args
    assert unlogged_paths(parse(["serve"])) == ["/health", "/metrics"]
    assert unlogged_paths(parse(["serve", "--disable-access-log-for-endpoints", ""])) == []
    with pytest.raises(ValidationError, match="begin with /"):
        unlogged_paths(parse(["serve", "--disable-access-log-for-endpoints", "/a,b"]))


@pytest.mark.slow
def test_every_line_of_a_server_is_json() -> None:
    with running_server("none", "--log-format", "json") as server:
        body = {"model": "tiny", "prompt": "a", "max_tokens": 2}
        headers = {"X-Request-Id": "mine-1"}
        httpx.post(f"{server.url}/v1/completions", json=body, headers=headers)
        httpx.get(f"{server.url}/metrics")
        httpx.get(f"{server.url}/v1/models")
        server.process.terminate()
        server.process.wait(60)
        lines = [json.loads(line) for line in server.lines if line.strip()]
    seen = {line["path"]: line for line in lines if "path" in line}
    assert set(seen) == {"/v1/completions", "/v1/models"}
    assert seen["/v1/completions"]["request_id"] == "mine-1"
    assert any("jaxserve serves tiny" in line.get("message", "") for line in lines)
