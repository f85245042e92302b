"""Models with quantised weights: logits equal those of the floats that the weights stand for."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from checkpoints import CheckpointError, TensorMismatchError
from jaxserve.models import Model, load_model
from jaxserve.models.config_reader import read_model_config
from jaxserve.models.linear import LinearForm, dequantized_bytes
from jaxserve.models.quant_array import QuantArray
from jaxserve.parallel import make_mesh
from pallas_kernels import native, quantize_fp8, quantize_int4, quantize_int8
from pallas_kernels.linear import linear as plain_linear
from pallas_kernels.linear.xla import rms_norm
from pallas_kernels.quantized_matmul import dequantize
from tests.jaxserve.models.dense import empty_cache, run
from tests.jaxserve.models.gguf_models import as_gguf
from tests.quantized_models import CASES, FP8, INPUT_SCALE, fp8, quantize_folder

TOKENS = np.arange(3, 11)
SIZES = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32, "num_hidden_layers": 2}
# 256 inputs everywhere, what Q4_K's blocks need
GGUF_SIZES = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "num_hidden_layers": 1}
needs_native = pytest.mark.skipif(
    not native.availability().available, reason=native.availability().reason
)
BACKENDS = ["xla", pytest.param("native", marks=needs_native)]
# without a product of their own outside of the native kernels: 8 bits and a scale a row
NOT_IN_XLA = ("gptq-8", "w8a16-groups", "w8a8-zeros", "fp8-block")


def load(folder: Path, backend: str = "xla", dtype: str = "float32", **form: str) -> Model:
    config = read_model_config(folder)
    options = LinearForm(backend, **form)  # type: ignore[arg-type]
    return load_model(folder, config, mesh=make_mesh(1), dtype=dtype, form=options)


def logits(model: Model, dtype: str = "float32") -> np.ndarray:
    cache = empty_cache(model.config, len(TOKENS), dtype)
    return np.asarray(run(model, TOKENS, cache, 0)[0])


def error(found: np.ndarray, wanted: np.ndarray) -> float:
    return float(np.std(found - wanted) / np.std(wanted))


def quantized_places(model: Model) -> dict[str, QuantArray]:
    flat = nnx.to_flat_state(nnx.state(model, nnx.Param))
    values = {".".join(map(str, place)): variable.get_value() for place, variable in flat}
    return {place: value for place, value in values.items() if isinstance(value, QuantArray)}


# one case of each format, with the kernels that compile fastest
QUICK = ("awq", "gptq", "w4a16", "w8a16", "w8a8", "fp8-rows", "fp8-block")


def formats() -> Iterator[Any]:
    """Cases and backends."""
    for case in CASES:
        if "static" not in case:
            yield pytest.param(case, "xla", marks=[] if case == "awq" else pytest.mark.slow)
            slow = [] if case in QUICK else [pytest.mark.slow]
            yield pytest.param(case, "native", marks=[needs_native, *slow])


@pytest.mark.parametrize(("case", "backend"), list(formats()))
def test_every_format(
    model_folder: Callable[..., Path], tmp_path: Path, case: str, backend: str
) -> None:
    config, pack = CASES[case]
    base = model_folder("llama_biases", **SIZES | {"num_hidden_layers": 1})
    stored, floats = quantize_folder(base, tmp_path, config, lambda module: pack)
    model = load(stored, backend)
    assert len(quantized_places(model)) == (2 if case == "gptq-orders" else 4)
    found, wanted = logits(model), logits(load(floats))
    # rounded rows, by the checkpoint's wish, or a format that this device has no product for
    if case == "w8a8" or (backend == "xla" and case in NOT_IN_XLA):
        assert 1e-4 < error(found, wanted) < 0.06
    else:
        assert error(found, wanted) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("case", ["awq", "gptq", "w4a16"])
def test_scales_of_16_bits_stay_so_on_a_gpu(
    model_folder: Callable[..., Path], tmp_path: Path, case: str
) -> None:
    """With the names of a GPU's kernels; XLA multiplies."""
    config, pack = CASES[case]
    base = model_folder("llama_biases", **SIZES | {"num_hidden_layers": 1})
    stored, floats = quantize_folder(base, tmp_path, config, lambda module: pack)
    model = load(stored, matmul=("triton", "xla"))
    assert {one.scale.dtype.name for one in quantized_places(model).values()} == {"float16"}
    for module in nnx.iter_modules(model):
        if hasattr(module[1], "matmul"):
            module[1].matmul = ("xla",)
    assert error(logits(model), logits(load(floats))) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("case", ["llama_biases", "qwen3_moe"])
def test_e4m3_by_block_stays_so_on_a_gpu(
    model_folder: Callable[..., Path], tmp_path: Path, case: str
) -> None:
    """With the names of a GPU's kernels; XLA multiplies."""
    sizes = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64, "num_hidden_layers": 2}
    experts = {"moe_intermediate_size": 128} if case == "qwen3_moe" else {}
    base = model_folder(case, **sizes, **experts)
    config = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
    config |= {"weight_block_size": [32, 128]}
    pack = fp8("weight_scale_inv", (32, 128))
    stored, floats = quantize_folder(base, tmp_path, config, lambda module: pack)
    model = load(stored, matmul=("triton", "xla"))
    places = quantized_places(model)
    assert {(one.format.stored.kind, one.format.stored.group) for one in places.values()} == {
        ("fp8", 128)
    }
    for module in nnx.iter_modules(model):
        if hasattr(module[1], "matmul"):
            module[1].matmul = ("xla",)
    assert error(logits(model), logits(load(floats))) < 1e-5


def fake_quantized(x: jax.Array, kind: str) -> jax.Array:
    """x rounded with the static scale, and back, by the definition of compressed-tensors."""
    wide = np.asarray(x, np.float32) / np.float32(INPUT_SCALE)
    if kind == "fp8":
        rounded = np.clip(wide, -448, 448).astype(FP8).astype(np.float32)
    else:
        rounded = np.clip(np.rint(wide), -128, 127)
    return jnp.asarray(rounded * np.float32(INPUT_SCALE), x.dtype)


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", [c for c in CASES if "static" in c])
def test_static_scales_of_activations(
    model_folder: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    case: str,
    backend: str,
) -> None:
    """The logits are those of dequantised weights behind activations that were rounded so."""
    config, pack = CASES[case]
    base = model_folder("llama_biases", **SIZES | {"num_hidden_layers": 1})
    stored, floats = quantize_folder(base, tmp_path, config, lambda module: pack)
    found, reference = logits(load(stored, backend)), load(floats)
    plain = logits(reference)
    kind, vocabulary = "fp8" if "fp8" in case else "int8", reference.config.vocab_size

    def rounded(x, weight, *, norm=None, **rest):  # type: ignore[no-untyped-def]
        if weight.shape[0] != vocabulary:
            x, norm = x if norm is None else rms_norm(x, norm), None
            x = fake_quantized(x, kind)
        return plain_linear(x, weight, norm=norm, **rest)

    monkeypatch.setattr("jaxserve.models.linear.linear", rounded)
    with jax.disable_jit():
        wanted = logits(reference)
    assert error(wanted, plain) > 0.01
    # int8 by row stands for the zeros where XLA has no product with them
    close = 0.03 if case.endswith("zeros") and backend == "xla" else 1e-4
    assert error(found, wanted) < close


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "types",
    [
        pytest.param({"_proj": "Q4_K", "lm_head": "Q6_K", "embed": "Q4_K"}, marks=pytest.mark.slow),
        pytest.param({"_proj": "Q4_0", "lm_head": "Q8_0"}, marks=pytest.mark.slow),
        pytest.param({"v_proj": "Q6_K", "_proj": "Q5_K"}, marks=pytest.mark.slow),
        # what llama.cpp's quantiser falls back to: q, k and v are of one kind here
        pytest.param(
            {"v_proj": "Q8_0", "_proj": "Q5_0", "lm_head": "Q5_1"}, marks=pytest.mark.slow
        ),
        pytest.param({"self_attn": "Q2_K", "_proj": "Q3_K"}, marks=pytest.mark.slow),
        pytest.param({"self_attn": "IQ4_XS", "_proj": "IQ4_NL"}, marks=pytest.mark.slow),
        pytest.param({"": "F16"}, marks=pytest.mark.slow),
    ],
    ids=lambda types: "-".join(types.values()),
)
def test_gguf(
    model_folder: Callable[..., Path], tmp_path: Path, types: dict[str, str], backend: str
) -> None:
    base = model_folder("llama_gqa", **GGUF_SIZES)
    file, floats = as_gguf(base, tmp_path, types)
    found, wanted = (logits(load(path, backend)) for path in (file, floats))
    exact = backend == "native" or set(types.values()) <= {"Q4_0", "F16"}
    assert error(found, wanted) < (1e-5 if exact else 0.06)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["qwen2", "qwen3"])
def test_gguf_of_other_families(
    model_folder: Callable[..., Path], tmp_path: Path, case: str
) -> None:
    base = model_folder(case, **GGUF_SIZES | {"tie_word_embeddings": True})
    file, floats = as_gguf(base, tmp_path, {"_proj": "Q4_0"})
    assert error(logits(load(file)), logits(load(floats))) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("case", ["qwen3_moe", "mixtral"])
def test_gguf_with_experts(model_folder: Callable[..., Path], tmp_path: Path, case: str) -> None:
    inner = "moe_intermediate_size" if case == "qwen3_moe" else "intermediate_size"
    sizes = {"hidden_size": 64, inner: 32, "num_hidden_layers": 2}
    if case == "qwen3_moe":
        sizes |= {"decoder_sparse_step": 1, "mlp_only_layers": []}
    file, floats = as_gguf(model_folder(case, **sizes), tmp_path, {"_proj": "Q4_0", "w2": "F16"})
    assert error(logits(load(file)), logits(load(floats))) < 1e-5
    exact, _ = as_gguf(model_folder(case, **sizes), tmp_path / "f", {"": "F16"})
    assert error(logits(load(exact)), logits(load(tmp_path / "f" / "floats"))) < 1e-5


@pytest.mark.slow
def test_layers_of_different_schemes(
    model_folder: Callable[..., Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A layer that is left out, two schemes by targets, and a part of a fused weight."""
    four, pack_four = CASES["w4a16"]
    eight, pack_eight = CASES["fp8-rows"]
    groups = {
        "ints": four["config_groups"]["group_0"]
        | {"targets": ["re:.*self_attn.*"], "format": "pack-quantized"},
        "floats": eight["config_groups"]["group_0"]
        | {"targets": ["Linear"], "format": "float-quantized"},
    }
    config = four | {
        "config_groups": groups,
        "ignore": ["re:.*layers.1.*", "lm_head", "re:.*v_proj"],
    }

    def packer(module: str):
        if ".layers.1." in module or module.endswith("v_proj"):
            return None
        return pack_four if "self_attn" in module else pack_eight

    base = model_folder("llama_biases", **SIZES)
    stored, floats = quantize_folder(base, tmp_path, config, packer)
    with caplog.at_level(logging.WARNING):
        model = load(stored)
    kinds = {place: value.format.stored.kind for place, value in quantized_places(model).items()}
    assert kinds == {
        "blocks.0.attention.output.weight": "int4",
        "blocks.0.mlp.gate_up.weight": "fp8",
        "blocks.0.mlp.down.weight": "fp8",
    }
    assert "1 weights are stored otherwise than in the checkpoint, tensors of one" in caplog.text
    assert error(logits(model), logits(load(floats))) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", ["awq", "gptq", "w4a16", "w8a16", "fp8-rows", "gptq-act-order"])
def test_experts(
    model_folder: Callable[..., Path], tmp_path: Path, case: str, backend: str
) -> None:
    config, pack = CASES[case]
    base = model_folder("qwen3_moe", hidden_size=128, moe_intermediate_size=64)
    stored, floats = quantize_folder(
        base, tmp_path, config | {"modules_to_not_convert": ["layers.1"], "ignore": ["lm_head"]},
        lambda module: None if ".layers.1." in module else pack,
    )  # fmt: skip
    model = load(stored, backend)
    experts = quantized_places(model)["blocks.0.mlp.gate_up.weight"]
    exact = case != "gptq-act-order"  # in an order of their own they become 8 bits
    wanted = {"w8a16": "int8", "fp8-rows": "fp8"}.get(case, "int4" if exact else "int8")
    assert experts.format.stored.kind == wanted
    found = error(logits(model), logits(load(floats)))
    assert found < 1e-5 if exact else 1e-4 < found < 0.1


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("quantization", ["int8", "int4", "fp8"])
def test_weights_are_rounded_as_the_kernels_define(
    model_folder: Callable[..., Path], quantization: str, backend: str
) -> None:
    folder = model_folder("llama_tied", **SIZES | {"num_hidden_layers": 1})
    model = load(folder, backend, quantization=quantization)
    places = quantized_places(model)
    # only int8 rounds the head, which then is one of its own
    assert len(places) == 4 + (quantization == "int8")
    exact = load(folder).blocks[0].mlp.down.weight[...]
    define = {"int8": quantize_int8, "int4": quantize_int4, "fp8": quantize_fp8}[quantization]
    wanted = dequantize(define(exact), exact.shape[1])
    found = places["blocks.0.mlp.down.weight"].dequantize()
    np.testing.assert_allclose(found, wanted, rtol=1e-6, atol=1e-7)


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("quantization", ["int4", "fp8"])
def test_rounded_models(model_folder: Callable[..., Path], quantization: str, backend: str) -> None:
    folder = model_folder("llama_biases", **SIZES)
    exact = logits(load(folder))
    found = logits(load(folder, backend, quantization=quantization))
    # random weights without structure: the noise of the rounding is all that is bounded here
    assert 1e-3 < error(found, exact) < {"int4": 0.5, "fp8": 0.2}[quantization]
    narrow = logits(load(folder, backend, "bfloat16", quantization=quantization), "bfloat16")
    assert error(narrow, found) < 0.1


@pytest.mark.slow
def test_dummy_weights_have_their_spread(model_folder: Callable[..., Path]) -> None:
    folder = model_folder("llama_biases", **SIZES)
    config = read_model_config(folder)
    for quantization in ("int8", "int4", "fp8"):
        model = load_model(
            folder, config, mesh=make_mesh(1), load_format="dummy",
            form=LinearForm("xla", quantization),
        )  # fmt: skip
        for value in quantized_places(model).values():
            assert float(jnp.std(value.dequantize())) == pytest.approx(0.02, rel=0.06)


def test_a_model_keeps_nothing_of_a_checkpoint_that_fails(
    model_folder: Callable[..., Path], tmp_path: Path
) -> None:
    """The arrays that were made before the error are freed with it."""
    config, pack = CASES["awq"]
    base = model_folder("llama_biases", **SIZES)
    stored, _ = quantize_folder(base, tmp_path, config, lambda module: pack)
    tensors = load_file(stored / "model.safetensors")
    scales = tensors["model.layers.1.mlp.down_proj.scales"]
    scales[0, 0] = np.inf
    save_file(tensors, stored / "model.safetensors")
    before = len(jax.live_arrays())
    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.down_proj\.scales"):
        load(stored)
    assert len(jax.live_arrays()) == before


@pytest.mark.slow
def test_biases_of_zeros_that_a_model_has_no_place_for(
    model_folder: Callable[..., Path], tmp_path: Path
) -> None:
    config, pack = CASES["gptq"]
    base = model_folder("llama_tied", **SIZES | {"num_hidden_layers": 1})

    def bias(module: str) -> dict[str, np.ndarray]:
        outputs = {"gate_proj": 256, "up_proj": 256, "k_proj": 64, "v_proj": 64}
        size = outputs.get(module.rpartition(".")[2], 128)
        return {"bias": np.zeros(size, np.float16)}

    stored, _ = quantize_folder(base, tmp_path, config, lambda module: pack, bias)
    assert len(quantized_places(load(stored))) == 4
    tensors = load_file(stored / "model.safetensors")
    tensors["model.layers.0.self_attn.q_proj.bias"][3] = 1
    save_file(tensors, stored / "model.safetensors")
    with pytest.raises(TensorMismatchError, match=r"1 unexpected: .*q_proj\.bias"):
        load(stored)


@pytest.mark.filterwarnings("ignore:invalid value")
def test_floats_that_cannot_be_rounded(model_folder: Callable[..., Path], tmp_path: Path) -> None:
    folder = tmp_path / "m"
    shutil.copytree(model_folder("llama_tied", **SIZES | {"num_hidden_layers": 1}), folder)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.0.mlp.down_proj.weight"][3, 4] = np.nan
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"down_proj\.weight.*not all finite"):
        load(folder, quantization="int4")


def test_tensors_of_another_shape(model_folder: Callable[..., Path], tmp_path: Path) -> None:
    config, pack = CASES["awq"]
    base = model_folder("llama_biases", **SIZES)
    stored, _ = quantize_folder(base, tmp_path, config, lambda module: pack)
    file = stored / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"intermediate_size": 192}))
    with pytest.raises(TensorMismatchError, match=r"down_proj\.weight \(expected \[128, 192\]"):
        load(stored)


def test_the_largest_weight_of_4_bits_is_told_where_a_step_dequantises_it(
    model_folder: Callable[..., Path],
) -> None:
    model = load(model_folder("llama_tied", **SIZES), quantization="int4")
    largest = 2 * SIZES["intermediate_size"] * SIZES["hidden_size"]
    assert dequantized_bytes(model, ("triton", "xla"), 2) == 2 * largest
    assert dequantized_bytes(model, ("mosaic_tpu", "xla"), 2) == 0
    assert dequantized_bytes(load(model_folder("llama_tied", **SIZES)), ("triton",), 2) == 0
