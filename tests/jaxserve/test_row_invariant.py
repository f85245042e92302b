"""`row_invariant`: what a request is given does not depend on the requests beside it."""

from __future__ import annotations

import pytest

from checkpoints import bundled_model_path
from jaxserve import LLM, EngineConfig, SamplingParams
from jaxserve.errors import ValidationError
from jaxserve.loading.engine_build import load_engine
from jaxserve.models.linear import LinearForm
from pallas_kernels import Backends, native

NATIVE = {"linear_backend": "native", "decode_backend": "native", "prefill_backend": "native"}
XLA = Backends(decode="xla", prefill="xla", write_kv="xla", reason="a test")


def test_only_native_layers_can():
    with pytest.raises(ValidationError, match=r"row_invariant=True.*linear_backend native"):
        LinearForm.of(XLA, None, row_invariant=True)


def test_an_engine_refuses_before_it_loads():
    config = EngineConfig(model=str(bundled_model_path()), linear_backend="xla", row_invariant=True)
    with pytest.raises(ValidationError, match="row_invariant"):
        load_engine(config)


@pytest.mark.slow
def test_logprobs_alone_and_among_others_are_equal():
    if not native.availability().available:
        pytest.skip(f"native kernels: {native.availability().reason}")
    prompts = [
        f"Number {i} of the prompts, which are long and longer: {'a b ' * i}" for i in range(12)
    ]
    params = SamplingParams(max_tokens=6, temperature=0.0, logprobs=3, ignore_eos=True)
    settings = {"row_invariant": True, "dtype": "bfloat16", "compile_ahead": 2}
    with LLM(
        str(bundled_model_path()),
        enable_prefix_caching=False,
        compile_in_background=False,
        **settings,
        **NATIVE,
    ) as llm:
        alone = llm.generate(prompts[3:4], params)[0].outputs[0]
        among = llm.generate(prompts, params)[3].outputs[0]
    assert among.token_ids == alone.token_ids
    for one, other in zip(among.logprobs, alone.logprobs, strict=True):
        assert {t: p.logprob for t, p in one.items()} == {t: p.logprob for t, p in other.items()}
