"""The form of stored weights on each kind of device, without any weights."""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import jax
import pytest
from jax.sharding import AbstractMesh

from checkpoints.quantized import Encoding
from jaxserve.errors import ValidationError
from jaxserve.models.config_reader import model_config_of
from jaxserve.models.linear import LinearForm
from jaxserve.models.quant_array import QuantArray
from jaxserve.models.weight_plan import (
    device_format,
    multiplies_integers,
    online_quantization,
    online_stored,
    plan_weights,
)
from jaxserve.parallel.sharding import ShardingRules

CPU = LinearForm("native")
HOPPER = LinearForm("gpu", matmul=("mosaic_gpu", "triton", "xla"))
AMPERE = LinearForm("gpu", matmul=("triton", "xla"))
AWQ = Encoding("int4", 128, "integer")
HALF = replace(AWQ, scales="float16")
STATIC = Encoding("int8", activations="int8", static=True)
FP8_BLOCKS = Encoding("fp8", 128, activations="fp8")


@pytest.mark.parametrize(
    ("form", "dtype", "stored", "kept"),
    [
        (CPU, "bfloat16", AWQ, Encoding("int4", 128, "offset", "int8")),
        (CPU, "float32", AWQ, Encoding("int4", 128, "offset", "float")),
        (CPU, "bfloat16", HALF, Encoding("int4", 128, "offset", "int8")),
        (HOPPER, "bfloat16", AWQ, AWQ),
        (HOPPER, "bfloat16", HALF, HALF),
        (LinearForm("xla"), "bfloat16", HALF, AWQ),
        (AMPERE, "bfloat16", Encoding("int8", scales="bfloat16"), Encoding("int8")),
        (AMPERE, "float16", Encoding("int4", 32, "offset"), Encoding("int8")),
        (CPU, "bfloat16", Encoding("int8", 16), Encoding("int8", 16, activations="int8")),
        (CPU, "bfloat16", Encoding("int8", 32), Encoding("int8", 32, activations="int8")),
        (AMPERE, "bfloat16", Encoding("int8", 32), Encoding("int8")),
        (AMPERE, "bfloat16", Encoding("int8"), Encoding("int8")),
        (CPU, "bfloat16", Encoding("int8"), Encoding("int8")),
        (CPU, "bfloat16", Encoding("fp8", activations="fp8"), Encoding("fp8")),
        (
            HOPPER,
            "bfloat16",
            Encoding("fp8", activations="fp8"),
            Encoding("fp8", activations="fp8"),
        ),
        (AMPERE, "bfloat16", Encoding("fp8", activations="fp8"), Encoding("fp8")),
        (HOPPER, "bfloat16", FP8_BLOCKS, FP8_BLOCKS),
        (AMPERE, "bfloat16", FP8_BLOCKS, Encoding("fp8", 128)),
        (HOPPER, "bfloat16", replace(FP8_BLOCKS, group=64), Encoding("int8")),
        (LinearForm("xla"), "bfloat16", FP8_BLOCKS, Encoding("int8")),
        (CPU, "bfloat16", FP8_BLOCKS, Encoding("fp8", 128)),
        (CPU, "bfloat16", STATIC, STATIC),
        (HOPPER, "bfloat16", STATIC, STATIC),
        (AMPERE, "bfloat16", replace(STATIC, zeros="integer"), STATIC),
        (AMPERE, "bfloat16", replace(STATIC, kind="fp8"), replace(STATIC, kind="fp8")),
    ],
)
def test_device_formats(form: LinearForm, dtype: str, stored: Encoding, kept: Encoding) -> None:
    format = device_format(stored, "linear", form, dtype, 1024, 64)
    if stored.kind == "fp8" and form is CPU and not stored.static:
        assert format.stored.activations == "float"
    wanted = kept
    assert (format.stored, format.native) == (wanted, form is CPU)


@pytest.mark.parametrize(
    ("kinds", "dtype", "wanted"),
    [
        ((), "bfloat16", False),
        ((AWQ,), "bfloat16", True),
        ((AWQ,), "float32", False),
        ((AWQ, Encoding("int8", 32)), "bfloat16", True),
        ((Encoding("int8", activations="int8"),), "float32", True),
        ((Encoding("int8"),), "bfloat16", False),
        ((STATIC,), "bfloat16", False),
        ((Encoding("int8", zeros="integer", activations="int8"),), "bfloat16", False),
        ((AWQ, Encoding("fp8")), "bfloat16", False),
    ],
)
def test_which_checkpoints_are_products_of_integers(
    kinds: tuple[Encoding, ...], dtype: str, wanted: bool
) -> None:
    """Those that `device_format` keeps with rounded activations."""
    matrices = {str(number): SimpleNamespace(stored=kind) for number, kind in enumerate(kinds)}
    checkpoint: Any = SimpleNamespace(matrices=matrices)
    assert multiplies_integers(None, checkpoint, dtype) is (wanted if kinds else None)
    kept = [device_format(kind, "linear", CPU, dtype, 1024, 64).stored for kind in kinds]
    rounded = bool(kept) and all(k.activations == "int8" and not k.static for k in kept)
    assert rounded == wanted
    online = {None: None, "int8": True, "int4": dtype != "float32", "fp8": False}
    assert {name: multiplies_integers(name, None, dtype) for name in online} == online


@pytest.mark.parametrize(
    ("form", "stored", "told"),
    [
        (CPU, Encoding("fp8", activations="fp8"), "8 weights are made for activations .* to fp8"),
        (AMPERE, Encoding("fp8", activations="fp8"), "8 weights are made for activations"),
        (HOPPER, Encoding("fp8", activations="fp8"), None),
        (CPU, Encoding("int8", None, "integer", "int8"), "8 weights .* rounded to int8 token"),
        (CPU, Encoding("int8", activations="int8"), None),
        (CPU, AWQ, None),
    ],
)
def test_activations_that_are_not_rounded_are_told_in_one_line(
    form: LinearForm, stored: Encoding, told: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    config = model_config_of(
        {
            "architectures": ["LlamaForCausalLM"],
            "vocab_size": 64,
            "hidden_size": 128,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
        }
    )
    matrices: dict[str, Any] = defaultdict(lambda: SimpleNamespace(stored=stored))
    matrices["lm_head.weight"] = None
    checkpoint: Any = SimpleNamespace(matrices=_Any(matrices))
    plan_weights(config, form, "bfloat16", checkpoint)
    lines = [r.getMessage() for r in caplog.records if "weights are made for" in r.getMessage()]
    assert len(lines) == (told is not None)
    assert told is None or re.search(told, lines[0])


class _Any:
    """A mapping that has every name."""

    def __init__(self, values: dict[str, Any]):
        self.get = values.__getitem__


def test_experts_are_kept_as_other_weights_are() -> None:
    for form in (CPU, HOPPER, AMPERE):
        for stored in (AWQ, Encoding("int8", 32), Encoding("fp8", activations="fp8")):
            kept = device_format(stored, "experts", form, "bfloat16", 1024, 64)
            assert kept == device_format(stored, "linear", form, "bfloat16", 1024, 64)
    rounded = Encoding("int8", activations="int8")
    assert device_format(AWQ, "experts", CPU, "bfloat16", 1024, 24).stored == rounded
    ordered = replace(AWQ, ordered=True)
    assert device_format(ordered, "experts", HOPPER, "bfloat16", 1024, 64).stored == rounded


def test_groups_of_rounded_weights_divide_the_inputs() -> None:
    assert online_stored("int4", 1024).group == 128
    assert online_stored("int4", 1024 + 64).group == 64
    assert online_stored("int4", 1024 + 32).group == 32
    assert online_stored("int4", 1000).group is None


@pytest.mark.parametrize(
    ("asked", "found", "result"),
    [
        (None, None, None),
        ("int4", None, "int4"),
        ("fp8", None, "fp8"),
        (None, "awq", None),
        ("awq", "awq", None),
        ("fp8", "fp8", None),
    ],
)
def test_a_flag_and_a_checkpoint_that_agree(
    asked: str | None, found: str | None, result: str | None
) -> None:
    assert online_quantization(asked, found) == result


@pytest.mark.parametrize(
    ("asked", "found", "allowed"),
    [
        ("awq", None, "int8, int4, fp8 or none: the checkpoint is not quantised"),
        ("int8", "awq", "awq, or left out"),
        ("gptq", "awq", "awq, or left out"),
        ("fp8", "gguf", "gguf, or left out"),
    ],
)
def test_a_flag_and_a_checkpoint_that_contradict(
    asked: str, found: str | None, allowed: str
) -> None:
    with pytest.raises(ValidationError, match=f"quantization='{asked}'.*{allowed}"):
        online_quantization(asked, found)


def test_every_array_of_a_weight_is_divided() -> None:
    """Over two devices; native kernels run on one alone."""

    class Variable:
        def get_metadata(self, name: str) -> tuple[str | None, ...]:
            return ("hidden", "intermediate")

        def get_value(self) -> QuantArray:
            format = device_format(AWQ, "linear", HOPPER, "bfloat16", 768, 64)
            return jax.eval_shape(lambda: QuantArray.empty((64, 768), format))

    rules, mesh = ShardingRules(), AbstractMesh((1, 2), ("data", "model"))
    found = rules.shardings(mesh, Variable())
    specs = [tuple(array.spec) for array in (found.values, found.scale, found.zero)]
    assert specs == [(None, "model"), ("model", None), ("model", None)]
