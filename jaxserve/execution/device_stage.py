"""A stage of layers on its devices: it computes its part of a step on its part of the state.

An engine has one, or as many as `pipeline_parallel_size` says. Those before the last one give it
hidden states; the last one has the head, the features and the results. Each has its layers' part of
every KV page, under the same page ids, and the same page tables. All are given each command, in one
order, and a dispatch waits for none of them: a stage works as soon as it has what the one before it
computes, so several steps of different requests keep all of them busy
(`SchedulerLimits.num_groups`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jaxserve.execution.device_state import DeviceState, StateShape
from jaxserve.execution.host_memory import forget_zeros
from jaxserve.execution.on_demand import OnDemandStates
from jaxserve.execution.step_compiler import StepCompiler
from jaxserve.parallel.placement import placed


class DeviceStage:
    """What a stage has on its devices.

    Args:
        compiler: of its programs.
        traces: whether calls may trace, as those of an interpreter of kernels do.

    Attributes:
        compiler: as given.
        state: its device state; None while a program has it, and where one has lost it.
        more: states of the features that came while it serves.
        controls: by command what runs it: (device state, operand) -> the state afterwards.
    """

    def __init__(self, compiler: StepCompiler, *, traces: bool):
        self.compiler = compiler
        self._traces = traces
        self.state: DeviceState | None = None
        self.more = OnDemandStates(compiler.everywhere)
        self.controls: Mapping[str, Callable[..., DeviceState]] = {}

    @property
    def mesh(self) -> Mesh:
        return self.compiler.stage.mesh

    def make_state(self, shape: StateShape) -> None:
        """Pages and tables of nothing."""
        self.state = self.compiler.part(shape).make(self.mesh)
        self.more.make()
        if self.mesh.devices.flat[0].platform == "cpu":
            forget_zeros(jax.tree.leaves(jax.block_until_ready(self.state)))

    def drop_state(self) -> None:
        """Give back the memory of pages and tables."""
        state, self.state = self.state, None
        delete_arrays(state)
        self.more.drop()

    def run(
        self,
        call: Callable[..., Any],
        blob: np.ndarray,
        entering: jax.Array | None = None,
        more: frozenset[str] = frozenset(),
    ) -> Any:
        """Dispatch its part of a step: what the program returns beside the state.

        Args:
            call: its program.
            blob: int32, see `BlobLayout`.
            entering: [T, E] from the stage before, if there is one.
            more: features on demand whose states the program has beside.
        """
        operands = [self.placed(blob)]  # may fail, and then the state is whole
        if entering is not None:
            operands.append(jax.device_put(entering, self.compiler.everywhere))
        of_engine = self.compiler.own.leaves, self.compiler.buffers.arrays
        return self._donate(partial(call, *of_engine), operands, more)

    def control(self, name: str, blob: np.ndarray) -> None:
        """Dispatch a program beside the step."""
        call = self.controls[name]
        self._donate(lambda *given: (call(*given),), [self.placed(blob)])

    def placed(self, blob: np.ndarray) -> Any:
        """An operand of the host, for its programs."""
        # arrays that are not placed yet would be transferred device by device from Python
        return placed(blob, self.compiler.everywhere) if self.mesh.size > 1 else blob

    def close(self) -> None:
        """Let go of all but the weights, which are their owner's."""
        self.state, self.controls = None, {}
        self.more.close()

    def _donate(
        self, call: Callable[..., Any], operands: Sequence[Any], more: frozenset[str] = frozenset()
    ) -> Any:
        """Give the device state to a program and keep the one that it returns."""
        state, self.state = self.state, None  # donated: must not be reachable if the call fails
        if more and state is not None:
            state = self.more.join(state, more)
        try:
            # serving never compiles; raise if a change makes it
            with jax.no_tracing(not self._traces):
                after, *result = call(state, *operands)
            self.state = self.more.split(after) if more else after
        except BaseException:
            delete_arrays(state)
            raise
        return result


def delete_arrays(state: DeviceState | None) -> None:
    """Free device arrays now, whatever else refers to them."""
    for array in jax.tree.leaves(state):
        array.delete()
