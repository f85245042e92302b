"""Device state, compiled programs and dispatch: the scheduler's plans run here."""

from __future__ import annotations

import logging
import traceback
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxserve.config import EngineConfig
from jaxserve.errors import EngineDeadError
from jaxserve.execution.compiler_options import accepted, compiler_options
from jaxserve.execution.control import UploadLayout
from jaxserve.execution.defaults import mesh_defaults
from jaxserve.execution.features import Facts, make_features, threshold_on
from jaxserve.execution.inputs import BlobLayout, Result, ResultLayout
from jaxserve.execution.memory_plan import Demand, table_bytes, temporary_bound
from jaxserve.execution.packing import Needs, RowPacker, program_row
from jaxserve.execution.parameters import split_model
from jaxserve.execution.programs import (
    Program,
    ProgramTable,
    Wanted,
    lanes_for,
    predicted_cost,
    wanted_shapes,
)
from jaxserve.execution.shapes import StepShape
from jaxserve.execution.step import DeviceState, StepSpec, run_step
from jaxserve.models.attention import kv_pages_spec
from jaxserve.models.config import ModelConfig
from jaxserve.models.llama import Llama
from jaxserve.scheduling.plan import StepPlan
from pallas_kernels import Backends, storage_dtype

logger = logging.getLogger(__name__)


class Dispatched(NamedTuple):
    """A step that the device works on."""

    plan: StepPlan
    program: Program
    needs: Needs
    result: jax.Array


class Packed(NamedTuple):
    """A plan as the operand of a program."""

    program: Program
    needs: Needs
    blob: np.ndarray


class StepResult(NamedTuple):
    """A fetched step.

    Attributes:
        tokens: sampled tokens in the plan's row order.
        outputs: what the features report, by their names.
        special: plan row -> its place among the special rows, which `outputs` are about.
    """

    tokens: list[int]
    outputs: dict[str, Any]
    special: dict[int, int]


class Runner:
    """Owns everything on the device.

    It compiles once `set_pool` has told it the size of the pool, and serves after `warm_up`.

    Args:
        config: resolved engine configuration (no None left but `num_pages`).
        model_config: the model's configuration.
        model: the loaded model, parameters on the mesh.
        mesh: devices that hold it.
        backends: kernels of this device kind.
    """

    def __init__(
        self,
        config: EngineConfig,
        model_config: ModelConfig,
        model: Llama,
        mesh: Mesh,
        backends: Backends,
    ):
        assert config.max_num_seqs and config.max_model_len and config.block_size
        assert config.max_num_batched_tokens
        self._config = config
        self._model_config = model_config
        self._mesh = mesh
        self._backends = backends
        self._num_pages = 0
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
        if config.max_logprobs < 0:
            row = 8 * self.num_logprobs
            logger.warning("max_logprobs=-1: each reported row brings %d bytes to the host", row)
        budget = config.max_num_batched_tokens
        self.max_prefill_tokens = min(config.prefill_chunk or budget, budget)
        self.max_lanes = lanes_for(self.max_prefill_tokens, config.max_num_seqs)
        self._features = make_features(threshold_on(mesh, backends))
        self._facts = Facts(model_config.vocab_size, self.num_logprobs)
        self.packer = RowPacker(config.max_num_seqs, self._features, self._facts)
        defaults = mesh_defaults(mesh)
        self._shapes = wanted_shapes(
            config.max_num_seqs, self.max_prefill_tokens, defaults.smallest_bucket
        )
        self._numbers_per_token = (
            2 * sum(leaf.size for leaf in self._leaves) / defaults.flops_per_number
        )
        self.programs = self._program_table()
        self._upload_layout = UploadLayout(config.block_size, config.max_num_seqs)
        self._upload: Any = None  # compiled by `warm_up`
        self._state: DeviceState | None = None
        self._death: tuple[str, BaseException | None] | None = None  # why, and what was raised

    @property
    def weight_bytes(self) -> int:
        """Bytes of parameters on each device."""
        return sum(leaf.addressable_shards[0].data.nbytes for leaf in self._leaves)

    def demand(self) -> Demand:
        """What a device needs beside KV pages; the temporaries are a bound."""
        # the first two programs are the largest: every slot, every region token, every feature
        layouts = [self.layouts(shape) for shape in self._shapes[:2]]
        itemsize = jnp.dtype(self._config.dtype).itemsize
        return Demand(
            weights=self.weight_bytes,
            tables=table_bytes(self._max_num_seqs, self._max_model_len, self._page_size),
            transfers=2 * 4 * max(blob.size + result.size for blob, result in layouts),
            temporaries=max(
                temporary_bound(shape, self._model_config, itemsize) for shape in self._shapes[:2]
            ),
        )

    def set_pool(self, num_pages: int, max_model_len: int) -> None:
        """Settle the shapes of the device state; programs of other shapes are dropped.

        Args:
            num_pages: KV pages a layer, trash page included.
            max_model_len: tokens that a slot's page table and history hold.
        """
        self._num_pages, self._max_model_len = num_pages, max_model_len
        self.programs = self._program_table()

    def _program_table(self) -> ProgramTable:
        cost = partial(
            predicted_cost,
            features=self._features,
            facts=self._facts,
            numbers_per_token=self._numbers_per_token,
        )
        return ProgramTable(self._shapes, self.compile_program, cost)

    def compile_largest(self) -> int:
        """Compile the two largest programs; bytes that a device holds while they run.

        A second blob and result are counted: the next step is dispatched while one runs.
        """
        self.programs.compile_ahead(2, lambda shape: None)
        return max(
            p.device_bytes + 4 * (p.layout.size + p.result.size) for p in self.programs.programs
        )

    def warm_up(self, progress: Any = lambda shape: None) -> None:
        """Make the device state, compile the most needed programs and run each once, idle."""
        self._state = self._make_state()
        assert self._config.compile_ahead is not None
        self.programs.compile_ahead(self._config.compile_ahead, progress)
        for program in self.programs.programs:
            plan = StepPlan()
            idle = self.packer.pack(plan, self.packer.needs(plan), program.layout)
            self._call(program, idle).block_until_ready()
        self._upload = self._compile_upload()
        self._run_upload(np.full(self._upload_layout.size, 0, np.int32))
        assert self._config.compile_in_background is not None
        if self._config.compile_in_background:
            self.programs.compile_rest_in_background()

    def pack(self, plan: StepPlan) -> Packed:
        """Choose the program of a plan and fill its operand; a plan is packed once."""
        needs = self.packer.needs(plan)
        wanted = Wanted(
            len(plan.decode),
            plan.num_prefill_tokens,
            len(plan.lanes),
            needs.features,
            len(needs.special),
        )
        program = self.programs.select(wanted)
        return Packed(program, needs, self.packer.pack(plan, needs, program.layout))

    def check_alive(self) -> None:
        """Raises EngineDeadError once a step has failed or the runner was closed."""
        if self._death is not None:
            message, cause = self._death
            raise EngineDeadError(message) from cause

    def dispatch(self, plan: StepPlan, packed: Packed | None = None) -> Dispatched:
        """Start a step on the device; returns before it has run.

        Raises:
            EngineDeadError: the call failed, and the device state that it was given is lost.
        """
        program, needs, blob = packed or self.pack(plan)
        try:
            if plan.uploads:
                for upload in self._upload_layout.pack(plan.uploads):
                    self._run_upload(upload)
            result = self._call(program, blob)
            result.copy_to_host_async()
        except BaseException as error:
            if isinstance(error, Exception):
                raise self._die(program, error) from error
            if self._state is None:  # an interrupt is harmless where the state has come back
                self._die(program, error)
            raise
        return Dispatched(plan, program, needs, result)

    def fetch(self, step: Dispatched) -> StepResult:
        """Wait for a dispatched step and bring its result to the host.

        Raises:
            EngineDeadError: the step failed while it ran, and all that it computed is lost.
        """
        try:
            fetched = np.asarray(step.result)
        except Exception as error:
            raise self._die(step.program, error) from error
        found: Result = step.program.result.views(fetched)
        shape, plan = step.program.layout.shape, step.plan
        num_decode, first_lane = len(plan.decode), shape.num_decode
        sampled = found.step.token[:num_decode].tolist()
        sampled += found.step.token[first_lane : first_lane + len(plan.lanes)].tolist()
        special = {
            index: program_row(index, plan, first_lane) if shape.all_special else place
            for place, (index, _) in enumerate(step.needs.special)
        }
        return StepResult(sampled, found.features, special)

    def close(self) -> None:
        """Stop background compilation and give back device memory."""
        self.programs.close()
        self._state = None
        self._leaves = ()
        if self._death is None:
            self._death = "the engine was closed: make a new one", None

    def layouts(self, shape: StepShape) -> tuple[BlobLayout, ResultLayout]:
        """Where everything lies in what a program of this shape takes and gives."""
        blob = BlobLayout(shape, self._features, self._facts, self._page_size)
        return blob, ResultLayout(shape, self._features, self._facts)

    def compile_program(self, shape: StepShape) -> Program:
        """Compile the step for one shape, ahead of time."""
        layout, result = self.layouts(shape)
        spec = StepSpec(
            config=self._model_config,
            features=self._features,
            facts=self._facts,
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
        state, blob = self._abstract_state(), self._abstract_blob(layout.size)
        compiled = step.lower(self._leaves, state, blob).compile(
            compiler_options=self._compiler_options
        )
        return Program(layout, result, compiled, _device_bytes(compiled))

    def _compile_upload(self) -> Any:
        upload = jax.jit(
            self._upload_layout.run, donate_argnums=0, out_shardings=self._state_shardings()
        )
        blob = self._abstract_blob(self._upload_layout.size)
        lowered = upload.lower(self._abstract_state(), blob)
        return lowered.compile(compiler_options=self._compiler_options)

    def _run_upload(self, blob: np.ndarray) -> None:
        self._donate(lambda state, blob: (self._upload(state, blob), None), blob)

    def _donate(self, call: Any, blob: np.ndarray) -> Any:
        """Give the device state to a program and keep the one that it returns."""
        placed = self._placed(blob)  # may fail, and then the state is whole
        state, self._state = self._state, None  # donated: must not be reachable if the call fails
        try:
            with jax.no_tracing(True):  # serving never compiles; raise if a change makes it
                self._state, result = call(state, placed)
        except BaseException:
            _delete(state)
            raise
        return result

    def _placed(self, blob: np.ndarray) -> Any:
        # arrays that are not placed yet would be transferred device by device from Python
        return jax.device_put(blob, self._replicated) if self._mesh.size > 1 else blob

    def _abstract_state(self) -> DeviceState:
        return jax.tree.map(
            lambda s, sharding: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=sharding),
            jax.eval_shape(self._zero_state),
            self._state_shardings(),
        )

    def _abstract_blob(self, size: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((size,), jnp.int32, sharding=self._replicated)

    def _call(self, program: Program, blob: np.ndarray) -> jax.Array:
        return self._donate(partial(program.call, self._leaves), blob)

    def _die(self, program: Program, error: BaseException) -> EngineDeadError:
        """Give up after a failed step: what the device held for requests cannot be trusted."""
        state, self._state = self._state, None
        _delete(state)
        # else the error, which callers may keep, would keep weights and pool alive in its frames
        traceback.clear_frames(error.__traceback__)
        name = program.layout.shape.name
        message = (
            f"the engine is dead: its step {name} failed and the KV cache is lost with it "
            f"({type(error).__name__}: {error}); make a new engine, or restart the server"
        )
        self._death = message, error
        return EngineDeadError(message)

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


def _delete(state: DeviceState | None) -> None:
    """Free device arrays now, whoever else refers to them."""
    for array in state or ():
        array.delete()


def _device_bytes(compiled: Any) -> int:
    """What one device holds while a compiled function runs; 0 where XLA does not say."""
    analysis = compiled.memory_analysis()
    if analysis is None:
        return 0
    held = analysis.argument_size_in_bytes + analysis.output_size_in_bytes
    size: int = held - analysis.alias_size_in_bytes + analysis.temp_size_in_bytes
    return size
