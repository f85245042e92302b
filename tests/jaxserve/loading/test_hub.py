"""Models by their ids: what is fetched, in which order, and what is said when it cannot be."""

from __future__ import annotations

import errno
import json
import os
import shutil
import socket
import subprocess
import threading
from collections import namedtuple
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load, save

from checkpoints import bundled_model_path
from jaxserve import EngineConfig
from jaxserve.errors import HubError, UnsupportedModelError, ValidationError
from jaxserve.loading import engine_build
from jaxserve.loading.hub import Hub, is_hub_id, locate
from tests.command_line import run
from tests.hub_server import COMMIT, HubServer, serve_hub

TOKEN = "hf_abcdefghijkl"
SHARDS = {f"model-{i}.safetensors": bytes([i]) * 500_000 for i in (1, 2)}
INDEX = json.dumps({"weight_map": {name: name for name in SHARDS}}).encode()
SMALL = {"config.json": b"{}", "tokenizer.json": b"{}", "model.safetensors.index.json": INDEX}
OTHERS = {"pytorch_model.bin": b"pickle", "consolidated.safetensors": b"again", "README.md": b"#"}
BUNDLED = {
    file.name: file.read_bytes()
    for file in bundled_model_path().iterdir()
    if file.suffix in (".json", ".safetensors")
}


@pytest.fixture
def server() -> Iterator[HubServer]:
    with serve_hub() as server:
        server.repositories = {
            "o/m": SMALL | SHARDS | OTHERS,
            "o/bin": {"config.json": b"{}", "pytorch_model.bin": b"pickle"},
            "o/nothing": {"README.md": b"#"},
            "o/bundled": BUNDLED,
        }
        yield server


@pytest.fixture
def hub(server: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)  # of the account that runs this
    return Hub(None, str(tmp_path / "cache"), server.endpoint)


def test_small_files_first_then_safetensors_at_once_and_nothing_twice(
    server: HubServer, hub: Hub
) -> None:
    folder = hub.fetch_small_files("o/m", None)
    assert {file.name for file in folder.iterdir()} == set(SMALL)
    assert not [path for _, path, _ in server.requests if path.endswith(tuple(SHARDS))]
    server.together = threading.Barrier(2)  # broken by a download that would wait for the other
    heard: list[tuple[int, int]] = []
    hub.fetch_weights("o/m", folder, lambda *told: heard.append(told))
    assert not server.together.broken
    assert heard == sorted(heard) and heard[-1] == (1_000_000, 1_000_000), "bytes, as they come"
    assert {file.name for file in folder.iterdir()} == SMALL.keys() | SHARDS
    assert all((folder / name).read_bytes() == data for name, data in SHARDS.items())
    assert not [path for _, path, _ in server.requests if path.endswith(tuple(OTHERS))]
    server.requests.clear()
    hub.fetch_weights("o/m", hub.fetch_small_files("o/m", COMMIT))
    assert server.requests == [], "a whole commit is in the cache"


def test_one_gguf_file_of_a_repository(server: HubServer, hub: Hub) -> None:
    server.repositories["o/g"] = {
        "README.md": b"#",
        "m-Q4_K_M.gguf": b"GGUF4",
        "m-Q8_0.gguf": b"GGUF8",
        "m-BF16-00001-of-00002.gguf": b"",
    }
    heard: list[tuple[int, int]] = []
    for name, content in (("o/g:m-Q8_0.gguf", b"GGUF8"), ("o/g:Q4_K_M", b"GGUF4")):
        heard.clear()
        files = locate(EngineConfig(model=name), hub, lambda *told: heard.append(told))
        assert heard[-1] == (5, 5)
        assert files.model == files.tokenizer and files.model.read_bytes() == content
        files.fetch_weights()
    assert not server.asked("GET", "README.md")
    for name, said in (
        ("o/g:Q5_K", r"no file named .*Q5_K\.gguf; its GGUF files are m-Q4_K_M.*m-Q8_0\.gguf"),
        ("o/g:other.gguf", "no file named other.gguf"),
        ("o/g:m-BF16-00001-of-00002.gguf", "only single GGUF files"),
    ):
        with pytest.raises(HubError, match=said):
            locate(EngineConfig(model=name), hub)
    for name in ("o/g:", "other.gguf", "g:Q8_0"):
        with pytest.raises(ValidationError, match=r"owner/name:file\.gguf"):
            locate(EngineConfig(model=name), hub)


def test_a_cut_is_resumed(server: HubServer, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 100_000)
    folder = hub.fetch_small_files("o/m", "main")
    server.cuts = {"model-2.safetensors": 250_000}
    hub.fetch_weights("o/m", folder)
    downloads = server.asked("GET", "model-2.safetensors")
    assert [headers.get("range") for headers in downloads] == [None, "bytes=200000-"]
    assert (folder / "model-2.safetensors").read_bytes() == SHARDS["model-2.safetensors"]


def refusal(call: Any, *arguments: Any) -> str:
    with pytest.raises(HubError) as caught:
        call(*arguments)
    said = str(caught.value)
    assert "\n" not in said and TOKEN not in said and TOKEN not in repr(caught.value)
    return said


def test_what_the_hub_does_not_give(server: HubServer, hub: Hub) -> None:
    assert "no model 'o/x'" in refusal(hub.fetch_small_files, "o/x", None).replace("nor a", "no")
    assert "no revision 'v7'" in refusal(hub.fetch_small_files, "o/m", "v7")
    assert "has no config.json" in refusal(hub.fetch_small_files, "o/nothing", None)
    said = refusal(hub.fetch_weights, "o/bin", hub.fetch_small_files("o/bin", None))
    assert "only safetensors are read; its weights are pytorch_model.bin" in said
    assert server.asked("GET", "pytorch_model.bin") == []
    server.status = 503
    assert "503" in refusal(hub.fetch_small_files, "o/bundled", None)


def test_a_gated_model_wants_the_right_token(server: HubServer, hub: Hub) -> None:
    server.tokens = {"o/m": TOKEN}
    assert "gated and there is no token" in refusal(hub.fetch_small_files, "o/m", None)
    other = Hub("hf_other", hub.cache_dir, hub.endpoint)
    assert "account without access" in refusal(other.fetch_small_files, "o/m", None)
    right = Hub(TOKEN, hub.cache_dir, hub.endpoint)
    assert TOKEN not in repr(right)
    right.fetch_weights("o/m", right.fetch_small_files("o/m", None))


def test_a_hub_that_is_not_there(hub: Hub) -> None:
    with socket.create_server(("127.0.0.1", 0)) as held:
        port = held.getsockname()[1]
    away = Hub(TOKEN, hub.cache_dir, f"http://127.0.0.1:{port}")
    assert "refused" in refusal(away.fetch_small_files, "o/m", None)
    folder = hub.fetch_small_files("o/m", None)
    assert away.fetch_small_files("o/m", None) == folder, "what is whole in the cache serves"


def test_a_full_disk(server: HubServer, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = hub.fetch_small_files("o/m", None)
    usage = namedtuple("usage", "total used free")
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda path: usage(10**9, 10**9 - 999_999, 999_999))
        said = refusal(hub.fetch_weights, "o/m", folder)
    assert "need 1000000 bytes and 999999 are free" in said and "download_dir" in said
    assert server.asked("GET", ".safetensors") == [], "found out before anything is fetched"

    def full(*args: Any, **kwargs: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("huggingface_hub.file_download.http_get", full)
    assert "is full" in refusal(hub.fetch_weights, "o/m", folder)


def test_a_folder_is_taken_before_an_id(hub: Hub, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    Path("o/m").mkdir(parents=True)
    assert locate(EngineConfig(model="o/m"), hub).model == Path("o/m")
    with pytest.raises(ValidationError, match=r"revision='v1'.*is the folder o/m"):
        locate(EngineConfig(model="o/m", revision="v1"), hub)
    assert is_hub_id("model", "o/n")
    for name in ("/nowhere", "./o/n", "a/b/c", "~/model", "a b", "nowhere"):
        with pytest.raises(ValidationError, match=r"tokenizer=.*folder that is here"):
            is_hub_id("tokenizer", name)


def test_the_tokenizer_may_be_elsewhere(hub: Hub, tmp_path: Path) -> None:
    (tmp_path / "t").mkdir()
    found = locate(EngineConfig(model="o/m", tokenizer=str(tmp_path / "t")), hub)
    assert (found.model.name, found.tokenizer) == (COMMIT, tmp_path / "t")
    found = locate(EngineConfig(model="o/m", tokenizer="o/bundled", revision=COMMIT), hub)
    assert "o--bundled" in str(found.tokenizer) and "o--m" in str(found.model)
    with pytest.raises(HubError, match=r"'o/m'.*no revision 'v2'"):
        locate(EngineConfig(model="o/m", tokenizer_revision="v2"), hub)


@pytest.mark.parametrize(
    ("setting", "value", "error"),
    [
        ("hf_overrides", {"architectures": ["NoSuchModel"]}, UnsupportedModelError),
        ("hf_overrides", {"hidden_act": "mish"}, UnsupportedModelError),
        ("tokenizer", "o/bin", ValidationError),
        ("num_pages", 10**9, ValidationError),
    ],
)
def test_what_cannot_be_served_is_refused_before_the_weights(
    server: HubServer,
    hub: Hub,
    monkeypatch: pytest.MonkeyPatch,
    setting: str,
    value: Any,
    error: type[Exception],
) -> None:
    monkeypatch.setattr(engine_build, "locate", lambda config, told: locate(config, hub, told))
    with pytest.raises(error):
        engine_build.load_engine(EngineConfig(model="o/bundled", **{setting: value}))
    assert server.requests and not server.asked("GET", ".safetensors")


@pytest.mark.slow
def test_a_head_that_the_config_denies_is_found_once_the_weights_are_here(
    server: HubServer, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine is planned again, with a head of its own; a folder is judged at once."""
    tensors = load(BUNDLED["model.safetensors"])
    tensors["lm_head.weight"] = -tensors["model.embed_tokens.weight"]
    server.repositories["o/headed"] = BUNDLED | {"model.safetensors": save(tensors)}
    monkeypatch.setattr(engine_build, "locate", lambda config, told: locate(config, hub, told))
    sizes = {"max_num_seqs": 1, "max_model_len": 64, "num_pages": 32, "skip_tokenizer_init": True}
    for model in ("o/headed", str(hub.fetch_small_files("o/headed", None))):
        loaded = engine_build.load_engine(EngineConfig(model=model, **sizes))  # type: ignore[arg-type]
        assert not loaded.decided.model.tie_word_embeddings
        assert loaded.engine.runner.weights.device_bytes > 1.02 * sum(
            value.nbytes for name, value in tensors.items() if name != "lm_head.weight"
        )


GENERATE = ["generate", "o/bundled", "--prompt", "Add 2 and 3", "--max-tokens", "4", "--temp", "0"]


def command(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    hidden = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    return run(*words, env=hidden | environment)


@pytest.mark.slow
def test_offline_without_a_cache_is_one_line(tmp_path: Path) -> None:
    done = command(*GENERATE, HF_HUB_OFFLINE="1", HF_HOME=str(tmp_path), HF_TOKEN=TOKEN)
    assert done.returncode == 1
    lines = [line for line in done.stderr.splitlines() if line.startswith("jaxserve: ")]
    assert len(lines) == 1 and "HF_HUB_OFFLINE is set" in lines[0] and "'o/bundled'" in lines[0]
    assert "Traceback" not in done.stderr and TOKEN not in done.stderr


@pytest.mark.slow
def test_the_environment_is_honoured(server: HubServer, tmp_path: Path) -> None:
    server.tokens = {"o/bundled": TOKEN}
    home = {"HF_HOME": str(tmp_path), "HF_ENDPOINT": server.endpoint}
    refused = command(*GENERATE, **home)
    assert refused.returncode == 1 and "gated" in refused.stderr
    online = command(*GENERATE, HF_TOKEN=TOKEN, **home)
    assert online.returncode == 0, online.stderr
    assert TOKEN not in online.stderr + online.stdout
    asked = len(server.requests)
    offline = command(*GENERATE, HF_HUB_OFFLINE="1", **home)
    assert (offline.returncode, offline.stdout) == (0, online.stdout), offline.stderr
    folder = command("generate", str(bundled_model_path()), *GENERATE[2:])
    assert folder.stdout == online.stdout != "" and len(server.requests) == asked
