"""The engine on each kernel backend, interpreted: the same tokens as on plain XLA in float32, and
the same logits up to rounding in bfloat16."""

from __future__ import annotations

import json
import random
import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve import LLM, EngineConfig, SamplingParams
from jaxserve.client.engine_client import LocalClient
from jaxserve.errors import ValidationError
from jaxserve.loading import engine_plan
from jaxserve.loading.engine_build import load_engine
from jaxserve.outputs import RequestOutput
from pallas_kernels import AttentionShape, Backends, KernelError
from pallas_kernels.backends.record import ANYWHERE, Backend, Implementation
from pallas_kernels.backends.triton import TritonDecodeTuning, TritonPrefillTuning
from pallas_kernels.tuning import ChipTuning
from tests.absent_devices import HOPPER_INTERPRETER, needs_hopper_interpreter

PAGE = Path(__file__).parents[2] / "docs" / "research.md"
HOPPER_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "max_position_embeddings": 128,
    "eos_token_id": 2,
}
XLA = Backends(decode="xla", prefill="xla", write_kv="xla", reason="the oracle")


def loaded(model: str, backends: Backends, **settings: Any) -> LocalClient:
    """An engine on these kernels."""
    config = EngineConfig(
        model=model,
        skip_tokenizer_init=True,
        max_model_len=96,
        max_num_batched_tokens=24,
        num_pages=30,
        block_size=16,
        compile_ahead=2,
        compile_in_background=False,
        **settings,
    )
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(engine_plan, "backends_for", lambda *facts, **integers: backends)
        return LocalClient(load_engine(config))


def served(
    model: str, backends: Backends, requests: dict[int, SamplingParams], **settings: Any
) -> Iterator[RequestOutput]:
    """Serves random prompts of the given lengths, chunked, batched and decoded side by side."""
    client = loaded(model, backends, **settings)
    yield from answered(client, requests)
    client.close()


def answered(client: LocalClient, requests: dict[int, SamplingParams]) -> Iterator[RequestOutput]:
    """What an engine answers; a prompt follows from its length."""
    for length, params in requests.items():
        rng = random.Random(length)
        prompt = [rng.randrange(3, client.model_config.vocab_size) for _ in range(length)]
        client.add(client.prepare(prompt, params, str(length)))
    while client.has_work:
        yield from (output for output in client.outputs() if output.finished)


def tokens(model: str, backends: Backends, **sampling: float) -> dict[str, list[int]]:
    """Tokens of each request, greedy if nothing else is said."""
    params = SamplingParams(**{"temperature": 0.0, **sampling}, max_tokens=6, ignore_eos=True)
    outputs = served(model, backends, dict.fromkeys((5, 40, 1, 17), params), max_num_seqs=3)
    return {output.request_id: output.outputs[0].token_ids for output in outputs}


def logprobs(model: str, backends: Backends) -> np.ndarray:
    """Log-probabilities of the vocabulary at every position of a few requests, [positions, V].

    Each request may generate one token only, so that rounding cannot lead two runs apart.
    """
    requests = {
        length: SamplingParams(
            max_tokens=4,
            ignore_eos=True,
            allowed_token_ids=[length],
            logprobs=-1,
            prompt_logprobs=-1,
        )
        for length in (40, 7, 18)
    }
    settings = {"dtype": "bfloat16", "load_format": "dummy", "max_logprobs": -1, "max_num_seqs": 2}
    rows: dict[str, list[list[float]]] = {}
    for output in served(model, backends, requests, **settings):
        positions = [*(output.prompt_logprobs or [])[1:], *(output.outputs[0].logprobs or [])]
        rows[output.request_id] = [
            [scored[token].logprob for token in sorted(scored)] for scored in positions if scored
        ]
    return np.array([row for request in sorted(rows) for row in rows[request]])


NATIVE = Backends(
    decode="native", prefill="native", write_kv="native", linear="native", reason="C++"
)
MOSAIC_TPU = Backends(
    decode="mosaic_tpu",
    prefill="mosaic_tpu",
    write_kv="mosaic_tpu",
    decode_and_write="mosaic_tpu",
    rotary=("mosaic_tpu", "xla"),
    reason="interpreted",
    interpret=True,
    head_dim_multiple=128,  # the model's heads are smaller
)
FUSED: dict[str, Any] = {
    "linear": "gpu",
    "rotate_and_write": "triton",
    "residual_norm": "triton",
}
BACKENDS = {
    "triton": Backends(
        decode="triton",
        prefill="triton",
        write_kv="xla",
        **FUSED,
        reason="interpreted",
        tuning=ChipTuning(
            decode=TritonDecodeTuning(block_tokens=16),
            prefill=TritonPrefillTuning(tile_rows=16, block_tokens=16),
        ),
        interpret=True,
    ),
    "fused around plain attention": replace(XLA, **FUSED, interpret=True),
    "mosaic_tpu": MOSAIC_TPU,
    "mosaic_tpu, writing apart": replace(MOSAIC_TPU, decode_and_write=None),
    "native": NATIVE,
}


@pytest.fixture(scope="module")
def float32_model(model_folder) -> str:
    return str(model_folder("llama_gqa", num_hidden_layers=2))


@pytest.fixture(scope="module")
def tokens_of_plain_xla(float32_model) -> dict[str, list[int]]:
    return tokens(float32_model, XLA)


@pytest.mark.slow  # interpreters are slow
@pytest.mark.parametrize(
    "name",
    BACKENDS,
)
def test_float32_tokens_are_those_of_plain_xla(name, float32_model, tokens_of_plain_xla):
    assert tokens(float32_model, BACKENDS[name]) == tokens_of_plain_xla


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mosaic_tpu", "mosaic_tpu, writing apart", "xla"])
def test_heads_of_256_may_be_two_rows_of_the_pool(name, model_folder):
    """Gemma's on a TPU; the backends of other devices see them as one."""
    model = str(model_folder("llama_gqa", num_hidden_layers=2, head_dim=256))
    backends = {**BACKENDS, "xla": XLA}[name]
    assert tokens(model, replace(backends, head_rows=2)) == tokens(model, XLA)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["qwen3_moe", "gemma3"])
def test_tokens_of_experts_and_norms_on_both_sides_are_those_of_plain_xla(case, model_folder):
    model = str(model_folder(case))
    kernels = replace(XLA, **FUSED, experts="triton", route=("triton", "xla"), interpret=True)
    assert tokens(model, kernels) == tokens(model, XLA)


@pytest.mark.slow
def test_filtered_tokens_are_those_of_plain_xla(float32_model):
    sampling = {"temperature": 1.0, "seed": 3, "top_k": 90, "top_p": 0.8, "min_p": 1e-3}
    kernel = replace(XLA, threshold="triton", interpret=True)
    want = tokens(float32_model, XLA, **sampling)
    assert tokens(float32_model, kernel, **sampling) == want
    assert want != tokens(float32_model, XLA, **{**sampling, "top_k": 1})


@pytest.mark.slow
def test_in_one_program_a_request_has_the_same_bits_in_any_company(float32_model):
    """As deterministic engines of GPUs and TPUs have it; the products are those of a CPU."""
    plain = {"rotate_and_write": None, "residual_norm": None, "linear": "native"}
    backends = replace(BACKENDS["triton"], **plain, row_invariant=True)
    client = loaded(float32_model, backends, max_num_seqs=4, deterministic=True)
    assert len(client.engine.runner.programs.wanted) == 1
    sampling = {"max_tokens": 6, "ignore_eos": True, "logprobs": 3, "temperature": 0.9}
    requests = {n: SamplingParams(**sampling, seed=n) for n in (5, 40, 1, 17, 33)}
    together = [*answered(client, requests)]
    assert len(together) == len(requests)
    for one in together:
        client.reset_prefix_cache()
        (alone,) = answered(client, {int(one.request_id): requests[int(one.request_id)]})
        assert alone.outputs == one.outputs
    client.close()


@pytest.mark.slow
@needs_hopper_interpreter
def test_bfloat16_logits_on_mosaic_gpu_are_those_of_plain_xla(tmp_path, monkeypatch):
    """There is no float32 on that backend; the model is made here, since torch may be missing."""
    monkeypatch.setattr("jaxserve.models.dummy.STD", 0.15)  # so that attention matters
    # a CPU would keep the pages as their bits, which the kernels of a GPU do not take
    monkeypatch.setattr(
        "jaxserve.models.kv_cache.storage_dtype", lambda dtype, platform: jnp.dtype(dtype)
    )
    (tmp_path / "config.json").write_text(json.dumps(HOPPER_CONFIG))
    hopper = Backends(
        decode="mosaic_gpu",
        prefill="mosaic_gpu",
        write_kv="xla",
        reason="interpreted",
        interpret=HOPPER_INTERPRETER(),
    )
    got, want = (logprobs(str(tmp_path), backends) for backends in (hopper, XLA))
    # 40, 7 and 18 prompt tokens, the first of each unscored, and 4 generated ones
    assert got.shape == want.shape == (39 + 6 + 17 + 3 * 4, HOPPER_CONFIG["vocab_size"])
    # rounding gives up to 0.02 of the spread over the vocabulary, a wrong key or value most of it
    assert (np.abs(got - want).max(axis=1) <= 0.05 * want.std(axis=1)).all()


@pytest.mark.slow
def test_an_own_backend_computes_the_tokens_of_plain_xla(
    float32_model, tokens_of_plain_xla, monkeypatch
):
    """The page's, which says how often it was traced."""
    (text,) = re.findall(r"```python\n# plain_attention.py\n(.*?)```", PAGE.read_text(), re.DOTALL)
    module: Any = ModuleType("plain_attention")
    monkeypatch.setitem(sys.modules, "plain_attention", module)
    exec(text, vars(module))
    traced = []
    attend = module.attend
    module.attend = lambda *given: traced.append(given[0].shape) or attend(*given)
    own = replace(XLA, decode="plain_attention:BACKEND", prefill="plain_attention:BACKEND")
    assert tokens(float32_model, own) == tokens_of_plain_xla
    rows = {shape[0] for shape in traced}
    assert len(traced) == len(set(traced)) and {3, 24} <= rows, "once a shape, for all layers"


def test_an_own_backend_that_does_not_cover_the_model_is_one_error(model_folder, monkeypatch):
    def covers(shape: AttentionShape) -> KernelError | None:
        return KernelError("head_dim", shape.head_dim, "1000")

    module: Any = ModuleType("narrow")
    module.BACKEND = Backend("narrow", (Implementation("decode", "narrow", covers, ANYWHERE),))
    monkeypatch.setitem(sys.modules, "narrow", module)
    with pytest.raises(ValidationError, match=r"decode_backend='narrow:BACKEND'.*covers head_dim="):
        LLM(
            str(model_folder("llama_gqa")),
            skip_tokenizer_init=True,
            decode_backend="narrow:BACKEND",
        )


def test_a_backend_of_another_device_is_refused(model_folder):
    with pytest.raises(
        ValidationError, match=r"decode_backend='mosaic_gpu'.*on a CPU one of native, xla"
    ):
        LLM(str(model_folder("llama_gqa")), skip_tokenizer_init=True, decode_backend="mosaic_gpu")
