"""The family that docs/models.md builds: its blocks as a file outside the package."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import GraniteConfig, GraniteForCausalLM

from jaxserve import LLM, SamplingParams
from jaxserve.errors import UnsupportedModelError, ValidationError
from jaxserve.execution.features import Facts
from jaxserve.execution.step_compiler import StepCompiler
from jaxserve.models.config_reader import read_model_config
from jaxserve.models.weights import load_model
from jaxserve.parallel.mesh import make_mesh
from jaxserve.parallel.stages import Stage
from tests.jaxserve import oracle
from tests.jaxserve.models.dense import empty_cache, run
from tests.jaxserve.models.test_parity import TOLERANCE, random_tokens, relative_error
from tests.tiny_models import VOCAB_SIZE

PAGE = Path(__file__).parents[3] / "docs" / "models.md"
OWN: dict[str, Any] = {"architectures": ["granite:GRANITE"]}


def source() -> str:
    """The page's blocks, one behind the other."""
    return "\n\n".join(re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL))


@pytest.fixture
def granite(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folder of a small random Granite, beside the module that serves it."""
    (tmp_path / "granite.py").write_text(source())
    monkeypatch.syspath_prepend(str(tmp_path))
    torch.manual_seed(0)
    config = GraniteConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.15,
        embedding_multiplier=3.0,
        residual_multiplier=0.4,
        attention_multiplier=0.2,
        logits_scaling=2.5,
        attention_bias=True,
        pad_token_id=0,
    )
    GraniteForCausalLM(config).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_the_tutorial_is_short() -> None:
    assert len(source().splitlines()) <= 130


def test_its_logits_equal_transformers(granite: Path) -> None:
    config, tokens = read_model_config(granite, OWN), random_tokens(40)
    model = load_model(granite, config, mesh=make_mesh(1))
    with torch.no_grad():
        expected = oracle.load(granite)(torch.tensor(tokens)[None]).logits[0].numpy()
    found, _ = run(model, tokens, empty_cache(model.config, len(tokens)), 0)
    assert relative_error(found, expected) <= TOLERANCE


@pytest.mark.slow
def test_its_greedy_tokens_equal_transformers(granite: Path) -> None:
    prompt = random_tokens(20).tolist()
    with torch.no_grad():
        expected = oracle.load(granite).generate(
            torch.tensor([prompt]), max_new_tokens=8, min_new_tokens=8, do_sample=False
        )
    sizes = {"max_model_len": 64, "max_num_seqs": 2, "max_num_batched_tokens": 16, "num_pages": 20}
    with LLM(str(granite), hf_overrides=OWN, skip_tokenizer_init=True, **sizes) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
        (output,) = llm.generate([prompt], params, use_tqdm=False)
    assert output.outputs[0].token_ids == expected[0, len(prompt) :].tolist()


def test_its_steps_are_not_kept_for_a_later_start(
    granite: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    backends: Any = SimpleNamespace(decode="xla", prefill="own_attention:BACKEND")
    config = read_model_config(granite, OWN)
    facts, stage = Facts(VOCAB_SIZE, 0), Stage(make_mesh(), 0, 1, 1)
    parts: Any = (None, None, None)  # weights and buffers, which play no part
    compiler = StepCompiler(stage, *parts, config, facts, np.dtype("f4"), {}, lambda: None)
    compiler.keep_steps(tmp_path, "", (), backends)
    assert "made by granite, own_attention, whose sources may change" in caplog.text


def test_without_the_operators_word_the_model_is_refused(granite: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=r"architectures=\['GraniteForCausalLM'\]"):
        read_model_config(granite)
    config = json.loads((granite / "config.json").read_text())
    (granite / "config.json").write_text(json.dumps(config | OWN))
    with pytest.raises(UnsupportedModelError, match=r"architectures=\['granite:GRANITE'\]"):
        read_model_config(granite)
    with pytest.raises(UnsupportedModelError, match=r"architectures=\['granite:GRANITE'\]"):
        read_model_config(granite, {"rms_norm_eps": 1e-5})


def test_a_reader_says_its_own_architecture(granite: Path) -> None:
    code = source()
    other = 'lambda name, given: read_config("LlamaForCausalLM", given)'
    changed = code.replace(", read_config, Granite", f", {other}, Granite")
    assert changed != code
    (granite.parent / "llama_reader.py").write_text(changed)
    with pytest.raises(UnsupportedModelError, match="gives its own, not LlamaForCausalLM"):
        read_model_config(granite, {"architectures": ["llama_reader:GRANITE"]})


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("granite:NOTHING", "that can be imported .*no attribute 'NOTHING'"),
        ("no_such_module:GRANITE", "that can be imported .*No module named"),
        ("granite:GraniteConfig", "a Family .it is of type type"),
    ],
)
def test_what_is_no_family_is_one_error(granite: Path, name: str, told: str) -> None:
    with pytest.raises(ValidationError, match=told) as caught:
        read_model_config(granite, {"architectures": [name]})
    assert caught.value.field == "hf_overrides.architectures"
