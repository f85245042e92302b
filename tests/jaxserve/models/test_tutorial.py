"""The family that docs/models.md builds: its blocks as files, against transformers."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import GraniteConfig, GraniteForCausalLM

import jaxserve.models
from jaxserve.errors import UnsupportedModelError
from jaxserve.models import ModelConfig, registry
from tests.jaxserve import oracle
from tests.jaxserve.models.dense import empty_cache, run
from tests.jaxserve.models.test_parity import TOLERANCE, load, random_tokens, relative_error
from tests.tiny_models import VOCAB_SIZE

PAGE = Path(__file__).parents[3] / "docs" / "models.md"
REGISTRY = "jaxserve/models/registry.py"


def files() -> dict[str, str]:
    """Contents by the name that each block begins with."""
    blocks = re.findall(r"```python\n# (\S+)\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
    return dict(blocks)


@pytest.fixture
def granite(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Folder of a small random Granite, which the tutorial's files serve."""
    for name, text in files().items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if name == REGISTRY:
            path = tmp_path / "jaxserve/models/granite/entry.py"
            text = (
                "from jaxserve.models import granite\n"
                f"from jaxserve.models.registry import Family\n\nENTRY = {text}"
            )
        path.write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    # a package's own list of folders, as if the files lay beside the others
    monkeypatch.setattr(
        jaxserve.models, "__path__", [*jaxserve.models.__path__, str(tmp_path / "jaxserve/models")]
    )
    entry = importlib.import_module("jaxserve.models.granite.entry").ENTRY
    monkeypatch.setattr(registry, "FAMILIES", (*registry.FAMILIES, entry))
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
    yield tmp_path / "model"
    for name in [name for name in sys.modules if name.startswith("jaxserve.models.granite")]:
        del sys.modules[name]
    del jaxserve.models.granite


def test_the_tutorial_is_short() -> None:
    assert sum(len(text.splitlines()) for text in files().values()) <= 150
    assert len(files()) == 5


def test_its_logits_equal_transformers(granite: Path) -> None:
    model, tokens = load(granite), random_tokens(40)
    with torch.no_grad():
        expected = oracle.load(granite)(torch.tensor(tokens)[None]).logits[0].numpy()
    found, _ = run(model, tokens, empty_cache(model.config, len(tokens)), 0)
    assert relative_error(found, expected) <= TOLERANCE


def test_without_its_entry_the_model_is_refused(granite: Path, monkeypatch) -> None:
    monkeypatch.setattr(registry, "FAMILIES", registry.FAMILIES[:-1])
    with pytest.raises(UnsupportedModelError, match=r"architectures=\['GraniteForCausalLM'\]"):
        ModelConfig.from_folder(granite)
