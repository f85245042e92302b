"""Linear layers: how they keep and multiply their weights.

Weights are stored [out, in] and contracted on their last axis: the only form in which XLA:CPU
reaches its fast bfloat16 matmul, and as good as any on GPU and TPU. Every parameter names its
logical axes, which `jaxserve.parallel.ShardingRules` maps to mesh axes. Over several devices a
product runs on each of them with its part of the weight (`jaxserve.parallel.spread`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec

from jaxserve.errors import ValidationError
from jaxserve.models.quant_array import QuantArray
from jaxserve.models.spread_linear import reordered, spread_after, spread_parts, spread_product
from jaxserve.parallel.spread import AXIS, OWN_ROWS, WHOLE, Spread, gathered
from pallas_kernels import Backends
from pallas_kernels.backends import OPERATIONS
from pallas_kernels.finish_rows import finish_rows
from pallas_kernels.linear import Norm, Weight, linear, linear_in_parts, rounding_of
from pallas_kernels.quantized_matmul import Rounding, Rows
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
        residual_norm: backend of `pallas_kernels.residual_norm` and `finish_rows`; None where the
            linear layers themselves add the residual stream and norm it.
        qkv_in_parts: whether `attend` takes the projection in parts, as `rotate_and_write` does.
        interpret: parameters of the interpreter of a kernel; None compiles it.
        row_invariant: whether a row's result may not depend on the rows beside it.
        experts: backend of `pallas_kernels.grouped_linear` where `backend` is not "native".
        route: backends of `pallas_kernels.route`, the best first.
        rotary: backends of `pallas_kernels.rotary` where `backend` is not "native", the best first.
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
    rotary: tuple[str, ...] = ("xla",)
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
            rotary=backends.rotary,
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
        self,
        x: jax.Array,
        product: jax.Array,
        norm: Norm,
        rounding: Rounding | None,
        behind: Norm | None = None,
    ) -> tuple[Rows, jax.Array]:
        """x [T, E] and parts of a product [S, T, E] -> the norm of their sum, and the sum.

        `rounding` of the norm is that of the product which reads it; `behind` norms the product
        before it is added.
        """

        def run(
            x: jax.Array,
            product: jax.Array,
            weight: jax.Array,
            rounding: Rounding | None,
            of_product: Any,
        ) -> tuple[Rows, jax.Array]:
            given = norm._replace(weight=weight)
            first = behind and behind._replace(weight=of_product)
            options = {"behind": first, "rounding": rounding, **self._between}
            return residual_norm(x, product, given, **options)

        operands = x, product, norm.weight, rounding, behind and behind.weight
        if self.spread is None:
            return run(*operands)
        if not self.spread.divides_rows(*x.shape):  # every device does the same
            normed, stream = self.spread.on_devices(run, operands, (WHOLE,) * 5, WHOLE)
            return normed, stream

        def of_own_rows(*operands: Any) -> tuple[Rows, jax.Array]:
            normed, stream = run(*operands)
            return jax.tree.map(gathered, normed), stream

        specs = OWN_ROWS, PartitionSpec(None, AXIS), *(WHOLE,) * 3
        normed, stream = self.spread.on_devices(of_own_rows, operands, specs, (WHOLE, OWN_ROWS))
        return normed, stream

    def finished(
        self, product: jax.Array, dtype: Any, rounding: Rounding | None, *, gate: str | None = None
    ) -> Rows:
        """Parts of a product [S, T, N] -> the rows of the next one, gated or as they are.

        Where one part is not rounded XLA does it, and may fuse more.
        """
        if rounding is None and len(product) == 1:
            return finish_rows(product, dtype=dtype, gate=gate, backend="xla")
        return finish_rows(product, dtype=dtype, gate=gate, rounding=rounding, **self._between)

    @property
    def _between(self) -> dict[str, Any]:
        """Backend and interpreter of what stands between the linear layers."""
        assert self.residual_norm
        interpret = self.interpret if self.residual_norm == "triton" else None
        return {"backend": self.residual_norm, "interpret": interpret}


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
        x: Rows,
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
            return spread_product(self, self.spread, x, given, gated=gated, out_dtype=out_dtype)
        weight, order, options = self._operands()
        if order is not None:
            assert isinstance(x, jax.Array)
            x = reordered(x, order)
            norm = None if norm is None else norm._replace(weight=norm.weight[order])
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

    @property
    def norms_offset(self) -> bool:
        """Whether its norm may have a factor of 1 + weight, which native linear layers have not."""
        return self.backend != "native"

    def rounding(self, dtype: Any) -> Rounding | None:
        """What rows in `dtype` may be rounded to before they are given to `in_parts`."""
        if self.spread is not None and self.spread.divides(self.axes[-1]):
            return None  # each device rounds the inputs that it has
        weight, order, options = self._operands()
        if order is not None:
            return None
        del options["bias"]
        return rounding_of(weight, dtype=dtype, **options)

    def in_parts(self, x: Rows) -> jax.Array:
        """[T, in] -> [S, T, *out_shape], to be added up by what reads them: `linear_in_parts`.

        One part in x's dtype, the sum over devices, where each has a part of the inputs.
        """
        if self.spread is not None:
            return spread_parts(self, self.spread, x)
        weight, order, options = self._operands()
        if order is not None:
            assert isinstance(x, jax.Array)
            x = reordered(x, order)
        out = linear_in_parts(x, weight, **options)
        return out.reshape(*out.shape[:2], -1, *self.out_shape[1:])

    def after(
        self, form: LinearForm, product: jax.Array, dtype: Any, *, gate: str | None = None
    ) -> jax.Array:
        """`in_parts` of the rows [T, in] in `dtype` that `LinearForm.finished` makes of the parts
        [S, T, N] of another product."""
        if self.spread is not None:
            return spread_after(self, self.spread, form, product, dtype, gate)
        return self.in_parts(form.finished(product, dtype, self.rounding(dtype), gate=gate))

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


def dequantized_bytes(model: nnx.Module, matmul: tuple[str, ...], itemsize: int) -> int:
    """Bytes of the largest 4-bit weight where a step of many rows dequantises it; 0: none does.

    Args:
        model: with its parameters.
        matmul: backends of `quantized_matmul`.
        itemsize: of the model's type.
    """
    if not any(OPERATIONS["matmul"][name].converts_every for name in matmul):
        return 0
    weights = [
        variable.get_value()
        for _, variable in nnx.to_flat_state(nnx.state(model, nnx.Param))
        if variable.get_metadata("role") in ("linear", "head")
    ]
    sizes = [
        math.prod(weight.shape)
        for weight in weights
        if isinstance(weight, QuantArray) and weight.format.stored.kind == "int4"
    ]
    return itemsize * max(sizes, default=0)
