"""A real server process on the bundled model, asked by the real `openai` client."""

from __future__ import annotations

import json
import re
import signal
import socket
import struct
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import psutil
import pytest

from tests.command_line import run
from tests.server.server_process import CONTEXT, Server, running_server, start
from tests.waiting import until

httpx = pytest.importorskip("httpx", reason="needs the extra `test`")
openai = pytest.importorskip("openai", reason="needs the extra `test`")

CHINESE = "用 500 字介绍一下量子力学"


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with running_server() as server:
        yield server


@pytest.fixture(scope="module")
def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60)


def chat_text(client: openai.OpenAI, prompt: str, **options: Any) -> str:
    answer = client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": prompt}], **options
    )
    return answer.choices[0].message.content or ""


def streamed_text(client: openai.OpenAI, prompt: str, **options: Any) -> str:
    pieces = client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": prompt}], stream=True, **options
    )
    return "".join(piece.choices[0].delta.content or "" for piece in pieces)


@pytest.mark.slow
def test_embeddings(client: openai.OpenAI, server: Server) -> None:
    texts = ["the sum of two and three", "sort five, one and four", "the sum of two and three"]
    sent: Any = client.embeddings.create(model="tiny", input=texts)  # as base64, by default
    told: Any = client.embeddings.create(model="tiny", input=texts, encoding_format="float")
    vectors = np.array([one.embedding for one in sent.data])
    np.testing.assert_allclose(vectors, [one.embedding for one in told.data], atol=1e-5)
    products = vectors @ vectors.T
    np.testing.assert_allclose([products[0, 0], products[0, 2]], 1.0, atol=1e-3)
    assert products[0, 1] < 0.999
    assert sent.usage.prompt_tokens == sent.usage.total_tokens > len(texts)
    server.wait_until_idle()


@pytest.mark.slow
def test_health_was_503_while_the_model_loaded(server: Server) -> None:
    assert server.saw_loading and server.health() == 200


@pytest.mark.slow
def test_it_announces_itself_with_a_curl_line_that_works(server: Server) -> None:
    curl = until(lambda: [line for line in server.lines if line.startswith("curl ")])
    assert len(curl) == 1 and server.url in curl[0]
    data = re.search(r"-d '(.*)'", curl[0])
    assert data is not None
    url = curl[0].split()[1]
    assert httpx.post(url, json=json.loads(data[1]), timeout=60).status_code == 200


@pytest.mark.slow
def test_models(client: openai.OpenAI) -> None:
    models = client.models.list().data
    assert [model.id for model in models] == ["tiny"]
    assert client.models.retrieve("tiny").id == "tiny"


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"temperature": 0}, {"temperature": 1.0, "seed": 7}])
def test_completion_streamed_or_not(client: openai.OpenAI, options: dict[str, Any]) -> None:
    whole = client.completions.create(model="tiny", prompt="What is", max_tokens=24, **options)
    pieces = list(
        client.completions.create(
            model="tiny",
            prompt="What is",
            max_tokens=24,
            stream=True,
            stream_options={"include_usage": True},
            **options,
        )
    )
    assert "".join(piece.choices[0].text for piece in pieces[:-1]) == whole.choices[0].text
    reasons = [p.choices[0].finish_reason for p in pieces[:-1] if p.choices[0].finish_reason]
    assert reasons == [whole.choices[0].finish_reason]
    assert all(piece.usage is None for piece in pieces[:-1]) and not pieces[-1].choices
    assert whole.usage is not None and pieces[-1].usage is not None
    assert pieces[-1].usage.completion_tokens == whole.usage.completion_tokens > 0
    assert pieces[-1].usage.prompt_tokens == whole.usage.prompt_tokens


def test_chat_streamed_or_not(client: openai.OpenAI) -> None:
    options = {"temperature": 0, "max_tokens": 32}
    assert streamed_text(client, "What is 12 + 30?", **options) == chat_text(
        client, "What is 12 + 30?", **options
    )


def test_no_process_of_it_imports_torch(server: Server) -> None:
    first = psutil.Process(server.process.pid)
    every = [first, *first.children(recursive=True)]
    files = {one.pid: {part.path for part in one.memory_maps()} for one in every}
    assert any("jaxlib" in file for held in files.values() for file in held), "the engine is there"
    assert not [file for held in files.values() for file in held if "libtorch" in file]


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_a_character_is_never_split(client: openai.OpenAI, temperature: float) -> None:
    options: dict[str, Any] = {"temperature": temperature, "seed": 11, "max_tokens": 120}
    options["extra_body"] = {"ignore_eos": True}
    whole = chat_text(client, CHINESE, **options)
    streamed = streamed_text(client, CHINESE, **options)
    assert streamed == whole
    assert streamed.count("\ufffd") == whole.count("\ufffd")


@pytest.mark.slow
def test_an_echoed_prompt_comes_back_whole(client: openai.OpenAI) -> None:
    """Every character of the prompt costs several tokens; none may be lost on the way."""
    answer = client.completions.create(model="tiny", prompt=CHINESE, max_tokens=1, echo=True)
    assert answer.choices[0].text.startswith(CHINESE)


@pytest.mark.slow
def test_forced_bytes_of_a_character_come_in_one_piece(server: Server) -> None:
    """Each Chinese character is several byte tokens; the stream must hold them back until whole."""
    body = {"model": "tiny", "prompt": "学", "add_special_tokens": False}
    tokens = httpx.post(f"{server.url}/tokenize", json=body).json()["tokens"]
    forced = {
        "prompt": "x",
        "stream": True,
        "max_tokens": 30,
        "ignore_eos": True,
        "allowed_token_ids": tokens,
        "temperature": 1.0,
        "seed": 5,
    }
    raw = httpx.post(f"{server.url}/v1/completions", json=forced, timeout=60).content
    pieces = [json.loads(e[6:]) for e in raw.decode("utf-8").split("\n\n")[:-2]]
    streamed = "".join(piece["choices"][0]["text"] for piece in pieces)
    whole = httpx.post(
        f"{server.url}/v1/completions", json={**forced, "stream": False}, timeout=60
    ).json()["choices"][0]["text"]
    assert streamed == whole
    assert "学" in whole or "\ufffd" in whole


@pytest.mark.slow
def test_seeds_reproduce_and_differ(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"temperature": 1.5, "top_p": 1.0, "max_tokens": 24}
    options["extra_body"] = {"ignore_eos": True}
    one, again, other = (chat_text(client, "Tell me.", seed=s, **options) for s in (1, 1, 2))
    assert one == again != other


@pytest.mark.slow
def test_two_choices(client: openai.OpenAI) -> None:
    messages: Any = [{"role": "user", "content": "Tell me a story."}]
    options: dict[str, Any] = {"model": "tiny", "messages": messages, "n": 2, "seed": 3}
    options |= {"temperature": 1.5, "max_tokens": 24, "extra_body": {"ignore_eos": True}}
    whole = client.chat.completions.create(**options)
    texts = [choice.message.content for choice in whole.choices]
    assert [choice.index for choice in whole.choices] == [0, 1] and texts[0] != texts[1]
    streamed = ["", ""]
    ends = []
    for piece in client.chat.completions.create(stream=True, **options):
        for choice in piece.choices:
            streamed[choice.index] += choice.delta.content or ""
            ends += [choice.index] if choice.finish_reason else []
    assert streamed == texts and sorted(ends) == [0, 1]
    assert whole.usage is not None and whole.usage.completion_tokens == 48


@pytest.mark.slow
def test_chat_logprobs(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "What is 12 + 30?"}],
        temperature=0,
        max_tokens=8,
        logprobs=True,
        top_logprobs=3,
    )
    assert answer.usage is not None and answer.choices[0].logprobs is not None
    content = answer.choices[0].logprobs.content
    assert content is not None and len(content) == answer.usage.completion_tokens
    for entry in content:
        assert entry.logprob <= 0 and len(entry.top_logprobs) == 3
        # greedy: the token is the most likely one
        assert entry.top_logprobs[0].token == entry.token
        ordered = [other.logprob for other in entry.top_logprobs]
        assert ordered == sorted(ordered, reverse=True)


@pytest.mark.slow
def test_completion_logprobs_and_scoring(client: openai.OpenAI) -> None:
    prompt = "What is 12 + 30?"
    answer = client.completions.create(
        model="tiny", prompt=prompt, max_tokens=6, temperature=0, logprobs=2
    )
    shown = answer.choices[0].logprobs
    assert shown is not None and shown.tokens is not None and shown.token_logprobs is not None
    scored = client.completions.create(
        model="tiny",
        prompt=prompt + answer.choices[0].text,
        max_tokens=0,
        echo=True,
        logprobs=2,
    )
    assert scored.choices[0].text == prompt + answer.choices[0].text
    prompt_scores = scored.choices[0].logprobs
    assert prompt_scores is not None and prompt_scores.token_logprobs is not None
    assert prompt_scores.token_logprobs[0] is None or prompt_scores.token_logprobs[0] <= 0
    assert all(value <= 0 for value in prompt_scores.token_logprobs[1:])


@pytest.mark.slow
def test_stop_strings(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"model": "tiny", "prompt": "Once upon", "temperature": 0}
    options |= {"max_tokens": 32, "extra_body": {"ignore_eos": True}}
    text = client.completions.create(**options).choices[0].text
    stop = text[6:9]
    first = text.index(stop)
    choice = client.completions.create(stop=[stop], **options).choices[0]
    assert choice.text == text[:first] and choice.finish_reason == "stop"
    pieces = client.completions.create(stop=[stop], stream=True, **options)
    assert "".join(piece.choices[0].text for piece in pieces) == text[:first]


@pytest.mark.slow
def test_tokens_go_there_and_back(server: Server) -> None:
    text = "What is 12 + 30? 量子"
    body = {"prompt": text, "add_special_tokens": False}
    tokens = httpx.post(f"{server.url}/tokenize", json=body).json()
    assert tokens["count"] == len(tokens["tokens"]) and tokens["max_model_len"] == CONTEXT
    back = httpx.post(f"{server.url}/detokenize", json={"tokens": tokens["tokens"]}).json()
    assert back == {"prompt": text}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("content", "status", "param"),
    [
        (b"{", 400, None),
        (b"[" * 100_000, 400, None),
        (b'{"prompt": ""}', 400, "prompt"),
        (b'{"prompt": "a", "model": "gpt-x"}', 404, "model"),
        (b'{"prompt": "a", "n": 1000000000}', 400, "n"),
        (b'{"prompt": "a", "temperature": NaN}', 400, "temperature"),
        (b'{"prompt": "a", "logprobs": 21}', 400, "logprobs"),
        (b'{"prompt": "a", "seed": 9223372036854775808}', 400, "seed"),
        (b'{"prompt": "a", "logit_bias": {"99999999": 1}}', 400, "logit_bias"),
        (b'{"prompt": "a", "stop_token_ids": [99999999]}', 400, "stop_token_ids"),
        (b'{"prompt": [99999999]}', 400, "prompt"),
        (json.dumps({"prompt": "word " * 5000}).encode(), 400, "prompt"),
        (json.dumps({"prompt": "a" * 2_000_000}).encode(), 400, "prompt"),
        (json.dumps({"prompt": ["a"] * 100_000}).encode(), 400, "prompt"),
        (json.dumps({"prompt": "<s></s><|eot_id|>\x00" * 4, "max_tokens": 2}).encode(), 200, None),
    ],
    ids=lambda value: repr(value)[:50],
)
def test_bad_input_keeps_it_alive(
    server: Server, content: bytes, status: int, param: str | None
) -> None:
    headers = {"content-type": "application/json"}
    response = httpx.post(
        f"{server.url}/v1/completions", content=content, headers=headers, timeout=30
    )
    assert response.status_code == status, response.text[:500]
    if status != 200:
        error = response.json()["error"]
        assert error["code"] == status and error["param"] == param
        assert len(response.content) < 4096
    assert server.health() == 200


@pytest.mark.slow
def test_the_client_sees_its_own_exceptions(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="gpt-x", prompt="a")
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="tiny", prompt="a", temperature=9)
    assert caught.value.param == "temperature"


@pytest.mark.slow
@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_its_slots(server: Server, stream: bool) -> None:
    body = {"prompt": "a", "max_tokens": CONTEXT - 8, "ignore_eos": True, "n": 4, "stream": stream}
    with httpx.Client() as leaving:
        if stream:
            with leaving.stream("POST", f"{server.url}/v1/completions", json=body) as response:
                next(response.iter_raw())
        else:
            with pytest.raises(httpx.ReadTimeout):
                soon = httpx.Timeout(60, read=0.05)
                leaving.post(f"{server.url}/v1/completions", json=body, timeout=soon)
    server.wait_until_idle()
    answer = httpx.post(f"{server.url}/v1/completions", json={"prompt": "a"}, timeout=60)
    assert answer.status_code == 200


def open_request(server: Server, **fields: Any) -> socket.socket:
    """A connection with a small receive buffer that has sent one streamed request."""
    body = json.dumps({"ignore_eos": True, "stream": True, **fields}).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
    client.connect(("127.0.0.1", httpx.URL(server.url).port))
    client.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    return client


@pytest.mark.slow
def test_clients_that_vanish_during_their_prompts_leave_nothing(server: Server) -> None:
    prompt = [20] * (CONTEXT - 60)  # takes several steps
    clients = [open_request(server, prompt=prompt, max_tokens=50) for _ in range(12)]
    for index, client in enumerate(clients):
        if index % 2:  # a reset in place of an orderly end
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        client.close()
    server.wait_until_idle()
    assert server.health() == 200


@pytest.mark.slow
def test_a_client_that_never_reads_holds_no_slot(server: Server) -> None:
    silent = open_request(server, prompt=[20], max_tokens=CONTEXT - 10, logprobs=5)
    answer = httpx.post(f"{server.url}/v1/completions", json={"prompt": "a"}, timeout=30)
    assert answer.status_code == 200
    server.wait_until_idle()
    silent.close()
    assert server.health() == 200


@pytest.mark.slow
def test_many_clients_at_once(server: Server) -> None:
    """More requests than slots, each with the tokens that it gets alone."""
    body = {"max_tokens": 12, "temperature": 0, "ignore_eos": True}
    prompts = [f"What is {i} + 3?" for i in range(10)]
    url = f"{server.url}/v1/completions"

    def ask(prompt: Any) -> Any:
        return httpx.post(url, json={**body, "prompt": prompt}, timeout=60).json()["choices"]

    alone = [ask(prompt)[0]["text"] for prompt in prompts]
    together = ask(prompts)
    assert [choice["text"] for choice in together] == alone
    assert [choice["index"] for choice in together] == list(range(10))


@pytest.mark.slow
@pytest.mark.parametrize("stream", [False, True])
def test_a_request_ends_in_time(server: Server, stream: bool) -> None:
    body = {"prompt": "a", "ignore_eos": True, "max_tokens": CONTEXT - 10, "stream": stream}
    url = f"{server.url}/v1/completions"
    late = httpx.post(url, json=body | {"timeout": 1e-6}, timeout=60)
    assert (late.status_code, late.json()["error"]["param"]) == (504, "timeout")
    cut = httpx.post(url, json=body, headers={"X-Request-Timeout": "0.1"}, timeout=60)
    # a machine that is busy may have had no token by then, a fast one all of them
    assert cut.status_code == 504 or '"finish_reason":"' in cut.text
    server.wait_until_idle()


@pytest.mark.slow
def test_what_would_wait_too_long_is_refused_and_the_rest_is_whole() -> None:
    body = {"prompt": [20] * 100, "max_tokens": 60, "temperature": 0, "ignore_eos": True}
    with running_server(max_queue_wait="0.2") as server:
        url = f"{server.url}/v1/completions"

        def ask(number: int) -> Any:
            time.sleep(0.01 * number)
            return httpx.post(url, json=body, timeout=120)

        with ThreadPoolExecutor(150) as pool:
            answers = list(pool.map(ask, range(150)))
        server.wait_until_idle()
        assert server.health() == 200
    whole = [answer for answer in answers if answer.status_code == 200]
    refused = [answer for answer in answers if answer.status_code == 503]
    assert len(whole) + len(refused) == 150 and whole and refused
    assert all(int(answer.headers["retry-after"]) >= 1 for answer in refused)
    assert len({answer.json()["choices"][0]["text"] for answer in whole}) == 1
    assert all(answer.json()["usage"]["completion_tokens"] == 60 for answer in whole)


@pytest.mark.slow
def test_chat_in_a_terminal(server: Server) -> None:
    words = ["chat", "--url", server.url, "--max-tokens", "16", "--temperature", "0"]
    result = run(*words, input="What is 12 + 30?\nAnd 1 + 1?\n")
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("> ") == 3 and len(result.stdout) > len("> > > \n\n\n")


@pytest.mark.slow
def test_a_taken_port_is_one_line(server: Server) -> None:
    process, lines = start("--port", server.url.rpartition(":")[2])
    assert process.wait(timeout=30) == 1
    until(lambda: lines)  # a thread reads them
    assert len(lines) == 1 and "cannot listen" in lines[0]


@pytest.mark.slow
def test_beams_over_http(client: openai.OpenAI) -> None:
    def ask(**options: Any) -> Any:
        return client.completions.create(
            model="tiny",
            prompt="What is",
            max_tokens=8,
            extra_body={"use_beam_search": True},
            **options,
        )

    found = ask(n=3)
    texts = [choice.text for choice in found.choices]
    assert [choice.index for choice in found.choices] == [0, 1, 2] and len({*texts}) == 3
    begin = time.monotonic()
    with pytest.raises(openai.BadRequestError, match="max_logprobs"):
        ask(n=64)
    assert time.monotonic() - begin < 30  # at once, on a machine of any speed
    chat = client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "Add 2 and 3."}],
        n=2,
        extra_body={"use_beam_search": True, "length_penalty": 0.5},
    )
    assert len({choice.message.content for choice in chat.choices}) == 2
    assert chat.usage is not None and chat.usage.completion_tokens > 0


@pytest.mark.slow
def test_sigterm_ends_it_cleanly(server: Server) -> None:
    """The last test of the module: a signal in the middle of a stream."""
    body = {"prompt": "a", "max_tokens": CONTEXT - 8, "ignore_eos": True, "stream": True, "n": 4}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=30) as response:
        pieces = response.iter_raw()
        next(pieces)
        server.process.send_signal(signal.SIGTERM)
        rest = b"".join(pieces)
    assert server.process.wait(timeout=60) == 0
    assert rest.endswith(b"data: [DONE]\n\n") and b'"finish_reason":"abort"' not in rest
    assert rest.count(b'"finish_reason":"length"') == 4, "served to its end"
    assert not any("Traceback" in line for line in server.lines)
