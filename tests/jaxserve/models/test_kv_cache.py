"""The arrays and sizes of a KV cache, without an engine."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec
from safetensors.numpy import save_file

from checkpoints import CheckpointError
from jaxserve.models.config_reader import model_config_of
from jaxserve.models.known_shapes import SHAPES
from jaxserve.models.kv_cache import KVCache, KVFormat, KVPages, KVScales
from jaxserve.models.kv_scales import is_kv_scale, read_kv_scales
from pallas_kernels import Backends, KernelError, choose_backends, require_backend

XLA = Backends(decode="xla", prefill="xla", write_kv="xla", reason="portable")
LLAMA = model_config_of(dict(SHAPES["llama-3-8b"]))


def cache(kv_cache_dtype: str = "auto", dtype: str = "bfloat16", **changes: Any) -> KVCache:
    settings = {"platform": "cpu", "page_size": 16, **changes}
    return KVCache.of(LLAMA, KVFormat.of(kv_cache_dtype, dtype), XLA, **settings).with_pages(9)


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8", "fp8_e4m3", "fp8"])
def test_the_bytes_of_a_page_are_those_of_its_arrays(kv_cache_dtype) -> None:
    one = cache(kv_cache_dtype)
    size = sum(math.prod(s.shape) * s.dtype.itemsize for s in jax.tree.leaves(one.shapes()))
    assert size == 9 * one.page_bytes(shards=1) == 9 * 8 * one.page_bytes(shards=8)
    assert size == 9 * 16 * one.token_bytes


@pytest.mark.parametrize(("head_dim", "times"), [(64, 128 / 66), (128, 256 / 130)])
def test_an_8_bit_cache_holds_more_tokens_in_the_same_bytes(head_dim, times) -> None:
    model = model_config_of({**SHAPES["llama-3-8b"], "head_dim": head_dim})
    size = {
        name: KVCache.of(
            model, KVFormat.of(name, "bfloat16"), XLA, platform="cpu", page_size=16
        ).token_bytes
        for name in ("auto", "int8", "fp8_e4m3")
    }
    assert size["auto"] / size["int8"] == pytest.approx(times) and times >= 1.9
    assert size["auto"] / size["fp8_e4m3"] == 2


def test_arrays_are_divided_by_kv_heads_and_stored_as_bits_on_a_cpu() -> None:
    for kv_cache_dtype, stored in (("auto", "uint16"), ("int8", "int8"), ("fp8", "uint8")):
        one = cache(kv_cache_dtype)
        shapes, specs = one.shapes(), one.specs()
        assert shapes.pages.dtype == stored
        assert cache(kv_cache_dtype, platform="gpu").shapes().pages.dtype == one.format.dtype
        assert (shapes.k_scale is None) == (specs.k_scale is None) == (kv_cache_dtype != "int8")
        for shape, spec in zip(jax.tree.leaves(shapes), jax.tree.leaves(specs), strict=True):
            assert isinstance(spec, PartitionSpec)
            # the heads, or the heads and tokens of a page in one axis
            assert shape.shape[spec.index("model")] in (8, 8 * one.page_size)


def test_pages_leave_and_come_with_their_scales() -> None:
    rng = np.random.default_rng(0)
    shapes = cache("int8").with_pages(3).shapes()
    held = jax.tree.map(lambda s: jnp.asarray(rng.integers(0, 99, s.shape), s.dtype), shapes)
    places = held.of_layers(LLAMA.num_layers, jnp.array([2, 0]))
    assert places.shape == (LLAMA.num_layers, 2) and places[3].tolist() == [11, 9]
    moved = held.put(places[:, :1], held.take(places[:, 1:]))
    assert isinstance(moved, KVPages)
    for before, after in zip(held, moved, strict=True):
        np.testing.assert_array_equal(after[11], before[9])
        np.testing.assert_array_equal(after[10], before[10])


def test_static_scales_are_the_checkpoints_or_one() -> None:
    scales = KVScales((0.5,) * 32, (0.25,) * 32)
    assert cache("fp8", scales=scales).scales == scales
    assert "a scale a layer of the checkpoint" in str(cache("fp8", scales=scales))
    assert cache("fp8").scales == KVScales((1.0,) * 32, (1.0,) * 32)
    assert "a scale a layer of 1" in str(cache("fp8"))
    assert cache("int8").scales is cache("auto").scales is None
    assert "a scale a token and head" in str(cache("int8"))


@pytest.mark.parametrize(
    "module", ["{kind}_scale", "attn.{kind}_scale", "{kind}_proj.{kind}_scale"]
)
def test_scales_of_a_checkpoint(tmp_path, module) -> None:
    tensors = {
        f"model.layers.{layer}.self_attn.{module.format(kind=kind)}": np.array([layer + part], "f")
        for layer in range(2)
        for kind, part in (("k", 0.5), ("v", 0.25))
    }
    assert all(is_kv_scale(name) for name in tensors)
    assert not is_kv_scale("model.layers.0.self_attn.k_proj.weight_scale")
    file = tmp_path / "model.safetensors"
    save_file(tensors, file)
    assert read_kv_scales(tmp_path, 2) == KVScales((0.5, 1.5), (0.25, 1.25))
    with pytest.raises(CheckpointError, match=r"k_scale of layer 2, v_scale of layer 2"):
        read_kv_scales(tmp_path, 3)
    name = next(iter(tensors))
    save_file({**tensors, name: np.array([0.0], np.float32)}, file)
    with pytest.raises(CheckpointError, match="one positive number"):
        read_kv_scales(tmp_path, 2)
    save_file({"other": np.zeros(1, np.float32)}, file)
    assert read_kv_scales(tmp_path, 2) is None


@pytest.mark.parametrize(
    ("device", "platform", "kv_cache_dtype", "decode"),
    [
        ("NVIDIA H200", "gpu", "auto", "mosaic_gpu"),
        ("NVIDIA H200", "gpu", "int8", "triton"),
        ("NVIDIA H200", "gpu", "fp8", "mosaic_gpu"),
        ("NVIDIA A100", "gpu", "int8", "triton"),
        ("TPU v5e", "tpu", "int8", "mosaic_tpu"),
        ("TPU v5e", "tpu", "fp8", "mosaic_tpu"),
    ],
)
def test_each_device_has_kernels_for_it(device, platform, kv_cache_dtype, decode) -> None:
    format = KVFormat.of(kv_cache_dtype, "bfloat16")
    shape = format.attention_shape(LLAMA, "bfloat16", platform, 16, shards=1)
    chosen = choose_backends(device, platform, shape)
    assert (chosen.decode, chosen.prefill) == (decode, decode)
    # one kernel that attends and writes knows one scale for all
    assert (chosen.decode_and_write is None) == (platform == "gpu" or kv_cache_dtype == "int8")
    if decode == "triton" and "H200" in device:
        with pytest.raises(KernelError, match="k_scale=by token"):
            require_backend("decode", "mosaic_gpu", device, platform, shape)
