"""Images over HTTP, by a real server of a tiny random LLaVA."""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.image_models import IMAGE, make_image_model
from tests.jaxserve.images import Oracle, data_url, encoded, make_image
from tests.server.server_process import Server, serving

httpx = pytest.importorskip("httpx", reason="needs the extra `test`")

pytestmark = pytest.mark.slow

ONE, OTHER = make_image(50, 40, 1), make_image(33, 90, 2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_image_model(tmp_path_factory.mktemp("images") / "llava")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    flags = ["--model", str(folder), "--max-model-len", "160", "--max-num-seqs", "4"]
    flags += ["--max-num-batched-tokens", "32", "--block-size", "8", "--compile-ahead", "2"]
    flags += ["--limit-mm-per-prompt", '{"image": 3}', "--allowed-local-media-path", str(folder)]
    with serving(*flags) as server:
        yield server


def said(text: str, *urls: str) -> list[dict[str, Any]]:
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return [{"role": "user", "content": [{"type": "text", "text": text}, *parts]}]


def ask(server: Server, path: str, messages: Any, **more: Any) -> Any:
    return httpx.post(f"{server.url}{path}", json={"messages": messages, **more}, timeout=60)


def chat(server: Server, messages: Any, **more: Any) -> Any:
    asked = {"max_tokens": 6, "temperature": 0, "return_token_ids": True, "ignore_eos": True}
    return ask(server, "/v1/chat/completions", messages, **asked | more)


def bare(tokens: list[int], places: list[int]) -> list[int]:
    """Token ids with one for each image, which takes so many places."""
    made, left, counts = list[int](), [*tokens], iter(places)
    while left:
        made.append(left.pop(0))
        if made[-1] == IMAGE:
            del left[: next(counts) - 1]
    return made


def test_images_in_sizes_of_their_own(tmp_path: Path) -> None:
    folder = make_image_model(tmp_path / "qwen", "qwen2_5_vl")
    oracle, images = Oracle(folder), [make_image(64, 24, 1), make_image(24, 97, 2)]
    counts = [oracle.places(image) for image in images]
    assert counts[0] != counts[1]
    turns = said("on", *(data_url(encoded(image)) for image in images))
    flags = ["--model", str(folder), "--max-model-len", "160", "--max-num-seqs", "4"]
    flags += ["--max-num-batched-tokens", "16", "--block-size", "8", "--compile-ahead", "2"]
    with serving(*flags, "--num-pages", "21") as server:  # too few for what comes at once
        found = ask(server, "/tokenize", turns).json()
        assert found["tokens"].count(IMAGE) == sum(counts)
        fewer = {"mm_processor_kwargs": {"max_pixels": 8 * 16}}
        smaller = ask(server, "/tokenize", turns, **fewer).json()["count"]
        usage = chat(server, turns, **fewer | {"max_tokens": 1}).json()["usage"]
        assert usage["prompt_tokens"] == smaller < found["count"]
        wanted, _ = oracle.greedy(bare(found["tokens"], counts), images, 60)
        with ThreadPoolExecutor() as pool:
            twice = {"n": 2, "temperature": 1, "top_k": 1}  # greedy has no n
            asked = [pool.submit(chat, server, turns, max_tokens=60, **twice) for _ in range(2)]
            answers = [one.result().json() for one in asked]
        for answer in answers:
            assert "usage" in answer, answer
            assert answer["usage"]["prompt_tokens"] == found["count"]
            assert [choice["token_ids"] for choice in answer["choices"]] == [wanted] * 2
        assert server.gauge("num_preemptions") > 0
        text = answers[0]["choices"][0]["message"]["content"]
        streamed = chat(server, turns, stream=True, max_tokens=60)
        lines = (line.removeprefix("data: ") for line in streamed.text.splitlines() if line)
        chunks = [json.loads(line) for line in lines if line != "[DONE]"]
        deltas = (one["delta"].get("content") for chunk in chunks for one in chunk["choices"])
        assert "".join(one or "" for one in deltas) == text
        beams = chat(server, turns, use_beam_search=True, n=2).json()["choices"]
        likely = [
            oracle.logprob(bare(found["tokens"], counts), images, one["token_ids"]) for one in beams
        ]
        assert likely == sorted(likely, reverse=True)
        assert likely[0] >= oracle.logprob(bare(found["tokens"], counts), images, wanted[:6]) - 1e-4


def test_a_chat_of_several_turns_is_as_transformers(server: Server, folder: Path) -> None:
    turns = said("on", data_url(encoded(ONE)))
    turns += [{"role": "assistant", "content": "it is"}]
    turns += said("no", data_url(encoded(OTHER)), data_url(encoded(ONE)))
    found = ask(server, "/tokenize", turns).json()
    oracle = Oracle(folder)
    places = oracle.places(make_image(9, 9))
    assert found["tokens"].count(IMAGE) == 3 * places and found["count"] > 3 * places
    answer = chat(server, turns).json()
    (choice,), usage = answer["choices"], answer["usage"]
    assert usage["prompt_tokens"] == found["count"]
    tokens = bare(found["tokens"], [places] * 3)
    assert choice["token_ids"] == oracle.greedy(tokens, [ONE, OTHER, ONE], 6)[0]
    streamed = chat(server, turns, stream=True, stream_options={"include_usage": True})
    assert f'"prompt_tokens":{found["count"]}' in streamed.text.replace(" ", "")


def test_files_and_what_text_cannot_do(server: Server, folder: Path) -> None:
    (folder / "one.png").write_bytes(encoded(ONE))
    wanted = chat(server, said("x", data_url(encoded(ONE)))).json()["choices"][0]
    found = chat(server, said("x", f"file://{folder}/one.png")).json()["choices"][0]
    assert found["token_ids"] == wanted["token_ids"]
    # the token's name in a text is text
    count = ask(server, "/tokenize", [{"role": "user", "content": "<image>"}]).json()
    assert IMAGE not in count["tokens"]


def test_a_constrained_answer(server: Server) -> None:
    asked = {"structured_outputs": {"choice": ["yes", "no"]}, "ignore_eos": False}
    answer = chat(server, said("x", data_url(encoded(OTHER))), **asked).json()
    assert answer["choices"][0]["message"]["content"] in ("yes", "no")


def bomb(width: int, height: int) -> bytes:
    def chunk(name: bytes, data: bytes) -> bytes:
        body = name + data
        return struct.pack(">I", len(data)) + body + struct.pack(">I", zlib.crc32(body))

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    rows = zlib.compress(bytes(1 << 20))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


GIF = encoded(ONE, "GIF", save_all=True, append_images=[ONE.rotate(90)])
BAD = {
    "a bomb": [data_url(bomb(50_000, 50_000))],
    "cut off": [data_url(encoded(ONE)[:-40])],
    "animated": [data_url(GIF)],
    "thin": [data_url(bomb(1, 100_000))],
    "no image": [data_url(b"hello")],
    "nothing": [data_url(b"")],
    "a drawing": [data_url(b'<svg xmlns="http://www.w3.org/2000/svg"/>', "image/svg+xml")],
    "no base64": ["data:image/png;base64,***"],
    "no url": ["one.png"],
    "a host": ["https://example.com/one.png"],
    "an address": ["http://169.254.169.254/latest/meta-data"],
    "a file": ["file:///etc/passwd"],
    "too many": [data_url(encoded(ONE))] * 4,
}


@pytest.mark.parametrize("urls", BAD.values(), ids=BAD)
def test_bad_images_are_one_clear_refusal(server: Server, urls: list[str]) -> None:
    answer = chat(server, said("x", *urls))
    assert answer.status_code == 400, answer.text
    assert set(answer.json()["error"]) >= {"message", "type", "param"} and len(answer.text) < 600
    assert server.health() == 200


def test_other_parts_and_endpoints(server: Server) -> None:
    url = data_url(encoded(ONE))
    for part in ({"type": "image"}, {"type": "image", "image": url}, {"type": "image_url"}):
        answer = chat(server, [{"role": "user", "content": [part]}])
        assert answer.status_code == 400 and "messages[0].content[0]" in answer.text


def test_the_other_apis_read_images_as_chats(server: Server) -> None:
    url, body = data_url(encoded(ONE)), {"temperature": 0}
    chosen = chat(server, said("x", url, url), ignore_eos=False).json()
    wanted = chosen["choices"][0]["message"]["content"], chosen["usage"]["prompt_tokens"]
    images = [{"type": "input_image", "image_url": url, "detail": "auto"}] * 2
    asked = [{"role": "user", "content": [{"type": "input_text", "text": "x"}, *images]}]
    path, limited = f"{server.url}/v1/responses", {"max_output_tokens": 6}
    answer = httpx.post(path, json={"input": asked, **body, **limited}, timeout=60).json()
    text = "".join(part["text"] for item in answer["output"] for part in item["content"])
    assert (text, answer["usage"]["input_tokens"]) == wanted
    # the same bytes in a block, and by an address
    data = {"type": "base64", "media_type": "image/png", "data": url.partition(",")[2]}
    sources = (data, {"type": "url", "url": url})
    blocks = [{"type": "image", "source": source} for source in sources]
    turns = [{"role": "user", "content": [{"type": "text", "text": "x"}, *blocks]}]
    answer = ask(server, "/v1/messages", turns, max_tokens=6, **body).json()
    text = "".join(block["text"] for block in answer["content"])
    assert (text, answer["usage"]["input_tokens"]) == wanted
    counted = ask(server, "/v1/messages/count_tokens", turns).json()
    assert counted["input_tokens"] == wanted[1]
    refused = chat(server, said("x", url), mm_processor_kwargs={"max_pixels": 9})
    assert refused.json()["error"]["param"] == "mm_processor_kwargs.max_pixels"
    turns[0]["content"][0]["text"] = "x" * 160  # more than the context has
    counted = ask(server, "/v1/messages/count_tokens", turns).json()
    assert counted["input_tokens"] > 160
    assert ask(server, "/v1/messages", turns, max_tokens=6).status_code == 400
    cut = data_url(encoded(ONE)[:-40])
    for bad, param in (("file:///etc/passwd", "image_url"), (cut, "multi_modal_data.image")):
        part, source = {"type": "input_image", "image_url": bad}, {"type": "url", "url": bad}
        refused = httpx.post(path, json={"input": [{"role": "user", "content": [part]}]})
        assert refused.status_code == 400 and refused.json()["error"]["param"] == param
        turns = [{"role": "user", "content": [{"type": "image", "source": source}]}]
        refused = ask(server, "/v1/messages", turns, max_tokens=6)
        assert refused.status_code == 400 and refused.json()["type"] == "error"
