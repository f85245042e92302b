"""What is decided before weights are spread over devices: copies of KV heads, parts of 4 bits."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, ClassVar

import jax
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AbstractMesh, AxisType, Mesh

from benchmarks.model_shapes import SHAPES
from checkpoints import CheckpointError
from checkpoints.quantized import Encoding
from checkpoints.safetensors_reader import SafetensorsReader
from jaxserve.errors import ValidationError
from jaxserve.models import quantize, store
from jaxserve.models.config_reader import model_config_of, read_model_config
from jaxserve.models.export import tensors_of
from jaxserve.models.linear import LinearForm
from jaxserve.models.quant_array import QuantArray, WeightFormat
from jaxserve.models.sources import Part, Source
from jaxserve.models.weights import abstract_model, opened_model
from jaxserve.parallel import make_mesh
from pallas_kernels.native.weights import pack_native

SHAPE = {**SHAPES["llama-1b"], "num_hidden_layers": 1, "vocab_size": 64}
INT4 = WeightFormat(Encoding("int4", 128), native=False)


def abstract_mesh(size: int) -> Any:
    return AbstractMesh((1, size), ("data", "model"), axis_types=(AxisType.Auto,) * 2)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "devices", "wanted"),
    [
        (32, 4, 8, (8, 2)),  # Qwen3-30B-A3B
        (32, 4, 4, (4, 1)),
        (32, 4, 2, (4, 1)),
        (32, 1, 16, (16, 16)),
        (40, 10, 8, (10, 1)),  # Phi-3-medium: refused
        (12, 4, 8, (4, 1)),  # its query heads do not divide: refused
    ],
)
def test_key_value_heads_are_repeated_for_a_multiple_of_devices(
    heads: int, kv_heads: int, devices: int, wanted: tuple[int, int]
) -> None:
    sizes = {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": 8}
    config = model_config_of({**SHAPE, **sizes}).spread_over(devices)
    assert (config.num_kv_heads, config.kv_copies) == wanted


def test_copies_take_the_same_rows_and_are_written_once() -> None:
    """Of two heads q has four, in order; k is there twice a head."""
    tensors = {"q": np.arange(16).reshape(8, 2), "k": 100 + np.arange(8).reshape(4, 2)}

    class Reader:
        def read_into(self, name: str, index: tuple[slice, ...], out: np.ndarray) -> None:
            out[...] = tensors[name][index].reshape(out.shape)

    source = Source((Part("q", 2), Part("k", 2, copies=2)))
    shape = (4, 4, 2)
    assert source.tensors(shape, True) == {"q": (8, 2), "k": (4, 2)}
    reader: Any = Reader()
    whole = (slice(None),) * 3
    value = source.read(reader, shape, whole, np.dtype(np.int64), True)
    assert (value[:, :2].reshape(8, 2) == tensors["q"]).all()
    assert (value[:, 2:] == tensors["k"].reshape(2, 2, 2)[[0, 0, 1, 1]]).all()
    for device in range(4):
        own = (slice(device, device + 1), *whole[1:])
        part = source.read(reader, shape, own, np.dtype(np.int64), True)
        assert (part == value[own]).all()
    written = tensors_of(source, value, True)
    assert all((written[name] == tensors[name]).all() for name in tensors)


@pytest.mark.parametrize(
    ("inputs", "parts"),
    [(3072, 8), *(pytest.param(*case, marks=pytest.mark.slow) for case in ((2048, 1), (1024, 8)))],
)
def test_parts_that_are_no_whole_blocks_are_packed_apart(inputs: int, parts: int) -> None:
    format = INT4.divided(inputs, 8)
    assert format.parts == parts
    elements = np.random.default_rng(0).integers(0, 16, (4, inputs)).astype(np.uint8)
    kept, _ = format.as_kept(elements, np.ones((4, inputs // 128), np.float32), None)
    assert kept.shape == format.values_shape((4, inputs))
    array = replace(QuantArray.empty((4, inputs), format), values=jax.numpy.asarray(kept))
    assert (array.stored_arrays()[0] == elements).all()
    array = array.with_arrays(array.values, np.ones((4, inputs // 128), np.float32), *(None,) * 3)
    assert (np.asarray(array.dequantize()) == elements - 8.0).all()


@pytest.mark.parametrize(("inputs", "devices"), [(29568, 8), (1152, 8), (96, 2)])
def test_a_group_on_two_devices_is_refused(inputs: int, devices: int) -> None:
    """The first is Qwen2.5-72B's MLP."""
    with pytest.raises(ValidationError, match=rf"{inputs} inputs .* groups of 128") as caught:
        INT4.divided(inputs, devices)
    assert (caught.value.field, caught.value.value) == ("tensor_parallel_size", devices)
    assert WeightFormat(Encoding("int8"), native=False).divided(inputs, devices).parts == 1


def test_a_model_whose_groups_do_not_divide_is_refused_before_it_is_loaded() -> None:
    config = model_config_of({**SHAPE, "intermediate_size": 320})
    form = LinearForm(quantization="int4")
    with pytest.raises(
        ValidationError, match=r"320 inputs of int4 weights into whole groups of 64"
    ) as one:
        abstract_model(config, abstract_mesh(2), "float32", form)
    assert one.value.field == "tensor_parallel_size"


@pytest.mark.parametrize(
    ("parts", "problem"),
    [(2, "packed for 2 devices, not 1"), (1, r"\.scale.*in another order than kernels read")],
)
def test_a_store_of_another_form_is_refused(
    tmp_path: Path, monkeypatch: Any, parts: int, problem: str
) -> None:
    """Packed for other devices, or by a version that kept scales in the order of the axes."""
    config = model_config_of(SHAPE)
    mesh = Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("data", "model"))
    model = abstract_model(config, mesh, "float32", LinearForm(quantization="int4"))
    formats = {
        ".".join(map(str, place)): value.format
        for place, variable in nnx.to_flat_state(nnx.split(model)[1])
        if isinstance(value := variable.get_value(), QuantArray)
    }

    class Record:
        about: ClassVar[dict[str, Any]] = {
            "architecture": config.architecture,
            "weights": {
                name: {"stored": asdict(format.stored), "native": False, "parts": parts}
                for name, format in formats.items()
            },
        }

        def leaves(self) -> dict[str, Any]:
            return {}

    monkeypatch.setattr(store, "read_record", lambda path: Record())
    with pytest.raises(CheckpointError, match=problem):
        store.restore_model(tmp_path, model, lambda done, total: None)


@pytest.mark.parametrize(("words", "refused"), [(192, True), (256, False)])
def test_a_tpu_refuses_a_store_of_experts_that_are_not_filled_up(
    tmp_path: Path, monkeypatch: Any, words: int, refused: bool
) -> None:
    """Its kernel would not take them, and XLA would dequantise every expert at every step."""
    name = "blocks.0.mlp.down.weight"
    format = WeightFormat(Encoding("int4", 64), native=False, experts=True)

    class Record:
        about: ClassVar[dict[str, Any]] = {"weights": {name: asdict(format)}}

        def leaves(self) -> dict[str, Any]:
            return {f"{name}.values": jax.ShapeDtypeStruct((2, 128, words), "uint16")}

    monkeypatch.setattr(store, "read_record", lambda path: Record())
    assert store.stored_plan(tmp_path, LinearForm(experts="triton"))
    if not refused:
        assert store.stored_plan(tmp_path, LinearForm(experts="mosaic_tpu"))
        return
    with pytest.raises(CheckpointError, match=f"{name}.*rows of 192 words.*multiple of 128"):
        store.stored_plan(tmp_path, LinearForm(experts="mosaic_tpu"))


@pytest.mark.parametrize("kind", ["int4", "fp8"])
def test_parts_of_native_blocks_are_the_blocks_of_parts(kind: str) -> None:
    """So that each device has what its kernels would have made of its part of the weight."""
    format = WeightFormat(Encoding(kind, 32), native=True)
    elements = np.random.default_rng(0).integers(0, 16, (64, 128)).astype(np.uint8)
    kept = pack_native(elements, kind == "int4")
    by_inputs = format.divided(128, 4)
    for part, own in enumerate(np.split(kept, 4, axis=1)):
        inputs = slice(32 * part, 32 * (part + 1))
        assert (own == pack_native(elements[:, inputs], kind == "int4")).all()
    by_outputs = format.with_divided_outputs(64, 4, experts=False)
    for part, own in enumerate(np.split(kept, 4)):
        assert (own == pack_native(elements[16 * part : 16 * (part + 1)], kind == "int4")).all()
    assert by_inputs == by_outputs == format
    axes = ("kv_heads", None, "hidden")
    assert QuantArray.empty((2, 32, 128), format).leaf_axes(axes)[0] == ("kv_heads", "hidden")
    # experts are divided one by one
    experts = format.with_divided_outputs(32, 2, experts=True)
    array = QuantArray.empty((2, 32, 128), experts)
    assert array.values.shape == (2, *kept[:2].shape)
    assert array.leaf_axes((None, "intermediate", "hidden"))[0] == (None, "intermediate", "hidden")
    array = replace(array, values=jax.numpy.asarray(kept.reshape(array.values.shape)))
    stored = array.stored_arrays()[0].view(np.uint8)
    assert (stored.reshape(elements.shape) == elements).all()


def test_a_block_on_two_devices_is_refused() -> None:
    native = WeightFormat(Encoding("int4"), native=True)
    for call in (
        lambda: native.divided(24, 2),
        lambda: native.with_divided_outputs(48, 2, experts=False),
    ):
        with pytest.raises(ValidationError, match="xla where tensor_parallel_size is 2") as caught:
            call()
        assert (caught.value.field, caught.value.value) == ("linear_backend", "native")
    assert native.divided(32, 2) == native


ALL = slice(None)


@pytest.mark.slow
@pytest.mark.parametrize("native", [False, True])
def test_parts_of_other_processes_are_not_read(
    native: bool, model_folder: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of a projection, inputs of one, and both of experts, of float32 files."""
    sizes = {"num_hidden_layers": 1, "vocab_size": 64, "num_key_value_heads": 4}
    dense = model_folder("llama_gqa", intermediate_size=4096, **sizes)
    more = {
        "num_experts": 2,
        "num_experts_per_tok": 1,
        "moe_intermediate_size": 4096,
        "mlp_only_layers": [],
    }
    sparse = model_folder("qwen3_moe", **more, **sizes)
    counted = SafetensorsReader._read_at
    count = [0]

    def read_at(self: Any, handle: Any, offset: int, place: memoryview) -> int:
        count[0] += len(place)
        return counted(self, handle, offset, place)

    monkeypatch.setattr(SafetensorsReader, "_read_at", read_at)
    own_part, form = quantize._own_part, LinearForm("native" if native else "xla", "int4")
    for folder, name, part in (
        (dense, "qkv", (slice(2, 4),)),
        (dense, "down", (ALL, slice(2048, 4096))),
        (sparse, "gate_up", (ALL, slice(4096, 8192), ALL)),
        (sparse, "down", (ALL, ALL, slice(2048, 4096))),
    ):
        config = read_model_config(folder)
        mesh = make_mesh()
        with opened_model(folder, config, mesh=mesh, dtype="float32", form=form) as (model, make):
            (item,) = (
                item
                for item in nnx.to_flat_state(nnx.split(model)[1])
                if name in item[0] and isinstance(item[1].get_value(), QuantArray)
            )
            count[0] = 0
            whole, every = make(*item).stored_arrays(), count[0]

            def own(wanted: QuantArray, part: tuple[slice, ...] = part) -> list[slice]:
                slices = zip((*part, *(ALL,) * 3), wanted.shape, strict=False)
                return [slice(*one.indices(size)[:2]) for one, size in slices]

            count[0] = 0
            with monkeypatch.context() as patch:
                patch.setattr(quantize, "_own_part", own)
                found = make(*item).stored_arrays()
            assert own_part(item[1].get_value()) == [slice(0, n) for n in item[1].get_value().shape]
        assert count[0] * 2 == every, name
        # a scale of each 128 inputs
        groups = tuple(slice(p.start // 128, p.stop // 128) if p != ALL else p for p in part[-1:])
        of_scales = (*part[:-1], *groups) if "down" in name else part
        assert (found[0][part] == whole[0][part]).all(), name
        assert (found[1][of_scales] == whole[1][of_scales]).all(), name
