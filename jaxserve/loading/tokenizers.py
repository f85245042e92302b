"""The tokenizer of a model, without an engine."""

from __future__ import annotations

from typing import Any

from jaxserve.config.engine_config import EngineConfig
from jaxserve.config.vllm_arguments import own_settings
from jaxserve.loading.hub import locate
from jaxserve.tokenization.tokenizer import Tokenizer


def get_tokenizer(tokenizer_name: str, **settings: Any) -> Tokenizer:
    """The tokenizer of a folder or of a model of the hub.

    Args:
        tokenizer_name: the folder or the id.
        settings: `revision`, `download_dir` and vLLM's other arguments of a tokenizer.

    Raises:
        ValidationError: an argument that cannot be served.
        HubError: the hub does not give the files.
    """
    config = EngineConfig.from_settings(model=str(tokenizer_name), **own_settings(settings))
    return Tokenizer(locate(config).tokenizer)
