"""A server of one GGUF file answers a chat as one of the floats that the file stands for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pallas_kernels import native
from tests.jaxserve.models.gguf_models import bundled_gguf
from tests.server.server_process import running_server

httpx = pytest.importorskip("httpx", reason="needs the extra `test`")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not native.availability().available, reason=native.availability().reason),
]

CHAT: dict[str, Any] = {
    "model": "tiny",
    "messages": [{"role": "user", "content": "What is the sum of two and three?"}],
    "max_tokens": 24,
    "temperature": 0,
    "logprobs": True,
}


def test_chat_of_a_gguf_file(tmp_path: Path) -> None:
    answers = []
    # which keep Q8_0 as it is stored and, with float32, round nothing: XLA's have no such product
    flags = ("--dtype", "float32", "--linear-backend", "native")
    for model in bundled_gguf(tmp_path):
        with running_server("none", "--model", str(model), *flags) as server:
            found = httpx.post(f"{server.url}/v1/chat/completions", json=CHAT, timeout=60).json()
            answers.append((found["usage"]["prompt_tokens"], found["choices"][0]))
    (prompt, ours), (wanted_prompt, wanted) = answers
    assert prompt == wanted_prompt, "the same template and tokens"
    assert ours["message"]["content"] == wanted["message"]["content"] != ""
    scores = [[token["logprob"] for token in c["logprobs"]["content"]] for c in (ours, wanted)]
    # elements times scales are those floats, and they are multiplied and added in the same order
    assert scores[0] == pytest.approx(scores[1], abs=1e-6)
