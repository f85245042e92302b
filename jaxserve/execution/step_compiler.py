"""Compiling, ahead of time, what runs on the devices of a stage: steps, and what runs beside."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxserve.compilation.compiler_options import PINNED, Options, accepted, compiler_options
from jaxserve.compilation.lowered_step_cache import LoweredStepCache, lowered_step_cache
from jaxserve.errors import ValidationError
from jaxserve.execution.buffers import DeviceBuffers
from jaxserve.execution.device_state import DeviceState, StateShape
from jaxserve.execution.device_weights import DeviceWeights, StageWeights
from jaxserve.execution.features import Facts, Feature
from jaxserve.execution.programs import Program
from jaxserve.execution.step import StepSpec, run_step
from jaxserve.execution.step_inputs import BlobLayout, ResultLayout
from jaxserve.execution.step_shape import StepShape
from jaxserve.models.config import ModelConfig
from jaxserve.models.kv_cache import KVCache
from jaxserve.parallel.stages import Stage
from pallas_kernels import Backends


@dataclass
class StepCompiler:
    """Compiles for the devices of one stage.

    Attributes:
        stage: its layers and devices.
        own: its weights.
        weights: of all stages.
        buffers: of the features; of a stage that is not the last one there are none.
        model: the model's configuration.
        facts: of the engine, for its features.
        dtype: of the hidden states that come from the stage before.
        options: of XLA.
        check_alive: raises EngineDeadError once the weights are given back.
        kept: steps as they were lowered, see `keep_steps`.
    """

    stage: Stage
    own: StageWeights
    weights: DeviceWeights
    buffers: DeviceBuffers
    model: ModelConfig
    facts: Facts
    dtype: np.dtype[Any]
    options: Options
    check_alive: Callable[[], None]
    kept: LoweredStepCache | None = None

    @property
    def everywhere(self) -> NamedSharding:
        """Of what all of its devices have whole."""
        return NamedSharding(self.stage.mesh, PartitionSpec())

    def part(self, state: StateShape) -> StateShape:
        """The stage's part of a device state: features keep something in the last one alone."""
        return state if self.stage.is_last else replace(state, features={})

    def abstract(self, state: StateShape) -> DeviceState:
        """Its part of a device state, shapes with their shardings."""
        return self.part(state).abstract(self.stage.mesh)

    def keep_steps(
        self, folder: Path | None, decided: str, features: Sequence[Feature], backends: Backends
    ) -> None:
        """Find steps as they were lowered in a folder, and keep them there.

        For a process that runs nothing but this engine, see `lowered_step_cache`.

        Args:
            folder: of compiled programs; None: there is none.
            decided: text of what the engine was made of.
            features: of the engine.
            backends: the kernels.
        """
        made = [(feature.name, feature.options) for feature in features]
        layers = self.stage.start, self.stage.stop
        static = repr((decided, made, self.facts.num_logprobs, layers))
        modules = {type(part).__module__ for part in (*features, self.model)}
        named = self.model.architecture, backends.decode, backends.prefill
        modules.update(name.partition(":")[0] for name in named if ":" in name)
        self.kept = lowered_step_cache(folder, self.stage.mesh, static, modules)

    def layouts(
        self, shape: StepShape, features: Sequence[Feature], cache: KVCache
    ) -> tuple[BlobLayout, ResultLayout]:
        """Where everything lies in what a program of a shape takes and gives."""
        num_groups = cache.groups.pages.num_groups
        blob = BlobLayout(shape, features, self.facts, cache.page_size, num_groups)
        return blob, ResultLayout(shape, features, self.facts)

    def operands(self, layout: BlobLayout, state: StateShape) -> tuple[Any, ...]:
        """What a program is called with: parameters, shapes, [T, E] where a stage is before it."""
        shape, blob = layout.shape, self._blob(layout.size)
        operands = self.own.leaves, self.buffers.shapes(), self.abstract(state), blob
        if not self.stage.start:
            return operands
        size = shape.num_decode_tokens + shape.num_prefill, self.facts.hidden_size
        return *operands, jax.ShapeDtypeStruct(size, self.dtype, sharding=self.everywhere)

    def program(
        self, shape: StepShape, features: tuple[Feature, ...], state: StateShape
    ) -> Program:
        """Compile the stage's part of the step of a shape.

        Raises:
            EngineDeadError: the weights are given back.
        """
        layout, result = self.layouts(shape, features, state.cache)
        spec = StepSpec(
            config=self.model,
            features=features,
            layout=layout,
            result=result,
            cache=state.cache,
            max_num_seqs=state.max_num_seqs,
            mesh=self.stage.mesh,
            start=self.stage.start,
            stop=None if self.stage.is_last else self.stage.stop,
        )
        run: Callable[..., Any] = partial(run_step, spec, self.own.structure)
        with self.weights.reading():
            self.check_alive()
            operands = self.operands(layout, state)
            if self.kept is not None:
                text = repr((replace(shape, features=frozenset()), sorted(shape.features)))
                run = self.kept.step(text, run, operands)
            shardings = self.part(state).shardings(self.stage.mesh)
            where = (shardings, self.everywhere, self.everywhere)
            lowered = jax.jit(run, donate_argnums=2, out_shardings=where).lower(*operands)
            del operands  # the compiler goes on when `close` has given the parameters back
        compiled = lowered.compile(compiler_options=self.options)
        return Program(layout, result, compiled, device_bytes_of(compiled))

    def beside(
        self, run: Callable[..., Any], given: Any, size: int, *more: Any, made: Any = None
    ) -> Any:
        """Compile a function of arrays, whose shapes are given, an int32 operand, and more arrays.

        It returns `made`; None: the first arrays, changed, which are donated.
        """
        where = jax.tree.map(lambda leaf: leaf.sharding, given if made is None else made)
        jitted = jax.jit(run, donate_argnums=() if made else 0, out_shardings=where)
        lowered = jitted.lower(given, self._blob(size), *more)
        return lowered.compile(compiler_options=self.options)

    def _blob(self, size: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((size,), jnp.int32, sharding=self.everywhere)


def step_options(
    platform: str, backends: Backends, *, graph_collectives: bool, streams: bool
) -> Options:
    """Options of XLA for an engine's programs, without those that the XLA here does not know.

    Args:
        platform, graph_collectives, streams: see `compiler_options`.
        backends: the kernels.

    Raises:
        ValidationError: this XLA would not compile one program at every start, as it has to.
    """
    options = compiler_options(
        platform,
        divides_products=backends.divides_products,
        graph_collectives=graph_collectives,
        one_program=backends.one_program,
        streams=streams,
    )
    known = accepted(options)
    lost = sorted(PINNED.keys() - known.keys())  # others lose speed alone
    if lost and backends.one_program and PINNED.keys() <= options.keys():
        allowed = f"False with jax {jax.__version__}, whose XLA does not know {', '.join(lost)}"
        raise ValidationError("deterministic", True, allowed)
    return known


def device_bytes_of(compiled: Any) -> int:
    """What one device holds while a compiled function runs; 0 where XLA does not say."""
    analysis = compiled.memory_analysis()
    if analysis is None:
        return 0
    held = analysis.argument_size_in_bytes + analysis.output_size_in_bytes
    size: int = held - analysis.alias_size_in_bytes + analysis.temp_size_in_bytes
    return size
