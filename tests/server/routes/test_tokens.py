"""`/tokenize` and `/detokenize`."""

from __future__ import annotations

from typing import Any

import pytest
from starlette.testclient import TestClient


def test_text(client: TestClient) -> None:
    answer = client.post("/tokenize", json={"prompt": "ab"}).json()
    assert answer == {"count": 3, "max_model_len": 64, "tokens": [2, 97, 98], "token_strs": None}
    answer = client.post(
        "/tokenize", json={"prompt": "ab", "add_special_tokens": False, "return_token_strs": True}
    ).json()
    assert answer["tokens"] == [97, 98] and answer["token_strs"] == ["a", "b"]


def test_messages(client: TestClient) -> None:
    body = {"messages": [{"role": "user", "content": "x"}], "return_token_strs": True}
    assert "".join(client.post("/tokenize", json=body).json()["token_strs"]) == "[user]x[assistant]"
    body["mm_processor_kwargs"] = {"max_pixels": 9}  # of images, as in chats
    body["add_generation_prompt"] = False
    assert client.post("/tokenize", json=body).json()["count"] == len("[user]x")


def test_back(client: TestClient) -> None:
    assert client.post("/detokenize", json={"tokens": [97, 0x1F600]}).json() == {"prompt": "a😀"}
    assert client.post("/detokenize", json={"tokens": []}).json() == {"prompt": ""}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": ["a"]}, "prompt"),
        ("/tokenize", {"prompt": "a" * 10**6}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": []}, "messages"),
        ("/tokenize", {"messages": []}, "messages"),
        (
            "/tokenize",
            {"messages": [{"role": "user", "content": "a"}], "tools": [1]},
            "tools[0].type",
        ),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": "a"}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [0x110000]}, "tokens"),
        ("/detokenize", {"tokens": ["a"] * 100_000}, "tokens"),
    ],
)
def test_bad_input(client: TestClient, path: str, body: dict[str, Any], param: str) -> None:
    response = client.post(path, json=body)
    assert response.status_code == 400 and response.json()["error"]["param"] == param
    assert len(response.content) < 4096
    unknown = client.post(path, json={"prompt": "a", "tokens": [1], "model": "gpt-x"})
    assert unknown.status_code == 404
