"""Kernels that move registers between warpgroups ask for no more than the launch owns."""

from __future__ import annotations

import jax.numpy as jnp
import pytest

from pallas_kernels import KernelError
from pallas_kernels.hopper.registers import RegisterSplit
from pallas_kernels.paged_attention.hopper.prefill import registers
from pallas_kernels.quantized_matmul.formats import quantize_int4
from pallas_kernels.quantized_matmul.mosaic_gpu_plan import plan_of
from pallas_kernels.quantized_matmul.operands import Operands


def test_a_sum_above_what_the_launch_owns_is_refused() -> None:
    """384 threads start with 168 registers each; the second consumer would wait for ever."""
    with pytest.raises(KernelError, match=r"2 \* 216 \+ 80 = 512.*at most 504"):
        RegisterSplit(consumers=2, consumer=216, producer=80)
    assert RegisterSplit(consumers=2, consumer=232, producer=40).owned == 504
    assert RegisterSplit(consumers=1, consumer=240, producer=240).owned == 512


@pytest.mark.parametrize(
    ("consumer", "producer", "field"),
    [(204, 88, "consumer"), (248, 8, "consumer"), (208, 16, "producer")],
)
def test_what_the_hardware_cannot_hand_over_is_refused(consumer, producer, field) -> None:
    with pytest.raises(KernelError) as caught:
        RegisterSplit(consumers=2, consumer=consumer, producer=producer)
    assert caught.value.field == f"registers.{field}"


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
def test_every_head_dim_of_prefill_has_a_split(head_dim) -> None:
    split = registers(head_dim)
    assert 2 * split.consumer + split.producer <= split.owned == 504


def test_products_that_move_registers_have_a_split() -> None:
    weight = quantize_int4(jnp.ones((256, 512), jnp.float32), group=128)
    few, many = (
        plan_of(Operands.of(jnp.ones((rows, 512), jnp.bfloat16), weight), None, staged=False)
        for rows in (8, 512)
    )
    assert few.registers is None
    assert many.registers is not None
    assert 2 * many.registers.consumer + many.registers.producer <= many.registers.owned
