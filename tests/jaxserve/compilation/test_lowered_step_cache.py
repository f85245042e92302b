"""Steps that a start keeps: found by what decides them, and by nothing else."""

from __future__ import annotations

import logging
import os
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from jaxserve.compilation import lowered_step_cache as module
from jaxserve.compilation.cache_bounds import STEPS
from jaxserve.compilation.lowered_step_cache import LoweredStepCache, lowered_step_cache
from jaxserve.execution.features.bias import Bias
from pallas_kernels.native import own_folder
from tests.command_line import output_of

pytest.importorskip("flatbuffers", reason="jax.export writes nothing without it: nothing is KEPT")

ENGINE = """
import sys
from functools import partial
import jaxserve.execution.step_compiler as compiler
import jaxserve.client.engine_calls as calls
import jaxserve.llm as llm
traced = []
def counted(*given, run_step=compiler.run_step):
    traced.append(1)
    return run_step(*given)
compiler.run_step = counted
calls.load_engine = partial(calls.load_engine, keep_steps=sys.argv[2] == "kept")
engine = llm.LLM(sys.argv[1], skip_tokenizer_init=True, max_model_len=64, max_num_seqs=2,
                 num_pages=9, compile_ahead=2, compile_in_background=False,
                 max_num_batched_tokens=16)
output = engine.generate([[5, 6, 7]], use_tqdm=False)[0]
print(len(traced), output.outputs[0].token_ids)
engine.close()
"""


class Own(Bias):
    """A feature of the operator's."""


OPERANDS = ((jnp.ones(3), jnp.arange(4)), {}, {"a": jnp.zeros(3), "b": jnp.zeros(2)}, jnp.int32(5))


def step(leaves, buffers, state, blob):
    """As a step of an engine: state, result, and what is set aside."""
    state = {"a": state["a"] + leaves[0] * blob, "b": state["b"] + 1}
    return state, leaves[1] + blob, {"aside": state["a"].sum()}


def untraced(*operands):
    raise AssertionError("traced")


def values(tree):
    return jax.tree.map(np.asarray, tree)


def test_what_one_start_has_traced_the_next_one_does_not(tmp_path):
    first = LoweredStepCache(tmp_path, "static 1").step("decode", step, OPERANDS)
    found = LoweredStepCache(tmp_path, "static 1").step("decode", untraced, OPERANDS)
    want = values(step(*OPERANDS))
    for one in first, found:
        jax.tree.map(np.testing.assert_array_equal, values(jax.jit(one)(*OPERANDS)), want)
        # as the runner calls it, the state donated
        state = jax.tree.map(jnp.copy, OPERANDS[2])
        call = jax.jit(one, donate_argnums=2)
        got = call(OPERANDS[0], OPERANDS[1], state, OPERANDS[3])
        jax.tree.map(np.testing.assert_array_equal, values(got), want)
        assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state))


@pytest.mark.parametrize(
    ("static", "shape", "operands"),
    [
        ("static 2", "decode", OPERANDS),
        ("static 1", "mixed", OPERANDS),
        ("static 1", "decode", (OPERANDS[0], {}, OPERANDS[2], jnp.int32([5]))),
        ("static 1", "decode", (OPERANDS[0], {"c": jnp.zeros(1)}, *OPERANDS[2:])),
    ],
    ids=["static", "shape", "operand", "buffer"],
)
def test_another_step_is_not_found(tmp_path, static, shape, operands):
    LoweredStepCache(tmp_path, "static 1").step("decode", step, OPERANDS)
    with pytest.raises(AssertionError, match="traced"):
        LoweredStepCache(tmp_path, static).step(shape, untraced, operands)


@pytest.mark.parametrize("changed", ["source_digest", "option"])
def test_another_environment_finds_nothing(tmp_path, monkeypatch, changed):
    LoweredStepCache(tmp_path, "").step("decode", step, OPERANDS)
    if changed == "option":
        with jax.enable_x64(True), pytest.raises(AssertionError, match="traced"):
            LoweredStepCache(tmp_path, "").step("decode", untraced, OPERANDS)
        return
    monkeypatch.setattr(module, changed, lambda: "another")
    with pytest.raises(AssertionError, match="traced"):
        LoweredStepCache(tmp_path, "").step("decode", untraced, OPERANDS)


def test_sources_are_told_by_what_is_in_them(tmp_path, monkeypatch):
    package = tmp_path / "some_package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "part.py").write_text("a = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(module, "SOURCES", ("some_package",))
    found = [module.source_digest()]
    (package / "part.py").write_text("a = 2\n")
    found.append(module.source_digest())
    (package / "part.py").rename(package / "other.py")
    found.append(module.source_digest())
    assert len(set(found)) == 3


def test_a_torn_file_is_told_and_replaced(tmp_path, caplog):
    LoweredStepCache(tmp_path, "").step("decode", step, OPERANDS)
    (path,) = (tmp_path / "steps").glob("*.step")
    assert STEPS.entries.fullmatch(path.name), "what is cleared is named so"
    assert own_folder.is_own(path.parent)
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    LoweredStepCache(tmp_path, "").step("decode", step, OPERANDS)
    assert "an unreadable step" in caplog.text
    LoweredStepCache(tmp_path, "").step("decode", untraced, OPERANDS)


def test_what_export_refuses_is_traced_as_ever_and_told(tmp_path, caplog):
    def calls_back(leaves, buffers, state, blob):
        seen = jax.pure_callback(lambda x: x, jax.ShapeDtypeStruct((), jnp.int32), blob)
        return step(leaves, buffers, state, seen)

    found = LoweredStepCache(tmp_path, "").step("decode", calls_back, OPERANDS)
    assert found is calls_back and "a step is not kept" in caplog.text
    assert not list((tmp_path / "steps").glob("*.step"))


def test_a_folder_that_cannot_be_written_is_told(tmp_path, caplog):
    kept = LoweredStepCache(tmp_path, "")
    shutil.rmtree(tmp_path / "steps")
    kept.step("decode", step, OPERANDS)
    assert "cannot be kept" in caplog.text


def test_where_nothing_is_kept_the_log_says_why(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    mesh = Mesh(np.array(jax.devices()[:1]), ("model",))
    assert isinstance(
        lowered_step_cache(tmp_path, mesh, "static", [Bias.__module__]), LoweredStepCache
    )
    assert lowered_step_cache(None, mesh, "", ()) is None
    assert "there is no compilation cache" in caplog.text
    assert lowered_step_cache(tmp_path, mesh, "", (Bias.__module__, Own.__module__)) is None
    assert (
        "are made by tests.jaxserve.compilation.test_lowered_step_cache, whose sources"
        in caplog.text
    )


@pytest.mark.slow
def test_an_engine_that_traced_nothing_gives_the_same_tokens(model_folder, tmp_path):
    environment = {**os.environ, "JAX_COMPILATION_CACHE_DIR": str(tmp_path)}

    def start(how):
        words = "-c", ENGINE, str(model_folder("llama_gqa")), how
        traced, tokens = output_of(*words, env=environment).split(maxsplit=1)
        return int(traced), tokens

    plain, first, second = (start(how) for how in ("plain", "kept", "kept"))
    assert plain[0] >= 2 and first[0] >= 2 and second[0] == 0
    assert plain[1] == first[1] == second[1]
