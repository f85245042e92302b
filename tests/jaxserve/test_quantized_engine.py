"""Engines on quantised checkpoints: flags, errors of loading, GGUF with its tokenizer."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path

import pytest

from checkpoints import CheckpointError, bundled_model_path
from checkpoints.quantize.layer_schemes import uniform_policy
from jaxserve import LLM, SamplingParams
from jaxserve.errors import ValidationError
from jaxserve.jobs.convert import convert
from jaxserve.jobs.quantize import quantize
from jaxserve.tokenization.tokenizer import Tokenizer
from server.cli import build_parser
from server.commands.engine_flags import engine_config
from tests.jaxserve.models.gguf_models import as_gguf, bundled_gguf
from tests.quantized_models import CASES, quantize_folder

SIZES = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32, "num_hidden_layers": 2}
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
PROMPTS = [{"prompt_token_ids": list(range(start, start + 9))} for start in (3, 50, 120)]


@pytest.fixture(scope="module")
def awq(model_folder: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory):
    config, pack = CASES["awq"]
    base = model_folder("llama_biases", **SIZES)
    return quantize_folder(base, tmp_path_factory.mktemp("awq"), config, lambda module: pack)


def tokens(llm: LLM) -> list[list[int]]:
    return [list(out.outputs[0].token_ids) for out in llm.generate(PROMPTS, GREEDY)]


@pytest.mark.slow
def test_the_flags_of_an_awq_checkpoint(
    awq: tuple[Path, Path], make_llm: Callable[..., LLM]
) -> None:
    stored, floats = awq
    line = "--quantization awq --dtype half --gpu-memory-utilization 0.95"
    words = ["serve", "--model", str(stored), *shlex.split(line)]
    config = engine_config(build_parser().parse_args(words))
    assert (config.quantization, config.gpu_memory_utilization) == ("awq", 0.95)
    flags = {"quantization": "awq", "dtype": "half", "gpu_memory_utilization": 0.95}
    assert tokens(make_llm(stored, **flags)) == tokens(make_llm(floats, dtype="half"))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"quantization": "gptq"}, "quantization='gptq'.*awq, or left out"),
        ({"quantization": "int8"}, "quantization='int8'.*awq, or left out"),
        ({"load_format": "dummy"}, "load_format='dummy'.*quantised.*awq"),
    ],
)
def test_a_contradiction_is_an_error(
    awq: tuple[Path, Path], make_llm: Callable[..., LLM], settings: dict[str, str], message: str
) -> None:
    with pytest.raises(ValidationError, match=message):
        make_llm(awq[0], **settings)


def test_a_plain_checkpoint_is_not_awq(
    awq: tuple[Path, Path], make_llm: Callable[..., LLM]
) -> None:
    with pytest.raises(ValidationError, match="the checkpoint is not quantised"):
        make_llm(awq[1], quantization="awq")


@pytest.fixture(scope="module")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The bundled model as a GGUF file, and a folder of the floats that it stands for."""
    return bundled_gguf(tmp_path_factory.mktemp("gguf"))


TEXTS = (
    "Once upon a time there was",
    "  two spaces, and it's\n\nlines",
    "<|user|>Hello<|end|>",
    "",
)


@pytest.mark.slow
def test_the_tokenizer_of_a_gguf_file(gguf: tuple[Path, Path]) -> None:
    ours, wanted = Tokenizer(gguf[0]), Tokenizer(bundled_model_path())
    for text in TEXTS:
        assert ours.encode(text) == wanted.encode(text)
        assert ours.decode(ours.encode(text)) == wanted.decode(wanted.encode(text))
    assert (ours.bos_token_id, ours.eos_token_id) == (wanted.bos_token_id, wanted.eos_token_id)
    assert ours.special_ids == wanted.special_ids
    assert ours.vocab_size == wanted.vocab_size
    assert len(ours.encode("<|endoftext|>")) > 2, "a token that transformers' class would add"
    chat = [{"role": "user", "content": "Hello"}]
    assert ours.apply_chat_template(chat) == wanted.apply_chat_template(chat)


@pytest.mark.slow
def test_text_from_a_gguf_file(gguf: tuple[Path, Path], make_llm: Callable[..., LLM]) -> None:
    file, floats = gguf
    settings = {"skip_tokenizer_init": False, "dtype": "float32"}
    ours, wanted = make_llm(file, **settings), make_llm(floats, **settings)
    for text in TEXTS[:2]:
        (found,), (expected,) = (llm.generate([text], GREEDY) for llm in (ours, wanted))
        assert found.outputs[0].text == expected.outputs[0].text
        assert found.outputs[0].text


def test_a_gguf_file_without_a_tokenizer(
    model_folder: Callable[..., Path], tmp_path: Path, make_llm: Callable[..., LLM]
) -> None:
    file, _ = as_gguf(model_folder("llama_gqa", num_hidden_layers=1), tmp_path, {})
    with pytest.raises(ValidationError, match=r"tokenizer=.*tokenizer\.ggml\.tokens"):
        make_llm(file, skip_tokenizer_init=False)
    with pytest.raises(ValidationError, match="a folder that is here, a GGUF file"):
        make_llm(tmp_path / "other.gguf")
    with pytest.raises(CheckpointError, match="GGUF file is not written"):
        convert(str(file), tmp_path / "store")
    for name in (str(file), "owner/name:Q4_K_M"):
        with pytest.raises(CheckpointError, match="GGUF file is not written"):
            quantize(name, tmp_path / "store", uniform_policy("int8"))
    assert not (tmp_path / "store").exists()


@pytest.mark.slow
def test_an_engine_on_a_gguf_file_writes_no_store(
    model_folder: Callable[..., Path], tmp_path: Path, make_llm: Callable[..., LLM]
) -> None:
    file, _ = as_gguf(model_folder("llama_gqa", num_hidden_layers=1), tmp_path, {})
    with pytest.raises(CheckpointError, match="GGUF file is not written"):
        make_llm(file).save(tmp_path / "store")
    assert not (tmp_path / "store").exists()


@pytest.mark.slow
def test_weights_that_are_rounded_when_loaded(
    awq: tuple[Path, Path], make_llm: Callable[..., LLM]
) -> None:
    """Overlapped steps give what steps one by one do."""
    settings = {"quantization": "int4", "dtype": "bfloat16"}
    found = tokens(make_llm(awq[1], **settings))
    assert found == tokens(make_llm(awq[1], overlap=False, **settings))
