"""The border between XLA and the C++ kernels: a call that does not fit is refused by name."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.pallas_kernels.native.requirements import require_native

require_native()

QKV = jnp.ones((3, 2, 4, 8), jnp.float32)  # [tokens, kv_heads, group + 2, head_dim]
ANGLES = jnp.zeros((3, 4), jnp.float32)
NO_NORM = jnp.zeros((0,), jnp.float32)
EPS, NO = np.float32(1e-6), np.bool_(False)
ATTRIBUTES = {"q_eps": EPS, "k_eps": EPS, "q_offset": NO, "k_offset": NO}


def rotate(*operands, **attributes):
    shapes = [(3, 2, 2, 8), (3, 2, 8), (3, 2, 8)]
    results = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    call = jax.ffi.ffi_call("jaxserve_split_rotate", results)
    return jax.block_until_ready(jax.jit(lambda *o: call(*o, **attributes))(*operands))


def test_a_call_that_fits_is_computed():
    queries, _, _ = rotate(QKV, ANGLES + jnp.pi, ANGLES, NO_NORM, NO_NORM, **ATTRIBUTES)
    np.testing.assert_allclose(queries, np.full((3, 2, 2, 8), np.pi), rtol=1e-6)


@pytest.mark.parametrize(
    ("operands", "attributes", "message"),
    [
        ((QKV, ANGLES.astype(jnp.int32), ANGLES, NO_NORM, NO_NORM), {}, "of another type"),
        ((QKV, ANGLES, ANGLES, NO_NORM), {}, "operand or result is missing"),
        ((QKV, ANGLES, ANGLES, NO_NORM, NO_NORM, NO_NORM), {}, "more operands or results"),
        ((QKV, ANGLES, ANGLES, NO_NORM, NO_NORM), {"k_eps": np.int64(1)}, "attribute"),
        ((QKV[0], ANGLES, ANGLES, NO_NORM, NO_NORM), {}, "qkv must be"),
    ],
)
def test_a_call_that_does_not_fit_is_refused(operands, attributes, message):
    with pytest.raises(jax.errors.JaxRuntimeError, match=message):
        rotate(*operands, **ATTRIBUTES | attributes)
