"""The engine on each kernel backend, interpreted: the same tokens as on plain XLA in float32."""

from __future__ import annotations

import random

import pytest

from jaxserve import LLM, EngineConfig, SamplingParams
from jaxserve.errors import ValidationError
from jaxserve.inputs import InputProcessor
from jaxserve.loading import load_engine
from pallas_kernels import Backends
from pallas_kernels.tuning import ChipTuning, DecodeTuning, PrefillTuning
from tests.tiny_models import VOCAB_SIZE

XLA = Backends(decode="xla", prefill="xla", write_kv="xla", reason="the oracle")


def tokens(model: str, backends: Backends, **settings) -> list[list[int]]:
    """Greedy tokens of prompts that are chunked, batched and decoded side by side."""
    config = EngineConfig(
        model=model,
        skip_tokenizer_init=True,
        max_model_len=96,
        max_num_seqs=3,
        max_num_batched_tokens=24,
        num_pages=30,
        compile_ahead=2,
        compile_in_background=False,
        **settings,
    )
    loaded = load_engine(config, backends=backends)
    inputs = InputProcessor(loaded.config, loaded.model_config, None)
    rng = random.Random(0)
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    result: dict[str, list[int]] = {}
    for index, length in enumerate((5, 40, 1, 17)):
        prompt = [rng.randrange(3, VOCAB_SIZE) for _ in range(length)]
        for sequence in inputs.prepare(prompt, params, str(index)).sequences:
            result[sequence.request_id] = []
            loaded.engine.add(sequence)
    while loaded.engine.has_work:
        seen = loaded.engine.step().seen
        for request, token in zip(seen.requests, seen.tokens):
            result[request.request_id].append(token)
    loaded.engine.close()
    return list(result.values())


NATIVE = Backends(
    decode="native", prefill="native", write_kv="xla", linear="native", reason="C++ on the CPU"
)
BACKENDS: dict[str, tuple[Backends, dict]] = {
    "triton": (
        Backends(
            decode="triton",
            prefill="triton",
            write_kv="xla",
            reason="interpreted",
            tuning=ChipTuning(
                decode=DecodeTuning(block_tokens=16),
                prefill=PrefillTuning(tile_rows=16, block_tokens=16),
            ),
            interpret=True,
        ),
        {},
    ),
    "mosaic_tpu": (
        Backends(
            decode="mosaic_tpu",
            prefill="mosaic_tpu",
            write_kv="mosaic_tpu",
            reason="interpreted",
            interpret=True,
            head_dim_multiple=128,  # the model's heads are smaller
        ),
        {},
    ),
    "native": (NATIVE, {}),
}


@pytest.mark.parametrize(
    "name",
    ["native", *(pytest.param(n, marks=pytest.mark.slow) for n in BACKENDS if n != "native")],
)  # interpreters are slow
def test_float32_tokens_are_those_of_plain_xla(name, model_folder):
    backends, settings = BACKENDS[name]
    model = str(model_folder("llama_gqa", num_hidden_layers=2, **settings))
    assert tokens(model, backends, block_size=16) == tokens(model, XLA, block_size=16)


def test_a_backend_of_another_device_is_refused(model_folder):
    with pytest.raises(
        ValidationError, match=r"decode_backend='mosaic_gpu'.*on a CPU one of native, xla"
    ):
        LLM(str(model_folder("llama_gqa")), skip_tokenizer_init=True, decode_backend="mosaic_gpu")
