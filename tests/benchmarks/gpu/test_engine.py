"""Logits on the same tokens: rounding passes, a wrong kernel does not, whatever the tokens are."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from benchmarks.gpu import engine
from benchmarks.gpu.setting import dry_setting
from benchmarks.model_shapes import TINY, write_config
from pallas_kernels import Backends


def test_a_near_tie_is_no_difference_and_another_distribution_is():
    rng = np.random.default_rng(0)
    want = rng.standard_normal((4, 32))
    want[:, 7] = want[:, 9] = 3.0  # two tokens that are equally likely
    got = want.copy()
    got[:, 9] += 0.01  # now one of them is greedy's choice
    greedy = got.argmax(axis=1).tolist()
    assert set(greedy) != set(want.argmax(axis=1).tolist())
    section = engine.compare("road", "plain XLA", [(greedy, got, want)])
    assert section.rows[0][:2] == ("road", 4) and not section.failures
    wrong = want.copy()
    wrong[2, 20] += 0.2 * want[2].std()
    (failure,) = engine.compare("road", "plain XLA", [(wrong.argmax(axis=1), wrong, want)]).failures
    assert failure.startswith("road: logits differ from those of plain XLA by 0.2")
    assert engine.compare("road", "plain XLA", [(greedy, want * np.nan, want)]).failures


def test_a_token_that_is_not_the_most_likely_one_is_a_failure():
    want = np.random.default_rng(0).standard_normal((4, 32))
    tokens = want.argmax(axis=1)
    tokens[1] = want[1].argmin()
    (failure,) = engine.compare("road", "plain XLA", [(tokens, want, want)]).failures
    assert failure == "road: 1 greedy tokens are not its most likely ones"


@pytest.mark.slow
def test_plain_xla_has_no_kernel_of_the_device(monkeypatch, tmp_path):
    chosen = Backends(
        "reference", "reference", "reference", "a test", rotate_and_write="xla",
        threshold="reference",
    )  # fmt: skip
    monkeypatch.setattr(
        "jaxserve.loading.backend_choice.choose_backends", lambda *device, **known: chosen
    )
    folder = write_config("llama-125m", tmp_path, **TINY)
    few = {"max_num_seqs": 2, "num_pages": 40, "compile_ahead": 1}
    for road, backends in ((engine.CHOSEN, chosen), (engine.PLAIN_XLA, engine.PLAIN_BACKENDS)):
        llm = engine.on_road(folder, road, **few)
        assert llm.backends == backends
        llm.close()
    plain = engine.PLAIN_BACKENDS
    assert {plain.decode, plain.prefill, plain.write_kv, plain.linear, plain.threshold} == {"xla"}
    assert plain.decode_and_write is plain.rotate_and_write is plain.residual_norm is None


@pytest.mark.slow
def test_the_engine_fails_when_its_decode_attention_is_slightly_wrong(monkeypatch):
    from pallas_kernels.paged_attention.xla import decode

    setting = dry_setting({}, 600.0)
    right = engine.teacher_forced(setting, [engine.PLAIN_XLA])
    assert not right.failures
    exact = decode.decode
    monkeypatch.setattr(decode, "decode", lambda *a, **k: exact(*a, **k) * 1.1)
    jax.clear_caches()
    (failure,) = engine.teacher_forced(setting, [engine.PLAIN_XLA]).failures
    assert failure.startswith("plain XLA: logits differ")
