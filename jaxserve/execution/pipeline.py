"""A model whose layers are divided over stages of devices, as one runner.

The last stage is a `Runner`: it has the head, the features and the results. Those before it give it
hidden states. Each stage has its layers' part of every KV page, under the same page ids, and the
same page tables. All stages are given each command, in one order, and a dispatch waits for none of
them: a stage works as soon as it has what the one before it computes, so several steps of different
requests keep all of them busy (`SchedulerLimits.num_groups`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxserve.config.resolved_config import ResolvedConfig
from jaxserve.errors import EngineDeadError, ValidationError
from jaxserve.execution.control import CopyProgram, UploadProgram
from jaxserve.execution.device_state import DeviceState, StateShape
from jaxserve.execution.features import overrides
from jaxserve.execution.parameters import split_model
from jaxserve.execution.programs import Program
from jaxserve.execution.runner import Runner, bytes_on_device, delete_arrays, device_bytes_of
from jaxserve.execution.step import run_step
from jaxserve.execution.step_inputs import BlobLayout
from jaxserve.execution.step_shape import StepShape
from jaxserve.models.config import ModelConfig
from jaxserve.models.kv_cache import KVCache
from jaxserve.models.protocol import Model
from jaxserve.parallel.placement import HostCopy, placed, put_away, taken_back
from jaxserve.parallel.stages import Stage

# what a feature does inside the model, where one stage would not know of another
INSIDE_THE_MODEL = ("positions", "ahead", "embed", "linear", "operand", "layer", "draft")


class EarlierStage:
    """What a stage that is not the last one has on its devices.

    Args:
        stage: its layers and devices.
        model: with the parameters of the stage, or their shapes.

    Attributes:
        stage: as given.
        leaves: its parameters.
        state: its device state, without features; None while a program has it.
    """

    def __init__(self, stage: Stage, model: Model):
        self.stage = stage
        self.structure, self.leaves = split_model(model)
        self.state: DeviceState | None = None
        self._everywhere = NamedSharding(stage.mesh, PartitionSpec())
        self._controls: dict[str, Any] = {}
        self._kept: list[HostCopy | None] | None = None

    def lower(self, run: Callable[..., Any], shape: StateShape, operands: Sequence[Any]) -> Any:
        """The stage's part of a step, to be compiled.

        Args:
            run: `run_step` with all that is static.
            shape: of its state.
            operands: shapes of its int32 blob, and of [T, E] from the stage before where there is
                one.
        """
        places = self._everywhere
        given = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=places) for x in operands]
        state = shape.abstract(self.stage.mesh)
        where = (shape.shardings(self.stage.mesh), places, places)
        step = jax.jit(run, donate_argnums=2, out_shardings=where)
        return step.lower(self.leaves, {}, state, *given)

    def compile_control(
        self, control: UploadProgram | CopyProgram, shape: StateShape, options: Any
    ) -> None:
        """Compile a program beside the step for its state."""
        mesh = self.stage.mesh
        blob = jax.ShapeDtypeStruct((control.size,), jnp.int32, sharding=self._everywhere)
        run = jax.jit(control.run, donate_argnums=0, out_shardings=shape.shardings(mesh))
        lowered = run.lower(shape.abstract(mesh), blob)
        self._controls[control.name] = lowered.compile(compiler_options=options)

    def run(self, call: Any, blob: np.ndarray, entering: jax.Array | None) -> jax.Array:
        """Dispatch its part of a step: [T, E] from the stage before -> [T, E] for the next."""
        operands = [self._placed(blob)]
        if entering is not None:
            operands.append(jax.device_put(entering, self._everywhere))
        state, self.state = self.state, None  # donated: must not be reachable if the call fails
        self.state, leaving, _ = call(self.leaves, {}, state, *operands)
        return leaving

    def control(self, name: str, blob: np.ndarray) -> None:
        """Dispatch a program beside the step."""
        operand = self._placed(blob)
        state, self.state = self.state, None
        self.state = self._controls[name](state, operand)

    def put_away(self, *, keep: bool) -> None:
        """Free its parameters; `keep`: host memory has them."""
        self.leaves, self._kept = put_away(self.leaves, keep=keep)

    def take_back(self) -> None:
        """Have its parameters on its devices again, where the host's memory has kept them."""
        kept, self._kept = self._kept, None
        if kept is not None:
            self.leaves = taken_back(self.leaves, kept)

    def drop_state(self) -> None:
        state, self.state = self.state, None
        delete_arrays(state)

    def close(self) -> None:
        self.state, self.leaves, self._controls = None, (), {}

    def _placed(self, blob: np.ndarray) -> Any:
        return placed(blob, self._everywhere) if self.stage.mesh.size > 1 else blob


class PipelineRunner(Runner):
    """A runner of several stages.

    Args:
        config: of the engine.
        model_config: the model's configuration.
        models: of each stage, in order, with the shapes of its parameters.
        stages: their layers and devices.
        cache: as for `Runner`, with the layers of a stage.

    Raises:
        ValidationError: a feature works inside the model.
    """

    def __init__(
        self,
        config: ResolvedConfig,
        model_config: ModelConfig,
        models: Sequence[Model],
        stages: Sequence[Stage],
        cache: KVCache,
    ):
        *before, last = stages
        self._earlier = [EarlierStage(*one) for one in zip(before, models, strict=False)]
        super().__init__(config, model_config, models[-1], last.mesh, cache, first_layer=last.start)
        self._calls: dict[StepShape, list[Any]] = {}  # of the earlier stages
        self._dtype = jnp.dtype(config.model.dtype)
        for feature in self.features:
            if any(overrides(feature, hook) for hook in INSIDE_THE_MODEL):
                name = feature.setting or "features"
                value = getattr(config.asked, name) if feature.setting else feature.name
                allowed = f"off {self._where}: it works inside the model, between its stages"
                raise ValidationError(name, value, allowed)

    @property
    def num_stages(self) -> int:
        return 1 + len(self._earlier)

    @property
    def _where(self) -> str:
        return f"where pipeline_parallel_size is {self.num_stages}"

    @property
    def weight_bytes(self) -> int:
        """Bytes of parameters on each device of the stage that has the most."""
        return max(super().weight_bytes, *(bytes_on_device(one.leaves) for one in self._earlier))

    def require_one_process(self, what: str) -> None:
        """Raises ValidationError: stages are no one module, nor is each told."""
        raise ValidationError("pipeline_parallel_size", self.num_stages, f"1 for {what}")

    def set_weights(self, model: Any, load: Callable[[], Any]) -> None:
        """Take the parameters of all stages: `model` has a model of each, in order."""
        *before, last = model
        super().set_weights(last, load)
        for one, own in zip(self._earlier, before, strict=True):
            _, one.leaves = split_model(own)

    def compile_program(self, shape: StepShape) -> Program:
        """Compile the parts of all stages for one shape; `call` is the last one's."""
        program = super().compile_program(shape)
        with self._reading_parameters():
            *_, blob, entering = self.operands(program.layout)
        calls, state = [], self._state_shape_before()
        for number, one in enumerate(self._earlier):
            spec = replace(
                self._spec(program.layout, program.result),
                mesh=one.stage.mesh,
                start=one.stage.start,
                stop=one.stage.stop,
            )
            operands = (blob, entering) if number else (blob,)
            with self._reading_parameters():
                run = partial(run_step, spec, one.structure)
                lowered = one.lower(run, state, operands)
            calls.append(lowered.compile(compiler_options=self.compiler_options))
        self._calls[shape] = calls
        most = max(program.device_bytes, *map(device_bytes_of, calls))
        return program._replace(device_bytes=most)

    def operands(self, layout: BlobLayout) -> tuple[Any, ...]:
        """What the last stage's program is called with: hidden states come last."""
        shape = layout.shape
        size = shape.num_decode_tokens + shape.num_prefill, self._model_config.hidden_size
        entering = jax.ShapeDtypeStruct(size, self._dtype, sharding=self._replicated)
        return *super().operands(layout), entering

    def make_state(self) -> None:
        """Pages and tables of nothing, on the devices of all stages."""
        super().make_state()
        shape = self._state_shape_before()
        for one in self._earlier:
            one.state = shape.make(one.stage.mesh)

    def drop_state(self) -> None:
        """Give back the memory of pages and tables, see `Runner`."""
        super().drop_state()
        for one in self._earlier:
            one.drop_state()

    def put_away_weights(self, *, keep: bool) -> None:
        """Free the parameters on the devices, see `Runner`."""
        super().put_away_weights(keep=keep)
        for one in self._earlier:
            one.put_away(keep=keep)

    def take_back_weights(self) -> None:
        """Have the parameters that were put away on the devices again."""
        super().take_back_weights()
        for one in self._earlier:
            one.take_back()

    def close(self) -> None:
        """Stop background compilation and give back device memory."""
        super().close()
        self._calls = {}
        for one in self._earlier:
            one.close()

    def _num_parameters(self) -> int:
        before = (leaf.size for one in self._earlier for leaf in one.leaves)
        return super()._num_parameters() + sum(before)

    def _state_shape_before(self) -> StateShape:
        """Of the stages before the last one: features keep nothing there."""
        return replace(self.state_shape(), features={})

    def _compile_control(self, control: UploadProgram | CopyProgram) -> None:
        super()._compile_control(control)
        for one in self._earlier:
            one.compile_control(control, self._state_shape_before(), self.compiler_options)

    def _call_control(self, name: str, blob: np.ndarray) -> None:
        with self._all_or_none():
            for one in self._earlier:
                one.control(name, blob)
            super()._call_control(name, blob)

    def _call(self, program: Program, blob: np.ndarray) -> Any:
        with self._all_or_none():
            entering: Any = None
            with jax.no_tracing(self._backends.interpret is None):
                for one, call in zip(self._earlier, self._calls[program.layout.shape], strict=True):
                    entering = one.run(call, blob, entering)
            entering = jax.device_put(entering, self._replicated)

            def last(state: DeviceState, placed: Any) -> Any:
                return program.call(self._leaves, self._buffers.arrays, state, placed, entering)

            return self._donate(last, blob)

    @contextmanager
    def _all_or_none(self) -> Iterator[None]:
        """Within, a command is given to all stages; where one fails, no stage has a state."""
        try:
            yield
        except BaseException:
            self._drop_states()
            raise

    def _die(self, name: str, error: BaseException) -> EngineDeadError:
        self._drop_states()
        return super()._die(name, error)

    def _drop_states(self) -> None:
        state, self.state = self.state, None
        delete_arrays(state)
        for one in self._earlier:
            one.drop_state()
