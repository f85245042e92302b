"""Device state, compiled programs and dispatch: the scheduler's plans run here."""

from __future__ import annotations

import hashlib
import logging
import math
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxserve.compilation.compiler_options import PINNED, accepted, compiler_options
from jaxserve.compilation.lowered_step_cache import LoweredStepCache, lowered_step_cache
from jaxserve.config.device_defaults import device_defaults
from jaxserve.config.resolved_config import ResolvedConfig
from jaxserve.errors import EngineDeadError, ValidationError
from jaxserve.execution.buffers import DeviceBuffers
from jaxserve.execution.control import CopyProgram, UploadProgram
from jaxserve.execution.device_state import DeviceState, StateShape
from jaxserve.execution.features import (
    ALL_NAMES,
    Facts,
    Feature,
    draws_on,
    feature_sets,
    make_features,
    overrides,
)
from jaxserve.execution.features.own_features import asked_features, made
from jaxserve.execution.flops import StepFlops
from jaxserve.execution.host_memory import forget_zeros
from jaxserve.execution.host_pages import BACK, MOST_LEAVING, MOVES, SIZE, HostPages, pack_moves
from jaxserve.execution.memory_plan import Demand, temporary_bound
from jaxserve.execution.on_demand import OnDemandStates
from jaxserve.execution.parameters import split_model
from jaxserve.execution.programs import (
    Program,
    ProgramQuery,
    ProgramTable,
    lanes_for,
    predicted_cost,
    wanted_shapes,
)
from jaxserve.execution.results import PackedStep, StepInFlight, StepResult, step_result
from jaxserve.execution.row_packer import RowPacker
from jaxserve.execution.step import StepSpec, run_step
from jaxserve.execution.step_inputs import BlobLayout, ResultLayout
from jaxserve.execution.step_shape import StepShape
from jaxserve.memory.host_tier import MoveCosts
from jaxserve.memory.page_groups import PageGroups
from jaxserve.memory.tier import Landing
from jaxserve.models.config import ModelConfig
from jaxserve.models.kv_cache import KVCache
from jaxserve.models.linear import dequantized_bytes
from jaxserve.models.moe import uncovered_experts
from jaxserve.models.protocol import Model
from jaxserve.models.streamed import HELD, StreamedBlocks, streamed_bytes
from jaxserve.parallel.placement import HOST, HostCopy, placed, put_away, taken_back
from jaxserve.scheduling.plan import StepPlan

logger = logging.getLogger(__name__)

# what a runner is told beside the programs that it runs
HOST_COMMANDS = ("set_pool", "make_state", "drop_state", "put_away_weights", "take_back_weights")
CLOSE = "close"  # listeners hear it when the runner closes; it is no command

INSIDE_A_LAYER = ("linear", "operand", "layer")  # hooks of features

SAMPLES = 256  # numbers of an array that stand for it
TRIES = 3  # of a measurement of moves


class Command(NamedTuple):
    """What a runner does on the device: a call of a compiled program, or one of HOST_COMMANDS.

    Attributes:
        number: 0, 1, 2, ... in the order in which they run.
        program: its name.
        operand: int32, beside what is on the device.
    """

    number: int
    program: str
    operand: np.ndarray


class Runner:
    """Owns everything on the device.

    It compiles once `set_pool` has told it the size of the pool, takes its weights by
    `set_weights`, and serves after `warm_up`.

    Args:
        config: of the engine.
        model_config: the model's configuration.
        model: the model, its parameters `jax.ShapeDtypeStruct`s with their shardings.
        mesh: devices that hold it.
        cache: the KV cache, whose pages `set_pool` settles, and the kernels of this device kind.
        beside: bytes of each device that others have, such as an encoder.
        first_layer: those before it are run elsewhere, see `PipelineRunner`.

    Attributes:
        cache: the KV cache, without pages before `set_pool`.
        state: the device state; the next command takes it away.
        facts: of the engine, for its features.
        features: of the engine, in their order.
        ropes: of the model.
        num_drafts: most tokens that a decode row may compute beside its newest one.
        drafts_for: see `Feature.drafts_for`; None without drafts.
        first_runs: seconds that programs took to run idle while it was warmed up.
    """

    def __init__(
        self,
        config: ResolvedConfig,
        model_config: ModelConfig,
        model: Model,
        mesh: Mesh,
        cache: KVCache,
        *,
        beside: int = 0,
        first_layer: int = 0,
    ):
        self._beside, self._first_layer = beside, first_layer
        scheduler, self._settings = config.scheduler, config.programs
        self._itemsize = jnp.dtype(config.model.dtype).itemsize
        self._model_config = model_config
        self._mesh = mesh
        self.cache = cache
        self._backends = backends = cache.backends
        self._max_num_seqs = scheduler.max_num_seqs
        self._max_model_len = scheduler.max_model_len
        self._num_host_pages = config.cache.num_host_pages
        self._landing: Landing | None = None
        self._host_pages: HostPages | None = None
        options = compiler_options(
            mesh.devices.flat[0].platform,
            divides_products=backends.divides_products,
            graph_collectives=config.asked.graph_collectives,
            one_program=backends.one_program,
            streams=getattr(model, "streamed", None) is not None,
        )
        self.compiler_options = accepted(options)
        lost = sorted(PINNED.keys() - self.compiler_options.keys())  # others lose speed alone
        if lost and backends.one_program and PINNED.keys() <= options.keys():
            allowed = f"False with jax {jax.__version__}, whose XLA does not know {', '.join(lost)}"
            raise ValidationError("deterministic", True, allowed)
        if (uncovered := uncovered_experts(model)) is not None:
            logger.warning("experts are multiplied by XLA, block after block: %s", uncovered)
        self._structure, self._leaves = split_model(model)
        # of the part that a device multiplies with
        dequantized = dequantized_bytes(model, backends.matmul, self._itemsize)
        self._dequantized = dequantized // mesh.size
        streamed: StreamedBlocks | None = getattr(model, "streamed", None)
        # of the layers that a step brings from the host, as many as it holds at once
        self._brought = 0
        if streamed is not None:
            self._brought = HELD * streamed_bytes(streamed) // streamed.count
        most, vocab_size = config.asked.max_logprobs, model_config.vocab_size
        self.num_logprobs = min(most if most >= 0 else vocab_size, vocab_size)
        if most < 0:
            row = 8 * self.num_logprobs
            logger.warning("max_logprobs=-1: each reported row brings %d bytes to the host", row)
        self.max_prefill_tokens = scheduler.max_prefill_tokens
        self.max_lanes = lanes_for(self.max_prefill_tokens, self._max_num_seqs)
        self.facts = facts = Facts(
            model_config.vocab_size,
            self.num_logprobs,
            model_config.hidden_size,
            self.max_prefill_tokens,
            model_config,
            draws_on(mesh, backends, apart=backends.row_invariant and self._is_cpu),
            config.asked.deterministic,
            self._max_num_seqs,
        )
        self._asked_offload = config.asked.cpu_offload_gb
        own = asked_features(config.asked, ALL_NAMES)
        provided = make_features(facts, partial(getattr, config.asked))
        self.features = (*provided, *(made(choice, facts) for choice in own))
        self._refuse_inside(self.features)
        self.ropes = model_config.ropes
        self._fed = [f for f in self.features if overrides(f, "step_buffers")]
        self.packer = RowPacker(
            self._max_num_seqs, self.features, brings_tokens=self._first_layer > 0
        )
        defaults = device_defaults(mesh.devices.flat[0].platform)
        drafting = [feature for feature in self.features if feature.num_drafts]
        if len(drafting) > 1:
            names = ", ".join(feature.name for feature in drafting)
            raise ValidationError("features", names, "at most one that drafts")
        self.num_drafts = drafting[0].num_drafts if drafting else 0
        self.drafts_for = drafting[0].drafts_for if drafting else None
        self._shapes = wanted_shapes(
            self._max_num_seqs,
            self.max_prefill_tokens,
            defaults.smallest_bucket,
            feature_sets(self.features),
            1 + self.num_drafts,
            self.drafts_for,
        )
        if backends.one_program:
            del self._shapes[1:]  # the first serves every step
        self._flops_per_token = 2.0 * self._num_parameters()
        self._numbers_per_token = self._flops_per_token / defaults.flops_per_number
        self.first_runs: dict[StepShape, float] = {}
        self._more = OnDemandStates(self._replicated)
        self.programs = self._program_table()
        self._uploads = UploadProgram(cache.page_size, self._max_num_seqs)
        self._num_groups = cache.groups.pages.num_groups
        self._copies = CopyProgram(
            cache.groups.layers_per_page, self._max_num_seqs, self._num_groups
        )
        self._controls: dict[str, Any] = {}  # compiled by `warm_up`
        self._listener: Callable[[Command], None] | None = None
        self._num_commands = 0
        self._buffers = DeviceBuffers(self.features, mesh)
        self._load: Callable[[], Model] | None = None
        self._kept_weights: list[HostCopy | None] | None = None
        self._mapped = config.asked.offloaded_bytes if self._is_cpu else 0
        self._kept: LoweredStepCache | None = None
        self.state: DeviceState | None = None
        self._death: tuple[str, BaseException | None] | None = None  # why, and what was raised
        self._num_readers = 0  # threads that trace a program, which holds the parameters
        self._readers_left = threading.Condition()

    @property
    def num_stages(self) -> int:
        """Stages of layers, each of which can work on another step."""
        return 1

    @property
    def page_groups(self) -> PageGroups:
        """What the pages of its groups of layers have to do with its steps."""
        in_flight = 2 * (1 + self.num_drafts)
        return replace(self.cache.groups.pages, ahead=self.max_prefill_tokens + in_flight)

    @property
    def weight_bytes(self) -> int:
        """Bytes of parameters on each device."""
        return bytes_on_device(self._leaves)

    @property
    def host_weight_bytes(self) -> int:
        """Bytes of parameters in the host's memory, from where steps bring them."""
        on_host = [leaf for leaf in self._leaves if leaf.sharding.memory_kind == HOST]
        return sum(leaf.size * leaf.dtype.itemsize for leaf in on_host)

    @property
    def step_flops(self) -> StepFlops:
        """What counts the operations of its steps; once the pool is set."""
        config = self._model_config
        per_pair = 4.0 * config.num_heads * config.head_dim * config.num_layers
        return StepFlops(self._flops_per_token, per_pair, self._max_model_len)

    def set_weights(self, model: Model, load: Callable[[], Model]) -> None:
        """Take the parameters themselves, of the shapes, types and shardings that were told.

        Args:
            model: with the parameters.
            load: reads them again.
        """
        self._load = load
        _, self._leaves = split_model(model)

    def weights(self) -> Model:
        """The model with its parameters.

        Raises:
            ValidationError: parts of them are in other processes.
        """
        self.check_alive()
        self.require_one_process("parameters outside the engine")
        return self._structure.merge(self._leaves)

    def require_one_process(self, what: str) -> None:
        """Raises ValidationError where others have devices, for what no command tells them."""
        count = len({device.process_index for device in self._mesh.devices.flat})
        if count > 1:
            raise ValidationError("num_processes", count, f"1 for {what}")

    def keep_steps(self, folder: Path | None, decided: str) -> None:
        """Find steps as they were lowered in a folder, and keep them there; once the pool is set.

        For a process that runs nothing but this engine, see `lowered_step_cache`.

        Args:
            folder: of compiled programs; None: there is none.
            decided: text of what this runner was made of.
        """
        made = [(feature.name, feature.options) for feature in self.features]
        static = repr((decided, made, self.num_logprobs))
        modules = {type(part).__module__ for part in (*self.features, self._model_config)}
        named = self._model_config.architecture, self._backends.decode, self._backends.prefill
        modules.update(name.partition(":")[0] for name in named if ":" in name)
        self._kept = lowered_step_cache(folder, self._mesh, static, modules)

    def set_host_pages(self, num_pages: int) -> None:
        """Have so many pages in the host's memory; before `warm_up`."""
        self._num_host_pages = num_pages

    def tell_landing(self, landing: Landing) -> None:
        """Have a tier hear of pages that leave; before `warm_up`."""
        self._landing = landing

    @property
    def host_pages(self) -> HostPages | None:
        """The pages in the host's memory, once it is warm; None: there are none."""
        return self._host_pages

    def move_costs(self, page_seconds: float) -> MoveCosts:
        """What it takes to move host pages back, measured; once it is warm.

        Args:
            page_seconds: that the tokens of a page take to be computed.
        """
        seconds = []
        for _ in range(TRIES):
            begin = time.monotonic()
            self.run(BACK, np.zeros(SIZE, np.int32))  # trash pages
            jax.block_until_ready(self.state)
            seconds.append(time.monotonic() - begin)
        return MoveCosts(MOVES, min(seconds), page_seconds)

    def weights_digest(self) -> bytes:
        """Bytes that stand for the weights: a digest of some numbers of each array.

        Files of pages are named by it, so it tells models of one shape apart.
        """
        digest = hashlib.blake2b(digest_size=32)
        for leaf in self._leaves:
            part = leaf.addressable_shards[0].data
            # NumPy reads a CPU's memory, and the host's
            is_here = self._is_cpu or leaf.sharding.memory_kind == HOST
            flat = (np.asarray(part) if is_here else part).reshape(-1)
            digest.update(np.asarray(flat[:: max(1, flat.size // SAMPLES)]).tobytes())
        return digest.digest()

    def demand(self) -> Demand:
        """What a device needs beside KV pages; the temporaries are a bound."""
        moved = MOST_LEAVING + 2 * MOVES if self._num_host_pages else 0
        # the first two programs are the largest: every slot, every region token, every feature
        layouts = [self.layouts(shape) for shape in self._shapes[:2]]
        return Demand(
            weights=max(0, self.weight_bytes - self._mapped) + self._beside,
            tables=self.state_shape().table_bytes + self._buffers.device_bytes,
            transfers=2 * 4 * max(blob.size + result.size for blob, result in layouts)
            + moved * self.cache.page_bytes(self._mesh.shape["model"]),
            temporaries=self._dequantized
            + self._brought
            + max(
                temporary_bound(shape, self._model_config, self._itemsize)
                for shape in self._shapes[:2]
            ),
        )

    def set_pool(self, num_pages: int, max_model_len: int) -> None:
        """Settle the shapes of the device state; programs of other shapes are dropped.

        Args:
            num_pages: KV pages, trash page included.
            max_model_len: tokens that a slot's page table and history hold.
        """
        self._tell("set_pool", num_pages, max_model_len)
        self.cache, self._max_model_len = self.cache.with_pages(num_pages), max_model_len
        self.programs = self._program_table()

    def _program_table(self) -> ProgramTable:
        cost = partial(
            predicted_cost, features=self.features, numbers_per_token=self._numbers_per_token
        )
        return ProgramTable(self._shapes, self.compile_program, cost)

    def compile_largest(self) -> int:
        """Compile the two largest programs; bytes that a device holds while they run.

        A second blob and result are counted: the next step is dispatched while one runs.
        """
        self.programs.compile_ahead(2, lambda shape: None)
        return max(
            p.device_bytes + 4 * (p.layout.size + p.result.size) + self._beside
            for p in self.programs.programs
        )

    def warm_up(self, progress: Any = lambda shape: None) -> None:
        """Make the device state, compile the most needed programs and run each once, idle."""
        self.make_state()
        self._buffers.make(self._compile)
        self.programs.compile_ahead(self._settings.compile_ahead, progress)
        for program in self.programs.programs:
            self.first_runs[program.layout.shape] = self._idle_run(program)
        for control in (self._uploads, self._copies):
            self._compile_control(control)
            for blob in control.pack(()):
                self._call_control(control.name, blob)
        if self._num_host_pages:
            state = self.state_shape().abstract(self._mesh)
            layers = self.cache.groups.layers_per_page
            self._host_pages = HostPages(
                state, layers, self._num_host_pages, self._compile, self._landing
            )
            self._controls |= self._host_pages.calls
        if self._settings.compile_in_background:
            self.programs.compile_rest_in_background()

    def _idle_run(self, program: Program) -> float:
        """Seconds of a step without rows."""
        plan = StepPlan()
        idle = self.packer.pack(plan, self.packer.needs(plan), program.layout)
        begin = time.monotonic()
        jax.block_until_ready(self._call(program, idle.blob))
        return time.monotonic() - begin

    def add_features(self, features: Sequence[Feature]) -> None:
        """Take further features, all of them `on_demand`; requests that run go on without.

        Raises:
            ValidationError: others have devices, see `require_one_process`.
        """
        self.require_one_process(", ".join(feature.name for feature in features))
        self._refuse_inside(features)
        self.features = (*self.features, *features)
        self.packer.add(features)
        self._more.add(features)

    def _refuse_inside(self, features: Sequence[Feature]) -> None:
        """Raises ValidationError for what looks into layers, where a loop has some of them."""
        for feature in features if self._brought else ():
            if any(overrides(feature, hook) for hook in INSIDE_A_LAYER):
                allowed = f"none with {feature.setting or feature.name}, which works inside a layer"
                raise ValidationError("cpu_offload_gb", self._asked_offload, allowed)

    def compile_with(self, names: frozenset[str]) -> bool:
        """Have programs that contain some of the `on_demand` features; whether any was compiled.

        They are the two largest with these features: steps that compute prompts, and others.
        """
        every = [
            replace(s, features=s.features | names, num_special=s.num_rows, on_demand=names)
            for s in self._shapes[:2]
        ]
        return self.programs.add_variant(every)

    def put_state(self, feature: str, tree: Any) -> None:
        """Replace the state of an `on_demand` feature; steps that are dispatched read the old."""
        self._more.put(feature, tree)

    def listen(self, listener: Callable[[Command], None]) -> None:
        """Have every command told before it runs.

        A runner of the same configuration that runs the same commands has the same state.
        """
        self._listener = listener

    def pack(self, plan: StepPlan) -> PackedStep:
        """Choose the program of a plan and fill its operand; a plan is packed once."""
        needs = self.packer.needs(plan)
        wanted = ProgramQuery(
            plan.num_decode + len(needs.single),
            sum(plan.rows.lengths[row] for row in needs.lanes),
            max(len(needs.lanes), len(plan.samples) - plan.num_decode if needs.lanes else 0),
            needs.features,
            len(needs.special),
            max(plan.rows.lengths[: plan.num_decode], default=1) if self.num_drafts else 1,
        )
        program = self.programs.select(wanted)
        return PackedStep(program, needs, self.packer.pack(plan, needs, program.layout))

    def check_alive(self) -> None:
        """Raises EngineDeadError once a step has failed or the runner was closed."""
        if self._death is not None:
            message, cause = self._death
            raise EngineDeadError(message) from cause

    def dispatch(self, plan: StepPlan, packed: PackedStep | None = None) -> StepInFlight:
        """Start a step on the device; returns before it has run.

        Raises:
            EngineDeadError: the call failed, and the device state that it was given is lost.
        """
        step = packed or self.pack(plan)
        if plan.moves or plan.forks or plan.uploads:
            for command, operand in self._before(plan):
                self.run(command, operand)
        for feature in self._fed:
            if feature.name in step.needs.features:
                arrays = feature.step_buffers(self.packer.chunks(plan, step.needs))
                if arrays is not None:
                    self.write_rows(feature.name, 0, arrays)
        result = self._send(step.program.layout.shape.name, step.program, step.packed.blob)
        return StepInFlight(plan, step, *result)

    def _before(self, plan: StepPlan) -> Iterator[tuple[str, np.ndarray]]:
        """Commands that come before the step, with their operands."""
        first = plan.num_moves_first
        yield from pack_moves(plan.moves[:first])
        if plan.forks:
            yield from ((CopyProgram.name, blob) for blob in self._copies.pack(plan.forks))
        yield from pack_moves(plan.moves[first:])
        if plan.uploads:
            yield from ((UploadProgram.name, blob) for blob in self._uploads.pack(plan.uploads))

    def write_rows(self, feature: str, start: int, arrays: Any) -> None:
        """Replace rows of a feature's arrays; steps that are dispatched read the old ones.

        Args:
            feature: its name.
            start: the first row.
            arrays: NumPy arrays in the tree that `Feature.buffers` declares, as many rows of each.

        Raises:
            ValueError: other shapes or types than the feature has declared.
            EngineDeadError: a call failed.
        """
        for program, operand in self._buffers.pack(feature, start, arrays):
            self.run(program, operand)

    def run(self, program: str, operand: np.ndarray) -> Any:
        """Run a command by its name; returns the result of a step and what it has set aside.

        Args:
            program: a program that was compiled, or one of HOST_COMMANDS.
            operand: int32.

        Raises:
            KeyError: there is no such program.
            EngineDeadError: the call failed, and the device state that it was given is lost.
        """
        if program == "put_away_weights":
            return self.put_away_weights(keep=bool(operand[0]))
        if program in HOST_COMMANDS:
            return getattr(self, program)(*operand.tolist())
        if program in self._controls or program in self._buffers:
            return self._send(program, None, operand)
        return self._send(program, self.programs.named(program), operand)

    def _tell(self, name: str, *values: int) -> None:
        self._told(name, np.array(values, np.int32))

    def _told(self, name: str, operand: np.ndarray) -> None:
        if self._listener is not None:
            self._listener(Command(self._num_commands, name, operand))
        self._num_commands += 1

    def _send(self, name: str, program: Program | None, operand: np.ndarray) -> Any:
        self._told(name, operand)
        try:
            if name in self._buffers:
                self._buffers.run(name, self._placed(operand))
                return None
            if program is None:
                self._call_control(name, operand)
                return None
            result = self._call(program, operand)
            result[0].copy_to_host_async()
        except BaseException as error:
            if isinstance(error, Exception):
                raise self._die(name, error) from error
            # an interrupt is harmless where what was given away has come back
            if self.state is None or not self._buffers.is_whole:
                self._die(name, error)
            raise
        return result

    def fetch(self, dispatched: StepInFlight) -> StepResult:
        """Wait for a dispatched step and bring its result to the host.

        Raises:
            EngineDeadError: the step failed while it ran, and all that it computed is lost.
        """
        try:
            fetched = np.asarray(dispatched.result)
        except Exception as error:
            raise self._die(dispatched.step.program.layout.shape.name, error) from error
        return step_result(dispatched, fetched)

    def put_away_weights(self, *, keep: bool) -> None:
        """Free the parameters on the devices; only shapes and shardings are left there.

        Args:
            keep: whether host memory keeps them, or they stay mapped where they lie in files; else
                they are read again.
        """
        self._tell("put_away_weights", keep)
        taken = self._leaves
        # weights that came without a folder are in no file
        in_files = self._mapped and self._load != self.weights
        if keep and in_files:
            return  # no memory is theirs alone, and another store may be in the folder by then
        self._leaves, self._kept_weights = put_away(taken, keep=keep)

    def take_back_weights(self) -> None:
        """Have the parameters that were put away on the devices again."""
        self._tell("take_back_weights")
        kept, self._kept_weights = self._kept_weights, None
        if all(isinstance(leaf, jax.Array) for leaf in self._leaves):
            return  # they stayed
        if kept is None:
            assert self._load is not None
            self.set_weights(self._load(), self._load)
        else:
            self._leaves = taken_back(self._leaves, kept)

    def drop_state(self) -> None:
        """Give back the memory of pages and tables. Nothing may run or be found afterwards."""
        self._tell("drop_state")
        state, self.state = self.state, None
        delete_arrays(state)
        self._more.drop()

    def make_state(self) -> None:
        """Pages and tables of nothing, on the devices."""
        self._tell("make_state")
        self.state = self.state_shape().make(self._mesh)
        self._more.make()
        if self._is_cpu:
            forget_zeros(jax.tree.leaves(jax.block_until_ready(self.state)))

    def close(self) -> None:
        """Stop background compilation and give back device memory.

        A program that is being traced is waited for, one that the compiler has is not.
        """
        self._tell(CLOSE)
        self.programs.close()
        with self._readers_left:
            if self._death is None:
                self._death = "the engine was closed: make a new one", None
            self._readers_left.wait_for(lambda: self._num_readers == 0)
        self.state = None
        self._more.close()
        self._buffers.close()
        self._leaves, self._controls = (), {}
        if self._host_pages is not None:
            self._host_pages.close()
            self._host_pages = None

    def layouts(self, shape: StepShape) -> tuple[BlobLayout, ResultLayout]:
        """Where everything lies in what a program of this shape takes and gives."""
        page_size = self.cache.page_size
        blob = BlobLayout(shape, self.features, self.facts, page_size, self._num_groups)
        return blob, ResultLayout(shape, self.features, self.facts)

    def compile_program(self, shape: StepShape) -> Program:
        """Compile the step for one shape, ahead of time."""
        layout, result = self.layouts(shape)
        spec = self._spec(layout, result)
        state = self.state_shape(shape.on_demand)
        run: Callable[..., Any] = partial(run_step, spec, self._structure)
        with self._reading_parameters():
            operands = self.operands(layout)
            if self._kept is not None:
                text = repr((replace(shape, features=frozenset()), sorted(shape.features)))
                run = self._kept.step(text, run, operands)
            step = jax.jit(
                run,
                donate_argnums=2,
                out_shardings=(state.shardings(self._mesh), self._replicated, self._replicated),
            )
            lowered = step.lower(*operands)
            del operands  # the compiler goes on when `close` has given the parameters back
        compiled = lowered.compile(compiler_options=self.compiler_options)
        return Program(layout, result, compiled, device_bytes_of(compiled))

    def _num_parameters(self) -> int:
        return sum(leaf.size for leaf in self._leaves)

    def _spec(self, layout: BlobLayout, result: ResultLayout) -> StepSpec:
        return StepSpec(
            config=self._model_config,
            features=self.features,
            layout=layout,
            result=result,
            cache=self.cache,
            max_num_seqs=self._max_num_seqs,
            mesh=self._mesh,
            start=self._first_layer,
        )

    @contextmanager
    def _reading_parameters(self) -> Iterator[None]:
        """Within, `close` does not take the parameters away. Raises EngineDeadError after it."""
        with self._readers_left:
            self.check_alive()
            self._num_readers += 1
        try:
            yield
        finally:
            with self._readers_left:
                self._num_readers -= 1
                self._readers_left.notify_all()

    def operands(self, layout: BlobLayout) -> tuple[Any, ...]:
        """What a program is called with: parameters, and the shapes of buffers, state and blob."""
        state = self.state_shape(layout.shape.on_demand).abstract(self._mesh)
        return self._leaves, self._buffers.shapes(), state, self._abstract_blob(layout.size)

    def _compile(
        self, run: Callable[..., Any], given: Any, size: int, *more: Any, made: Any = None
    ) -> Any:
        """Compile a function of arrays, whose shapes are given, an int32 operand, and more arrays.

        It returns `made`; None: the first arrays, changed, which are donated.
        """
        where = jax.tree.map(lambda leaf: leaf.sharding, given if made is None else made)
        jitted = jax.jit(run, donate_argnums=() if made else 0, out_shardings=where)
        lowered = jitted.lower(given, self._abstract_blob(size), *more)
        return lowered.compile(compiler_options=self.compiler_options)

    def _compile_control(self, control: UploadProgram | CopyProgram) -> None:
        state = self.state_shape().abstract(self._mesh)
        self._controls[control.name] = self._compile(control.run, state, control.size)

    def _call_control(self, name: str, blob: np.ndarray) -> None:
        compiled = self._controls[name]
        self._donate(lambda state, blob: (compiled(state, blob),), blob)

    def _donate(self, call: Any, blob: np.ndarray, more: frozenset[str] = frozenset()) -> Any:
        """Give the device state to a program and keep the one that it returns.

        `more` are the `on_demand` features whose states it has beside.
        """
        placed = self._placed(blob)  # may fail, and then the state is whole
        state, self.state = self.state, None  # donated: must not be reachable if the call fails
        if more and state is not None:
            state = self._more.join(state, more)
        try:
            # serving never compiles; raise if a change makes it. A kernels' interpreter may.
            with jax.no_tracing(self._backends.interpret is None):
                after, *result = call(state, placed)
            self.state = self._more.split(after) if more else after
        except BaseException:
            delete_arrays(state)
            raise
        return result

    def _placed(self, blob: np.ndarray) -> Any:
        # arrays that are not placed yet would be transferred device by device from Python
        return placed(blob, self._replicated) if self._mesh.size > 1 else blob

    def _abstract_blob(self, size: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((size,), jnp.int32, sharding=self._replicated)

    def _call(self, program: Program, blob: np.ndarray) -> Any:
        call = partial(program.call, self._leaves, self._buffers.arrays)
        return self._donate(call, blob, program.layout.shape.on_demand)

    def _die(self, name: str, error: BaseException) -> EngineDeadError:
        """Give up after a failed step: what the device held for requests cannot be trusted."""
        state, self.state = self.state, None
        delete_arrays(state)
        # else the error, which callers may keep, would keep weights and pool alive in its frames
        traceback.clear_frames(error.__traceback__)
        message = (
            f"the engine is dead: its step {name} failed and the KV cache is lost with it "
            f"({type(error).__name__}: {error}); make a new engine, or restart the server"
        )
        if self._death is None:  # else it is what happens where another process is lost
            self._death = message, error
        return EngineDeadError(self._death[0])

    def lose(self, why: str) -> None:
        """Run nothing more: another process is lost, and what it had with it."""
        if self._death is None:
            self._death = f"the engine is dead: {why}", None

    @property
    def _is_cpu(self) -> bool:
        platform: str = self._mesh.devices.flat[0].platform
        return platform == "cpu"

    @property
    def _replicated(self) -> NamedSharding:
        return NamedSharding(self._mesh, PartitionSpec())

    def state_shape(self, on_demand: frozenset[str] = frozenset()) -> StateShape:
        """Of the device state, as `set_pool` has settled it, with some features' own states."""
        return StateShape(
            cache=self.cache,
            max_num_seqs=self._max_num_seqs,
            max_model_len=self._max_model_len,
            features={
                feature.name: shapes
                for feature in self.features
                if not feature.on_demand or feature.name in on_demand
                if (shapes := feature.state()) is not None
            },
        )


def delete_arrays(state: DeviceState | None) -> None:
    """Free device arrays now, whatever else refers to them."""
    for array in jax.tree.leaves(state):
        array.delete()


def bytes_on_device(leaves: Sequence[Any]) -> int:
    """Of arrays, or of their shapes with shardings, on each device."""
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in leaves
        if leaf.sharding.memory_kind != HOST
    )


def device_bytes_of(compiled: Any) -> int:
    """What one device holds while a compiled function runs; 0 where XLA does not say."""
    analysis = compiled.memory_analysis()
    if analysis is None:
        return 0
    held = analysis.argument_size_in_bytes + analysis.output_size_in_bytes
    size: int = held - analysis.alias_size_in_bytes + analysis.temp_size_in_bytes
    return size
