"""A module's work on its share of the weights: what XLA cannot divide runs on each device.

XLA divides its own products, and would bring a whole weight to every device for a kernel that is
not its own. So a module runs inside `jax.shard_map`, with the parts of its parameters that lie on a
device (Shoeybi et al., "Megatron-LM", 2019): where outputs are divided nothing travels, where
inputs are each device has a part of every sum, and one sum over the devices follows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
from flax import nnx
from jax.sharding import Mesh, PartitionSpec

from jaxserve.parallel.sharding import ShardingRules
from pallas_kernels.quantized_matmul.activations import SCALES_MULTIPLE

AXIS = "model"  # of the mesh
WHOLE = PartitionSpec()
OWN_ROWS = PartitionSpec(AXIS)
# Numbers of a residual stream from which on each device adds and norms a part of its rows
# (sequence parallelism): below, a call more takes longer than the traffic that is spared.
DIVIDED_NUMBERS = 1 << 22


@dataclass(frozen=True, slots=True)
class Spread:
    """The devices of a model, and how its arrays are divided among them. Hashable."""

    mesh: Mesh
    rules: ShardingRules

    @property
    def devices(self) -> int:
        """How many share the model."""
        return int(self.mesh.shape[AXIS])

    def divides(self, name: str | None) -> bool:
        """Whether the logical axis of this name is divided."""
        return name is not None and getattr(self.rules, name) is not None

    def divides_rows(self, rows: int, size: int) -> bool:
        """Whether each device adds and norms its own part of a residual stream [rows, size].

        Then a sum over devices is a reduce-scatter of the rows, and an all-gather of their norm.
        """
        # rounded rows have no scales of padding then, which a gather would put between them
        whole = rows % (self.devices * SCALES_MULTIPLE) == 0
        return self.devices > 1 and whole and rows * size >= DIVIDED_NUMBERS

    def run(
        self,
        module: nnx.Module,
        function: Callable[..., Any],
        operands: tuple[Any, ...],
        *,
        specs: tuple[Any, ...],
        out_specs: Any,
    ) -> Any:
        """`function(module, *operands)` on every device, with its parts of all of them.

        Args:
            module: whose parameters name their axes.
            function: given the module as it would be on one device, with the parts of its
                parameters that a device has.
            operands: trees of arrays.
            specs: of each operand.
            out_specs: of the result.
        """
        graph, state = nnx.split(module)
        flat = list(nnx.to_flat_state(state))

        def local(values: list[Any], *operands: Any) -> Any:
            held = [
                (place, variable.replace(value))
                for (place, variable), value in zip(flat, values, strict=True)
            ]
            own = nnx.merge(graph, nnx.from_flat_state(held))
            _alone(own)
            return function(own, *operands)

        values = [variable.get_value() for _, variable in flat]
        parts = [self.rules.specs(self.mesh, variable) for _, variable in flat]
        return self.on_devices(local, (values, *operands), (parts, *specs), out_specs)

    def on_devices(
        self,
        function: Callable[..., Any],
        operands: tuple[Any, ...],
        specs: tuple[Any, ...],
        out_specs: Any,
    ) -> Any:
        """`function(*operands)` on every device, with its parts of the operands."""
        run = jax.shard_map(
            function, mesh=self.mesh, in_specs=specs, out_specs=out_specs, check_vma=False
        )
        return run(*operands)


def _alone(module: nnx.Module) -> None:
    """Takes from a module and those in it that they are spread: their own, and a form's."""
    for _, part in nnx.iter_graph(module):
        for name, value in vars(part).items() if isinstance(part, nnx.Module) else ():
            if isinstance(value, Spread):
                setattr(part, name, None)
            elif isinstance(getattr(value, "spread", None), Spread):
                form: Any = value  # a dataclass
                setattr(part, name, replace(form, spread=None))


def summed(part: jax.Array, *, by_rows: bool = False) -> jax.Array:
    """The sum over the devices of what each has, inside `Spread.run`; `by_rows`: of own rows."""
    total: jax.Array
    if by_rows:
        total = jax.lax.psum_scatter(part, AXIS, scatter_dimension=0, tiled=True)
    else:
        total = jax.lax.psum(part, AXIS)
    return total


def gathered(rows: jax.Array) -> jax.Array:
    """The rows of all devices, of which each has its own, inside `Spread.on_devices`."""
    every: jax.Array = jax.lax.all_gather(rows, AXIS, tiled=True)
    return every
