"""Native linear layers with scales by groups of inputs, against the same product in float64."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels import KernelError, native
from pallas_kernels.linear import NativeWeight, Norm, linear
from pallas_kernels.native.weights import pack_native, unpack_native

needs_native = pytest.mark.skipif(
    not native.availability().available, reason=f"native kernels: {native.availability().reason}"
)
RNG = np.random.default_rng(0)


def weight_of(
    kind: str, outputs: int, inputs: int, group: int | None, offset: bool
) -> tuple[NativeWeight, np.ndarray]:
    """A random weight, and its values in float64."""
    groups = inputs // (group or inputs)
    scale = RNG.uniform(0.005, 0.02, (outputs, groups)).astype(np.float32)
    less = RNG.uniform(0.0, 0.1, (outputs, groups)).astype(np.float32) if offset else None
    if kind == "int4":
        elements = RNG.integers(0, 16, (outputs, inputs)).astype(np.uint8)
        stored, middle = pack_native(elements, nibbles=True), 0 if offset else 8
    elif kind == "int8":
        elements = RNG.integers(0, 256, (outputs, inputs)).astype(np.uint8)
        stored, middle = pack_native(elements, nibbles=False), 128
    else:
        elements = RNG.normal(0, 20, (outputs, inputs)).astype(ml_dtypes.float8_e4m3fn)
        stored, middle = pack_native(elements, nibbles=False), 0

    def spread(by_group: np.ndarray) -> np.ndarray:
        return np.repeat(by_group, inputs // groups, axis=1).astype(np.float64)

    values = (elements.astype(np.float64) - middle) * spread(scale)
    if less is not None:
        values -= spread(less)
    by_group = (scale.T, None if less is None else less.T)
    arrays = [None if x is None else jnp.asarray(x) for x in (stored, *by_group)]
    return NativeWeight(*arrays), values  # type: ignore[arg-type]


def test_elements_come_back() -> None:
    for outputs, inputs in ((16, 32), (3, 128), (40, 163)):
        for top, nibbles in ((16, True), (256, False)):
            elements = RNG.integers(0, top, (outputs, inputs)).astype(np.uint8)
            packed = pack_native(elements, nibbles)
            found = unpack_native(jnp.asarray(packed), outputs, inputs)
            np.testing.assert_array_equal(found, elements)


SHAPES = [
    # kind, outputs, inputs, group, offset
    ("int4", 37, 192, 64, True),
    ("int4", 16, 250, None, False),
    ("int8", 20, 192, 64, False),
    ("int8", 16, 72, None, True),
    ("fp8", 20, 128, 64, False),
    ("fp8", 37, 75, None, False),
]
MORE_SHAPES = [
    ("int4", 48, 256, 128, False),
    ("int4", 32, 160, 32, False),
    ("int4", 33, 96, 32, True),
    ("int8", 37, 96, 32, True),
    ("int8", 18, 64, 16, False),
]


@needs_native
@pytest.mark.parametrize(
    ("kind", "outputs", "inputs", "group", "offset"),
    [*SHAPES, *(pytest.param(*shape, marks=pytest.mark.slow) for shape in MORE_SHAPES)],
)
def test_products(kind: str, outputs: int, inputs: int, group: int | None, offset: bool) -> None:
    weight, values = weight_of(kind, outputs, inputs, group, offset)
    for rows in (1, 2, 3, 7, 9, 16, 35):
        x = RNG.normal(size=(rows, inputs)).astype(np.float32)
        wanted = x.astype(np.float64) @ values.T
        size = np.std(wanted)
        found = linear(jnp.asarray(x), weight, backend="native")
        np.testing.assert_allclose(found, wanted, atol=2e-5 * size)
        if kind == "fp8":
            with pytest.raises(KernelError, match="activations='int8'"):
                linear(jnp.asarray(x), weight, activations="int8", backend="native")
            continue
        # both integers: exactly the product with the rounded activations
        wide = x.reshape(rows, -1, group or inputs)
        largest = np.abs(wide).max(2, keepdims=True)
        steps = np.rint(wide * (np.float32(127) / largest)).astype(np.float64)
        rounded = (steps * largest.astype(np.float64) / 127).reshape(rows, inputs)
        found = linear(jnp.asarray(x), weight, activations="int8", backend="native")
        difference = np.abs(np.asarray(found) - rounded @ values.T)
        # a number in the middle between two steps may be rounded to either
        assert np.mean(difference > 1e-4 * size) < 0.2 and difference.max() < 0.02 * size
        assert np.std(np.asarray(found) - wanted) < 0.02 * size


@needs_native
@pytest.mark.parametrize(
    ("kind", "outputs", "inputs", "group"),
    [
        ("fp8", 37, 75, None),
        pytest.param("fp8", 20, 128, 64, marks=pytest.mark.slow),
        pytest.param("int8", 18, 72, None, marks=pytest.mark.slow),
        pytest.param("int8", 33, 96, 32, marks=pytest.mark.slow),
    ],
)
def test_bytes_times_bfloat16(kind: str, outputs: int, inputs: int, group: int | None) -> None:
    """Weights are rounded to bfloat16 at most; a row is the same whatever is beside it."""
    weight, values = weight_of(kind, outputs, inputs, group, False)
    x = jnp.asarray(RNG.normal(size=(35, inputs)), jnp.bfloat16)
    wanted = np.asarray(x, np.float64) @ values.T

    def product(rows: jax.Array, **options: bool) -> np.ndarray:
        return np.asarray(linear(rows, weight, out_dtype=jnp.float32, backend="native", **options))

    alone = np.concatenate([product(x[i : i + 1], row_invariant=True) for i in range(35)])
    for rows in (1, 2, 3, 7, 9, 16, 35):
        found = product(x[:rows])
        assert np.abs(found - wanted[:rows]).max() < 0.01 * np.std(wanted)
        np.testing.assert_array_equal(product(x[:rows], row_invariant=True), alone[:rows])


@needs_native
@pytest.mark.parametrize("kind", ["fp8", "int8"])
def test_every_byte_is_its_number_in_bfloat16(kind: str) -> None:
    """The smallest ones and both zeros of e4m3 too."""
    codes = np.arange(256, dtype=np.uint8).reshape(1, 256).repeat(3, axis=0)
    if kind == "fp8":
        codes[:, [127, 255]] = 0  # no numbers
        elements = codes.view(ml_dtypes.float8_e4m3fn)
        wanted = elements[0].astype(np.float32)
    else:
        elements, wanted = codes, codes[0].astype(np.float32) - 128
    stored = jnp.asarray(pack_native(elements, nibbles=False))
    weight = NativeWeight(stored, jnp.full((1, 3), 2.0))
    one_input = jnp.eye(256, dtype=jnp.bfloat16)
    found = np.asarray(linear(one_input, weight, out_dtype=jnp.float32, backend="native"))
    np.testing.assert_array_equal(found, np.repeat(2 * wanted[:, None], 3, axis=1))


@needs_native
@pytest.mark.parametrize("activations", ["float", "int8"])
@pytest.mark.parametrize("rows", [3, 21])
def test_what_stands_around_the_product(activations: str, rows: int) -> None:
    """Norm, bias, gate, residual and rows that do not count, in bfloat16."""
    weight, values = weight_of("int4", 66, 128, 32, True)
    x = jnp.asarray(RNG.normal(size=(rows, 128)), jnp.bfloat16)
    norm = Norm(jnp.asarray(RNG.normal(size=128), jnp.bfloat16), 1e-5)
    bias = jnp.asarray(RNG.normal(size=66), jnp.bfloat16)
    residual = jnp.asarray(RNG.normal(size=(rows, 33)), jnp.bfloat16)
    live = jnp.asarray([[0, 2], [rows - 1, rows]], jnp.int32)
    found = np.asarray(
        linear(
            x,
            weight,
            activations=activations,
            bias=bias,
            norm=norm,
            residual=residual,
            gated=True,
            live=live,
            backend="native",
        ),
        np.float64,
    )
    wide = np.asarray(x, np.float64)
    normed = wide / np.sqrt((wide**2).mean(1, keepdims=True) + 1e-5) * np.asarray(norm.weight)
    both = normed @ values.T + np.asarray(bias, np.float64)
    gate, up = both[:, ::2], both[:, 1::2]
    wanted = gate / (1 + np.exp(-gate)) * up + np.asarray(residual, np.float64)
    rows_that_count = [0, 1, rows - 1]
    difference = (found - wanted)[rows_that_count]
    assert np.std(difference) < 0.02 * np.std(wanted[rows_that_count])
    assert not found[2 : rows - 1].any()


@needs_native
def test_a_row_does_not_depend_on_the_rows_beside_it() -> None:
    weight, _ = weight_of("int4", 48, 256, 64, False)
    x = jnp.asarray(RNG.normal(size=(8, 256)), jnp.bfloat16)
    whole = linear(x, weight, activations="int8", backend="native")
    for row in range(8):
        alone = linear(x[row : row + 1], weight, activations="int8", backend="native")
        np.testing.assert_array_equal(whole[row], alone[0])


@needs_native
@pytest.mark.parametrize(
    ("change", "field"),
    [
        (lambda w: w._replace(values=w.values[:, :64]), "weight.values"),
        (lambda w: w._replace(values=w.values.astype(jnp.float32)), "weight.values"),
        (lambda w: w._replace(scale=w.scale[:3]), "weight.scale"),
        (lambda w: w._replace(scale=w.scale[:, :5].repeat(9, 1)), "weight.values"),
        (lambda w: w._replace(offset=w.scale[:1]), "weight.offset"),
    ],
)
def test_weights_that_do_not_fit(change: object, field: str) -> None:
    weight, _ = weight_of("int4", 16, 256, 64, False)
    with pytest.raises(KernelError, match=field):
        linear(jnp.ones((1, 256)), change(weight), backend="native")  # type: ignore[operator]


def test_other_backends_refuse_it() -> None:
    weight, _ = weight_of("int4", 16, 256, 64, False)
    with pytest.raises(KernelError, match="NativeWeight"):
        jax.eval_shape(lambda x: linear(x, weight, backend="xla"), jnp.ones((1, 256)))
