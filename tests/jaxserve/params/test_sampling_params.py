"""SamplingParams: defaults, ranges and errors of vLLM."""

import logging
import math
import subprocess
import sys

import numpy as np
import pytest

from jaxserve.errors import ValidationError
from jaxserve.params.sampling_params import RequestOutputKind, SamplingParams, seed_words

NAN, INF = math.nan, math.inf


def test_defaults():
    params = SamplingParams()
    assert (params.n, params.temperature, params.top_p, params.top_k, params.min_p) == (
        1,
        1.0,
        1.0,
        0,
        0.0,
    )
    assert (params.presence_penalty, params.frequency_penalty) == (0.0, 0.0)
    assert params.repetition_penalty == 1.0
    assert (params.seed, params.max_tokens, params.min_tokens) == (None, 16, 0)
    assert (params.stop, params.stop_token_ids, params.bad_words) == ([], [], [])
    assert (params.logprobs, params.prompt_logprobs) == (None, None)
    assert (params.logit_bias, params.allowed_token_ids) == (None, None)
    assert not params.include_stop_str_in_output and not params.ignore_eos
    assert params.detokenize and params.skip_special_tokens
    assert params.spaces_between_special_tokens
    assert params.output_kind is RequestOutputKind.CUMULATIVE


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("n", [0, -1, 16385, 10**9, 1.0, "2", True, None]),
        ("presence_penalty", [-2.01, 2.01, NAN, INF, -INF, "1", True, None]),
        ("frequency_penalty", [-2.01, 2.01, NAN, INF, True]),
        ("repetition_penalty", [0, 0.0, -1, 1e-50, 1e300, NAN, INF, True, "1.1"]),
        ("temperature", [-0.1, 2.1, NAN, INF, -INF, True, "1", None, 10**400]),
        ("top_p", [0, 0.0, -0.1, 1.01, NAN, INF, True]),
        ("top_k", [-2, 1.0, "5", True, NAN, None]),
        ("min_p", [-0.01, 1.01, NAN, INF, True]),
        ("seed", [2**63, -(2**63) - 1, 1.5, True, "7"]),
        ("stop", [[""], "", ["a", ""], [1], 5, b"x", {"a": ""}]),
        ("stop_token_ids", [[-1], ["1"], [True], 5, "12", [1.0]]),
        ("bad_words", [[""], "word", [None], 3]),
        ("include_stop_str_in_output", [1, "true", None]),
        ("ignore_eos", [0, None]),
        ("max_tokens", [0, -1, 1.0, True, "16"]),
        ("min_tokens", [-1, 1.0, True, 17]),
        ("logprobs", [-2, True, 1.0, "1"]),
        ("prompt_logprobs", [-2, True, 1.0]),
        ("detokenize", [1, None]),
        ("skip_special_tokens", [1]),
        ("spaces_between_special_tokens", ["no"]),
        ("output_kind", ["DELTA", 1, None]),
        ("logit_bias", [{"x": 1}, {-1: 1}, {"-1": 1}, {1: NAN}, {1: INF}, {1: "a"}, [1], {1.5: 1}]),
        ("logit_bias", [{True: 1}, {1: True}]),
        ("allowed_token_ids", [[], [-1], ["1"], 5, [True]]),
    ],
)
def test_values_out_of_range_are_refused_by_name(field, values):
    for value in values:
        with pytest.raises(ValidationError) as error:
            SamplingParams(**{field: value})
        assert error.value.field == field, value
        assert len(str(error.value)) < 500


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", 16384),
        ("presence_penalty", -2),
        ("frequency_penalty", 2),
        ("repetition_penalty", 1e-3),
        ("temperature", 2),
        ("temperature", np.float32(0.5)),
        ("top_p", 1e-6),
        ("top_k", np.int64(40)),
        ("min_p", 1),
        ("seed", 2**63 - 1),
        ("seed", -(2**63)),
        ("max_tokens", None),
        ("min_tokens", 16),
        ("logprobs", -1),
        ("logprobs", 0),
    ],
)
def test_borders_are_allowed(field, value):
    assert getattr(SamplingParams(**{field: value}), field) == value


def test_numbers_become_plain():
    params = SamplingParams(temperature=1, top_k=np.int32(5), top_p=np.float32(0.5))
    assert type(params.temperature) is float and type(params.top_k) is int
    assert type(params.top_p) is float


def test_small_temperature_is_raised_with_a_warning(caplog):
    with caplog.at_level(logging.WARNING):
        assert SamplingParams(temperature=0.001).temperature == 0.01
    assert "0.001" in caplog.text
    caplog.clear()
    assert SamplingParams(temperature=0.01).temperature == 0.01
    assert not caplog.text


def test_greedy_resets_the_filters():
    params = SamplingParams(temperature=0, top_p=0.5, top_k=10, min_p=0.1)
    assert params.is_greedy
    assert (params.top_p, params.top_k, params.min_p) == (1.0, 0, 0.0)
    with pytest.raises(ValidationError, match="greedy") as error:
        SamplingParams(temperature=0, n=2)
    assert error.value.field == "n"
    with pytest.raises(ValidationError):
        SamplingParams(temperature=0, top_p=7)


def test_normal_forms():
    assert SamplingParams(stop="end").stop == ["end"]
    assert SamplingParams(stop=None, stop_token_ids=None, bad_words=None).stop == []
    assert SamplingParams(stop_token_ids=[5, 3, 5]).stop_token_ids == [5, 3]
    assert SamplingParams(seed=-1).seed is None
    assert SamplingParams(top_k=-1).top_k == 0
    bias = SamplingParams(logit_bias={"5": 1000, 7: -250.0, 9: 3}).logit_bias
    assert bias == {5: 100.0, 7: -100.0, 9: 3.0}


def test_caller_keeps_its_lists():
    stop, tokens = ["a"], [1, 1]
    params = SamplingParams(stop=stop, stop_token_ids=tokens)
    params.stop.append("b")
    assert (stop, tokens) == (["a"], [1, 1])


def test_stop_strings_need_text():
    with pytest.raises(ValidationError, match="detokenize"):
        SamplingParams(stop=["x"], detokenize=False)
    assert SamplingParams(stop_token_ids=[1], detokenize=False)


def test_verify():
    limits = {"vocab_size": 100, "max_model_len": 50, "max_logprobs": 20}
    SamplingParams(max_tokens=50, logprobs=20, prompt_logprobs=0, stop_token_ids=[99]).verify(
        **limits
    )
    SamplingParams(max_tokens=None).verify(**limits)
    for bad in (
        {"max_tokens": 51},
        {"max_tokens": 10**12},
        {"logprobs": 21},
        {"logprobs": -1},
        {"prompt_logprobs": 21},
        {"stop_token_ids": [100]},
        {"allowed_token_ids": [3, 100]},
        {"logit_bias": {"100": 1}},
    ):
        with pytest.raises(ValidationError) as error:
            SamplingParams(**bad).verify(**limits)
        assert error.value.field == next(iter(bad))
    for limits["max_logprobs"] in (100, -1):
        SamplingParams(logprobs=-1, prompt_logprobs=-1).verify(**limits)
    SamplingParams(logprobs=-1, prompt_logprobs=100).verify(**limits)
    with pytest.raises(ValidationError):
        SamplingParams(logprobs=101).verify(**limits)


def test_the_engine_gets_what_it_needs_and_no_text():
    params = SamplingParams(
        n=3, seed=5, stop=["x"], bad_words=["y"], logit_bias={1: 2}, min_p=0.1, logprobs=2
    )
    sent = params.for_engine()
    assert sent == SamplingParams(seed=5, logit_bias={1: 2}, min_p=0.1, logprobs=2)
    assert sent.logit_bias is params.logit_bias, "it may name the vocabulary"
    assert (params.n, params.stop, params.bad_words) == (3, ["x"], ["y"])


def test_what_only_vllm_has_is_passed_over_or_refused():
    """At its default, which asks for nothing, and otherwise by its name."""
    neutral = {
        "watermarking": None,
        "prompt_logprob_token_ids": None,
        "prompt_logprob_start": None,
        "routed_experts_prompt_start": 0,
        "trace_decode_token_ids": None,
    }
    assert SamplingParams(**neutral, skip_clone=True) == SamplingParams()
    assert SamplingParams.from_optional(**neutral, skip_clone=True) == SamplingParams()
    assert SamplingParams(temperature=0.5, skip_clone=True).clone().temperature == 0.5
    for name in neutral:
        with pytest.raises(ValidationError, match=f"{name}=1 "):
            SamplingParams(**{name: 1})


def test_arguments_that_are_none_are_the_defaults():
    given = {"n": None, "top_p": None, "temperature": 0.5, "stop": None, "seed": None}
    assert SamplingParams.from_optional(**given) == SamplingParams(temperature=0.5)
    assert SamplingParams.from_optional(max_tokens=None).max_tokens is None  # as many as fit
    with pytest.raises(ValidationError, match=r"no_such=None .* one of the parameters n, "):
        SamplingParams.from_optional(no_such=None)


def test_clone_is_equal_and_apart():
    params = SamplingParams(stop=["a"], allowed_token_ids=[1], temperature=0)
    twin = params.clone()
    assert twin == params and twin.stop is not params.stop


def test_what_the_engine_asks():
    assert SamplingParams(presence_penalty=0.1).has_penalties
    assert SamplingParams(repetition_penalty=1.1).has_penalties
    assert not SamplingParams().has_penalties
    assert SamplingParams(logprobs=0).needs_logprobs
    assert not SamplingParams(prompt_logprobs=1).needs_logprobs


def test_seed_words():
    assert seed_words(7) == (0, 7)
    assert seed_words(2**33 + 5) == (2, 5)
    assert seed_words(-1) == (0xFFFFFFFF, 0xFFFFFFFF)
    assert seed_words(-(2**63)) == (0x80000000, 0)


def test_import_is_free_of_jax():
    program = "import sys, jaxserve.params.sampling_params; "
    program += "assert 'jax' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True)
