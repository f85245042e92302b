"""Linear layers: how they keep and multiply their weights.

Weights are stored [out, in] and contracted on their last axis: the only form in which XLA:CPU
reaches its fast bfloat16 matmul, and as good as any on GPU and TPU. Every parameter names its
logical axes, which `jaxserve.parallel.ShardingRules` maps to mesh axes. Over several devices a
product runs on each of them with its part of the weight (`jaxserve.parallel.spread`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxserve.errors import ValidationError
from jaxserve.models.quant_array import QuantArray
from jaxserve.parallel.spread import WHOLE, Spread, summed
from pallas_kernels import Backends
from pallas_kernels.linear import Norm, Weight, linear, linear_in_parts
from pallas_kernels.linear.xla import rms_norm
from pallas_kernels.residual_norm import residual_norm


def parameter(
    shape: tuple[int, ...],
    dtype: Any,
    axes: tuple[str | None, ...],
    fill: float | None = None,
    role: str | None = None,
) -> nnx.Param:
    """A zero parameter whose axes have logical names; loading replaces the value.

    Args:
        shape, dtype: of the value.
        axes: their logical names.
        fill: the value of dummy weights; None: a matrix, whose elements are drawn.
        role: how its module multiplies it, if it may become a `QuantArray`: "linear", "head" or
            "experts"; None: it may not.
    """
    return nnx.Param(jnp.zeros(shape, dtype), logical_axes=axes, fill=fill, role=role)


@dataclass(frozen=True, slots=True)
class LinearForm:
    """How the weights of linear layers are stored and multiplied.

    Attributes:
        backend: of `pallas_kernels.linear`.
        quantization: what weights that are not quantised yet become when they are loaded: None
            keeps the model's type, "int8", "int4" and "fp8" are in `weight_plan`.
        matmul: backends of `pallas_kernels.quantized_matmul` for quantised weights, the best first.
        residual_norm: backend of `pallas_kernels.residual_norm`; None where the linear layers
            themselves add the residual stream and norm it.
        qkv_in_parts: whether `attend` takes the projection in parts, as `rotate_and_write` does.
        interpret: parameters of the interpreter of a kernel; None compiles it.
        row_invariant: whether a row's result may not depend on the rows beside it.
        experts: backend of `pallas_kernels.grouped_linear` where `backend` is not "native".
        route: backends of `pallas_kernels.route`, the best first.
        spread: how weights lie on several devices; None: on one. Known where the model is made.
    """

    backend: str = "xla"
    quantization: str | None = None
    matmul: tuple[str, ...] = ("xla",)
    residual_norm: str | None = None
    qkv_in_parts: bool = False
    interpret: Any = None
    row_invariant: bool = False
    experts: str = "xla"
    route: tuple[str, ...] = ("xla",)
    spread: Spread | None = None

    @staticmethod
    def of(backends: Backends, quantization: str | None, row_invariant: bool = False) -> LinearForm:
        """The form that suits the backends of a device.

        Raises:
            ValidationError: `row_invariant`, and the backend of linear layers has no such products.
        """
        if row_invariant and backends.linear != "native":
            raise ValidationError(
                "row_invariant",
                True,
                f"False where linear layers are {backends.linear}: only "
                "linear_backend native sums every row in one order",
            )
        return LinearForm(
            backend=backends.linear,
            quantization=quantization,
            matmul=backends.matmul,
            residual_norm=backends.residual_norm,
            qkv_in_parts=backends.rotate_and_write is not None,
            interpret=backends.interpret,
            row_invariant=row_invariant,
            experts=backends.experts,
            route=backends.route,
        )

    @property
    def grouped(self) -> str:
        """Backend of the products of experts."""
        return "native" if self.backend == "native" else self.experts

    @property
    def quantizes_head(self) -> bool:
        """Whether the lm head is quantised with the layers."""
        return self.quantization == "int8"

    def residual_normed(
        self, x: jax.Array, product: jax.Array, norm: Norm
    ) -> tuple[jax.Array, jax.Array]:
        """x [T, E] and parts of a product [S, T, E] -> the norm of their sum, and the sum."""
        assert self.residual_norm
        backend = self.residual_norm
        interpret = self.interpret if backend == "triton" else None

        def run(x: jax.Array, product: jax.Array, weight: jax.Array) -> tuple[jax.Array, jax.Array]:
            given = Norm(weight, norm.eps)
            return residual_norm(x, product, given, backend=backend, interpret=interpret)

        operands = x, product, norm.weight
        if self.spread is None:
            return run(*operands)
        # every device has all of both, and does the same
        normed, stream = self.spread.on_devices(run, operands, (WHOLE,) * 3, WHOLE)
        return normed, stream


PLAIN_LINEAR = LinearForm()


class Projection(nnx.Module):
    """Linear map from [T, in] to [T, *out_shape], with weight [*out_shape, in].

    The weight may be a `QuantArray`: loading decides that.
    """

    def __init__(
        self,
        in_size: int,
        out_shape: tuple[int, ...],
        *,
        axes: tuple[str | None, ...],
        bias: bool,
        dtype: Any,
        form: LinearForm,
        role: str | None = "linear",
    ):
        """`axes` are the logical names of the weight's axes, `in` last; `role` see `parameter`."""
        self.backend = form.backend
        self.matmul = form.matmul
        self.row_invariant = form.row_invariant
        self.spread = form.spread
        self.axes = axes
        self.out_shape = out_shape
        self.weight = parameter((*out_shape, in_size), dtype, axes, role=role)
        self.bias = parameter(out_shape, dtype, axes[:-1], fill=0.0) if bias else None

    def __call__(
        self,
        x: jax.Array,
        *,
        norm: Norm | None = None,
        residual: jax.Array | None = None,
        gated: bool = False,
        out_dtype: Any = None,
        live: jax.Array | None = None,
    ) -> jax.Array:
        """[T, in] -> [T, *out_shape] in x's dtype, or in `out_dtype`.

        Args:
            x: input rows.
            norm: applied to x first.
            residual: [T, *out_shape], added to the result.
            gated: outputs come in pairs (gate, up); the result is silu(gate) * up, half as wide.
            live: int32[R, 2] ranges of the rows that count; None: all.
        """
        if self.spread is not None:
            given = {"norm": norm, "residual": residual, "live": live}
            return _spread_product(self, self.spread, x, given, gated=gated, out_dtype=out_dtype)
        weight, order, options = self._operands()
        if order is not None:
            x = reordered(x, order)
            norm = None if norm is None else Norm(norm.weight[order], norm.eps)
        out = linear(
            x,
            weight,
            norm=norm,
            residual=residual,
            gated=gated,
            out_dtype=out_dtype,
            live=live,
            row_invariant=self.row_invariant,
            **options,
        )
        return out if gated else out.reshape(x.shape[0], -1, *self.out_shape[1:])

    def in_parts(self, x: jax.Array) -> jax.Array:
        """[T, in] -> [S, T, *out_shape], to be added up by what reads them: `linear_in_parts`.

        One part in x's dtype, the sum over devices, where each has a part of the inputs.
        """
        if self.spread is not None:
            return _spread_parts(self, self.spread, x)
        weight, order, options = self._operands()
        if order is not None:
            x = reordered(x, order)
        out = linear_in_parts(x, weight, **options)
        return out.reshape(*out.shape[:2], -1, *self.out_shape[1:])

    def _operands(self) -> tuple[Weight, jax.Array | None, dict[str, Any]]:
        """As `pallas_kernels.linear` takes it: the weight [N, K]; int32[K], the input that each of
        its columns multiplies, None: its own; options."""
        weight: Any = self.weight.get_value()
        bias = None if self.bias is None else self.bias[...].reshape(-1)
        options = {"bias": bias, "matmul": self.matmul, "backend": self.backend}
        if not isinstance(weight, QuantArray):
            # XLA:CPU is 10 times slower when the weight has more than two axes; merging is free
            return weight.reshape(-1, weight.shape[-1]), None, options
        options |= {
            "scale": weight.scale.reshape(-1) if weight.format.is_channel8 else None,
            "activations": weight.format.stored.activations,
            "input_scale": weight.input_scale,
        }
        return weight.operand(), weight.order, options


def reordered(x: jax.Array, order: jax.Array) -> jax.Array:
    """x [T, in] with its inputs in another order."""
    # without a barrier XLA:CPU gives the gather a layout for which it has no bfloat16 product
    return jax.lax.optimization_barrier(x[:, order])


def _spread_product(
    projection: Projection,
    spread: Spread,
    x: jax.Array,
    given: dict[str, Any],
    **options: Any,
) -> jax.Array:
    """`Projection.__call__` over several devices: x [T, in] -> [T, *out_shape].

    Args:
        given: `norm`, `residual` and `live`.
        options: `gated` and `out_dtype`.
    """
    norm, residual, live = given["norm"], given["residual"], given["live"]
    if spread.divides(projection.axes[-1]):
        assert not options["gated"]
        if norm is not None:
            x = rms_norm(x, norm)  # of all inputs

        def part(own: Projection, x: jax.Array, live: jax.Array | None) -> jax.Array:
            return own(x, live=live, **options)

        out = _sum_over_inputs(projection, spread, part, x, live)
        return out if residual is None else residual + out
    weight, eps = (None, 0.0) if norm is None else norm

    def local(
        own: Projection,
        x: jax.Array,
        weight: jax.Array | None,
        residual: jax.Array | None,
        live: jax.Array | None,
    ) -> jax.Array:
        norm = None if weight is None else Norm(weight, eps)
        return own(x, norm=norm, residual=residual, live=live, **options)

    rows = spread.rules.spec((None, *projection.axes[:-1]))
    operands, specs = (x, weight, residual, live), (WHOLE, WHOLE, rows, WHOLE)
    whole: jax.Array = spread.run(projection, local, operands, specs=specs, out_specs=rows)
    return whole


def _spread_parts(projection: Projection, spread: Spread, x: jax.Array) -> jax.Array:
    """`Projection.in_parts` over several devices: x [T, in] -> [S, T, *out_shape]."""
    if spread.divides(projection.axes[-1]):

        def part(own: Projection, x: jax.Array, live: None) -> jax.Array:
            parts = own.in_parts(x)
            return parts[0] if len(parts) == 1 else parts.sum(0, jnp.float32).astype(x.dtype)

        return _sum_over_inputs(projection, spread, part, x, None)[None]
    rows = spread.rules.spec((None, None, *projection.axes[:-1]))
    parts: jax.Array = spread.run(
        projection, Projection.in_parts, (x,), specs=(WHOLE,), out_specs=rows
    )
    return parts


def _sum_over_inputs(
    projection: Projection,
    spread: Spread,
    part: Callable[..., jax.Array],
    x: jax.Array,
    live: jax.Array | None,
) -> jax.Array:
    """part(projection of a device, its inputs, live) [T, *out_shape] of all devices, added up in
    the type of the parts, and the bias."""
    weight: Any = projection.weight.get_value()
    ordered = isinstance(weight, QuantArray) and weight.order is not None
    if ordered:
        x = reordered(x, weight.order)

    def local(own: Projection, x: jax.Array, live: jax.Array | None) -> jax.Array:
        own.bias = None
        if ordered:
            own.weight.set_value(replace(own.weight.get_value(), order=None))
        return summed(part(own, x, live))

    columns = spread.rules.spec((None, projection.axes[-1]))
    out: jax.Array = spread.run(
        projection, local, (x, live), specs=(columns, WHOLE), out_specs=WHOLE
    )
    if projection.bias is None:
        return out
    return (out.astype(jnp.float32) + projection.bias[...].astype(jnp.float32)).astype(out.dtype)
