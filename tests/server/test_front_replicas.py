"""A real server with two fronts on one port, TLS, and two replicas; only their engines are fake."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from checkpoints import bundled_model_path
from tests.server.certificate import make_certificate
from tests.server.server_process import Server, httpx, serving
from tests.server.test_fronts import KEYS, fronts, wait_until, without

BODY = {"prompt": "A", "max_tokens": 100, "seed": 3, "ignore_eos": True}
SIZES = ("--max-num-seqs", "4", "--max-model-len", "256", "--max-queue-wait", "none")


def ask(server: Server, key: str = "free") -> httpx.Response:
    headers = {"Authorization": f"Bearer {key}"}
    url = f"{server.url}/v1/completions"
    return httpx.post(url, json=BODY, headers=headers, verify=server.verify, timeout=60)


def serving_replicas(server: Server) -> int:
    text = httpx.get(f"{server.url}/metrics", verify=server.verify).text
    found = (one for family in text_string_to_metric_families(text) for one in family.samples)
    return int(sum(one.value for one in found if one.name == "jaxserve:engine_serving"))


@pytest.mark.slow
def test_each_front_speaks_tls_before_the_same_replicas(tmp_path: Path) -> None:
    keys, (key, certificate) = tmp_path / "keys.yaml", make_certificate(tmp_path)
    keys.write_text(KEYS)
    flags = ["--model", str(bundled_model_path()), "--served-model-name", "tiny", *SIZES]
    flags += ["--api-server-count", "2", "--data-parallel-size", "2"]
    flags += ["--api-keys-file", str(keys), "--ssl-keyfile", key, "--ssl-certfile", certificate]
    how: dict[str, Any] = {"module": "tests.server.fake_served", "certificate": certificate}
    with serving(*flags, **how) as server:
        one, two = fronts(server)
        wait_until(server, lambda: serving_replicas(server) == 2)
        with without(two):
            expected = ask(server).json()["choices"]
            assert expected[0]["finish_reason"] == "length"
            assert [ask(server, "few").status_code for _ in range(2)] == [200, 200]
        with without(one):
            assert ask(server).json()["choices"] == expected, "whichever answers"
