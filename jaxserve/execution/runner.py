"""Device state, compiled programs and dispatch: the scheduler's plans run here."""

from __future__ import annotations

import logging
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxserve.config import EngineConfig
from jaxserve.execution.batch import BlobLayout, ResultLayout, StepShape
from jaxserve.execution.compiler_options import accepted, compiler_options
from jaxserve.execution.defaults import mesh_defaults
from jaxserve.execution.packing import RowPacker
from jaxserve.execution.parameters import split_model
from jaxserve.execution.programs import Program, ProgramTable, lanes_for, wanted_shapes
from jaxserve.execution.step import DeviceState, StepSpec, run_step
from jaxserve.models.attention import kv_pages_spec
from jaxserve.models.config import ModelConfig
from jaxserve.models.llama import Llama
from jaxserve.sampling.variant import Variant
from jaxserve.scheduling.plan import StepPlan
from pallas_kernels import Backends, storage_dtype

logger = logging.getLogger(__name__)


class Dispatched(NamedTuple):
    """A step that the device works on."""

    plan: StepPlan
    program: Program
    result: jax.Array


class Packed(NamedTuple):
    """A plan as the operand of a program."""

    program: Program
    blob: np.ndarray


class StepResult(NamedTuple):
    """A fetched step: sampled tokens in the plan's row order, and the result's arrays.

    `rows` maps a plan row to its row in `values`.
    """

    tokens: list[int]
    values: dict[str, np.ndarray]
    rows: list[int]


class Runner:
    """Owns everything on the device.

    Args:
        config: resolved engine configuration (no None left but `num_pages`).
        model_config: the model's configuration.
        model: the loaded model, parameters on the mesh.
        mesh: devices that hold it.
        backends: kernels of this device kind.
        num_pages: KV pages a layer, trash page included.
    """

    def __init__(
        self,
        config: EngineConfig,
        model_config: ModelConfig,
        model: Llama,
        mesh: Mesh,
        backends: Backends,
        num_pages: int,
    ):
        assert config.max_num_seqs and config.max_model_len and config.block_size
        assert config.max_num_batched_tokens
        self._config = config
        self._model_config = model_config
        self._mesh = mesh
        self._backends = backends
        self._num_pages = num_pages
        self._max_num_seqs = config.max_num_seqs
        self._max_model_len = config.max_model_len
        self._page_size = config.block_size
        self._compiler_options = accepted(
            compiler_options(
                mesh.devices.flat[0].platform, divides_products=backends.divides_products
            )
        )
        self._structure, self._leaves = split_model(model)
        self.num_logprobs = min(
            config.max_logprobs if config.max_logprobs >= 0 else model_config.vocab_size,
            model_config.vocab_size,
        )
        budget = config.max_num_batched_tokens
        self.max_prefill_tokens = min(config.prefill_chunk or budget, budget)
        self.max_lanes = lanes_for(self.max_prefill_tokens, config.max_num_seqs)
        self.packer = RowPacker(config.max_num_seqs, model_config.vocab_size)
        defaults = mesh_defaults(mesh)
        shapes = wanted_shapes(
            config.max_num_seqs,
            self.max_prefill_tokens,
            defaults.smallest_bucket,
            defaults.common,
        )
        self.programs = ProgramTable(shapes, self.compile_program)
        self._state: DeviceState | None = None

    @property
    def weight_bytes(self) -> int:
        """Bytes of parameters on each device."""
        return sum(leaf.addressable_shards[0].data.nbytes for leaf in self._leaves)

    def warm_up(self, progress: Any = lambda shape: None) -> None:
        """Make the device state, compile the most needed programs and run each once, idle."""
        self._state = self._make_state()
        assert self._config.compile_ahead is not None
        self.programs.compile_ahead(self._config.compile_ahead, progress)
        for program in self.programs.programs:
            idle = self.packer.pack(StepPlan(), program.layout)
            self._call(program, idle).block_until_ready()
        assert self._config.compile_in_background is not None
        if self._config.compile_in_background:
            self.programs.compile_rest_in_background()

    def pack(self, plan: StepPlan) -> Packed:
        """Choose the program of a plan and fill its operand; a plan is packed once."""
        variant = self.packer.plan_variant(plan)
        program = self.programs.select(
            len(plan.decode), plan.num_prefill_tokens, len(plan.lanes), variant
        )
        return Packed(program, self.packer.pack(plan, program.layout))

    def dispatch(self, plan: StepPlan, packed: Packed | None = None) -> Dispatched:
        """Start a step on the device; returns before it has run."""
        program, blob = packed or self.pack(plan)
        result = self._call(program, blob)
        result.copy_to_host_async()
        return Dispatched(plan, program, result)

    def fetch(self, step: Dispatched) -> StepResult:
        """Wait for a dispatched step and bring its result to the host."""
        values = step.program.result.views(np.asarray(step.result))
        num_decode = len(step.plan.decode)
        first_lane = step.program.layout.shape.num_decode
        rows = [*range(num_decode), *range(first_lane, first_lane + len(step.plan.lanes))]
        tokens = values["token"]
        sampled = tokens[:num_decode].tolist()
        sampled += tokens[first_lane : first_lane + len(step.plan.lanes)].tolist()
        return StepResult(sampled, values, rows)

    def close(self) -> None:
        """Stop background compilation and give back device memory."""
        self.programs.close()
        self._state = None
        self._leaves = ()

    def compile_program(self, shape: StepShape) -> Program:
        """Compile the step for one shape, ahead of time."""
        layout = BlobLayout(shape, self._page_size, self._model_config.vocab_size)
        logprobs = self.num_logprobs if shape.variant >= Variant.RICH else 0
        result = ResultLayout(shape, logprobs)
        spec = StepSpec(
            config=self._model_config,
            layout=layout,
            result=result,
            num_pages=self._num_pages,
            max_num_seqs=self._max_num_seqs,
            backends=self._backends,
            mesh=self._mesh,
        )
        state_shardings = self._state_shardings()
        step = jax.jit(
            partial(run_step, spec, self._structure),
            donate_argnums=1,
            out_shardings=(state_shardings, self._replicated),
        )
        state = jax.tree.map(
            lambda s, sharding: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=sharding),
            jax.eval_shape(self._zero_state),
            state_shardings,
        )
        blob = jax.ShapeDtypeStruct((layout.size,), jnp.int32, sharding=self._replicated)
        compiled = step.lower(self._leaves, state, blob).compile(
            compiler_options=self._compiler_options
        )
        analysis = compiled.memory_analysis()
        temporary = analysis.temp_size_in_bytes if analysis is not None else 0
        return Program(layout, result, compiled, temporary)

    def _call(self, program: Program, blob: np.ndarray) -> jax.Array:
        state, self._state = self._state, None  # donated: must not be reachable if the call fails
        argument: Any = blob
        if self._mesh.size > 1:
            # arrays that are not placed yet would be transferred device by device from Python
            argument = jax.device_put(blob, self._replicated)
        with jax.no_tracing(True):  # serving never compiles; raise if a change makes it
            self._state, result = program.call(self._leaves, state, argument)
        return result

    @property
    def _replicated(self) -> NamedSharding:
        return NamedSharding(self._mesh, PartitionSpec())

    def _state_shardings(self) -> Any:
        """A `DeviceState` of shardings."""
        shardings: Any = DeviceState
        return shardings(
            kv_pages=NamedSharding(self._mesh, kv_pages_spec()),
            page_table=self._replicated,
            history=self._replicated,
        )

    def _zero_state(self) -> DeviceState:
        """Pages start as zeros: a masked row of uninitialised memory could hold NaN."""
        c = self._model_config
        dtype = storage_dtype(jnp.dtype(self._config.dtype), self._mesh.devices.flat[0].platform)
        head_dim = self._backends.stored_head_dim(c.head_dim)
        pool = (c.num_layers * self._num_pages, self._page_size, 2, c.num_kv_heads, head_dim)
        slots, pages = self._max_num_seqs + 1, -(-self._max_model_len // self._page_size)
        return DeviceState(
            kv_pages=jnp.zeros(pool, dtype),
            page_table=jnp.zeros((slots, pages), jnp.int32),
            history=jnp.zeros((slots, self._max_model_len + 1), jnp.int32),
        )

    def _make_state(self) -> DeviceState:
        return jax.jit(self._zero_state, out_shardings=self._state_shardings())()
