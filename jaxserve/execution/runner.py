"""Device state, compiled programs and dispatch: the scheduler's plans run here."""

from __future__ import annotations

import logging
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.config.device_defaults import device_defaults
from jaxserve.config.resolved_config import ResolvedConfig
from jaxserve.errors import EngineDeadError, ValidationError
from jaxserve.execution.buffers import DeviceBuffers
from jaxserve.execution.control import Controls
from jaxserve.execution.device_stage import DeviceStage
from jaxserve.execution.device_state import DeviceState, StateShape
from jaxserve.execution.device_weights import DeviceWeights, working_bytes
from jaxserve.execution.feature_checks import (
    refuse_inside_layers,
    refuse_inside_the_model,
    the_drafting,
)
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
from jaxserve.execution.memory_plan import Demand, temporary_bound
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
from jaxserve.execution.step_compiler import StepCompiler, step_options
from jaxserve.execution.step_shape import StepShape
from jaxserve.memory.page_groups import PageGroups
from jaxserve.models.config import ModelConfig
from jaxserve.models.kv_cache import KVCache
from jaxserve.models.moe import uncovered_experts
from jaxserve.models.protocol import Model
from jaxserve.parallel.stages import Stage
from jaxserve.scheduling.plan import StepPlan

logger = logging.getLogger(__name__)

# what a runner is told beside the programs that it runs
HOST_COMMANDS = ("set_pool", "make_state", "drop_state", "put_away_weights", "take_back_weights")
CLOSE = "close"  # listeners hear it when the runner closes; it is no command


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

    It compiles once `set_pool` has told it the size of the pool, is told its weights by
    `weights.set`, and serves after `warm_up`.

    Args:
        config: of the engine.
        model_config: the model's configuration.
        models: of each stage, in order, their parameters `jax.ShapeDtypeStruct`s with shardings.
        stages: their layers and devices.
        cache: the KV cache, whose pages `set_pool` settles, and the kernels of this device kind.
        beside: bytes of each device that others have, such as an encoder.

    Attributes:
        cache: the KV cache, without pages before `set_pool`.
        weights: of all stages.
        stages: what each has on its devices; the last one gives the results.
        controls: the programs beside the step.
        facts: of the engine, for its features.
        features: of the engine, in their order.
        num_stages: of layers, each of which can work on another step.
        ropes: of the model.
        num_drafts: most tokens that a decode row may compute beside its newest one.
        drafts_for: see `Feature.drafts_for`; None without drafts.
        first_runs: seconds that programs took to run idle while it was warmed up.
    """

    def __init__(
        self,
        config: ResolvedConfig,
        model_config: ModelConfig,
        models: Sequence[Model],
        stages: Sequence[Stage],
        cache: KVCache,
        *,
        beside: int = 0,
    ):
        self._beside, self._mesh, self.num_stages = beside, stages[-1].mesh, len(stages)
        scheduler, self._settings = config.scheduler, config.programs
        dtype = jnp.dtype(config.model.dtype)
        self._itemsize, self._model_config = dtype.itemsize, model_config
        self.cache = cache
        self._backends = backends = cache.backends
        self._max_num_seqs = scheduler.max_num_seqs
        self._max_model_len = scheduler.max_model_len
        is_cpu = cache.platform == "cpu"
        self.weights = DeviceWeights(models, mapped=config.asked.offloaded_bytes if is_cpu else 0)
        options = step_options(
            cache.platform,
            backends,
            graph_collectives=config.asked.graph_collectives,
            streams=self.weights.host_bytes > 0,
        )
        if (uncovered := uncovered_experts(models[-1])) is not None:
            logger.warning("experts are multiplied by XLA, block after block: %s", uncovered)
        self._working = working_bytes(models[-1], backends.matmul, self._itemsize, self._mesh.size)
        most, vocab_size = config.asked.max_logprobs, model_config.vocab_size
        num_logprobs = min(most if most >= 0 else vocab_size, vocab_size)
        if most < 0:
            row = 8 * num_logprobs
            logger.warning("max_logprobs=-1: each reported row brings %d bytes to the host", row)
        self.max_prefill_tokens = scheduler.max_prefill_tokens
        self.max_lanes = lanes_for(self.max_prefill_tokens, self._max_num_seqs)
        self.facts = facts = Facts(
            model_config.vocab_size,
            num_logprobs,
            model_config.hidden_size,
            self.max_prefill_tokens,
            model_config,
            draws_on(self._mesh, backends, apart=backends.row_invariant and is_cpu),
            config.asked.deterministic,
            self._max_num_seqs,
        )
        self._asked_offload = config.asked.cpu_offload_gb
        own = asked_features(config.asked, ALL_NAMES)
        provided = make_features(facts, partial(getattr, config.asked))
        self.features = (*provided, *(made(choice, facts) for choice in own))
        if self.weights.host_bytes:
            refuse_inside_layers(self.features, self._asked_offload)
        self.ropes = model_config.ropes
        self._fed = [f for f in self.features if overrides(f, "step_buffers")]
        self.packer = RowPacker(self._max_num_seqs, self.features, brings_tokens=len(stages) > 1)
        defaults = device_defaults(cache.platform)
        drafting = the_drafting(self.features)
        self.num_drafts = drafting.num_drafts if drafting else 0
        self.drafts_for = drafting.drafts_for if drafting else None
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
        self._flops_per_token = 2.0 * sum(leaf.size for leaf in self.weights.leaves)
        self.first_runs: dict[StepShape, float] = {}
        numbers = self._flops_per_token / defaults.flops_per_number
        self._cost = partial(predicted_cost, features=self.features, numbers_per_token=numbers)
        self.programs = ProgramTable(self._shapes, self.compile_program, self._cost)
        self.controls = Controls(cache, self._max_num_seqs, config.cache.num_host_pages)
        self._listener: Callable[[Command], None] | None = None
        self._num_commands = 0
        self._buffers = DeviceBuffers(self.features, self._mesh)
        self._death: tuple[str, BaseException | None] | None = None  # why, and what was raised
        self.stages: list[DeviceStage] = []
        for stage, part in zip(stages, self.weights.stages, strict=True):
            buffers = self._buffers if stage.is_last else DeviceBuffers([], stage.mesh)
            of_stage = stage, part, self.weights, buffers, model_config
            compiler = StepCompiler(*of_stage, facts, dtype, options, self.check_alive)
            self.stages.append(DeviceStage(compiler, traces=backends.interpret is not None))
        if len(stages) > 1:
            refuse_inside_the_model(self.features, config.asked)

    @property
    def state(self) -> DeviceState | None:
        """The device state of the last stage; the next command takes it away."""
        return self.stages[-1].state

    @property
    def page_groups(self) -> PageGroups:
        """What the pages of its groups of layers have to do with its steps."""
        in_flight = 2 * (1 + self.num_drafts)
        return replace(self.cache.groups.pages, ahead=self.max_prefill_tokens + in_flight)

    @property
    def step_flops(self) -> StepFlops:
        """What counts the operations of its steps; once the pool is set."""
        config = self._model_config
        per_pair = 4.0 * config.num_heads * config.head_dim * config.num_layers
        return StepFlops(self._flops_per_token, per_pair, self._max_model_len)

    def model(self) -> Model:
        """The model with its parameters.

        Raises:
            ValidationError: it is in parts, see `require_one_process`.
        """
        self.check_alive()
        self.require_one_process("parameters outside the engine")
        return self.weights.model()

    def require_one_process(self, what: str) -> None:
        """Raises ValidationError where no command tells it to all stages and processes."""
        if self.num_stages > 1:
            raise ValidationError("pipeline_parallel_size", self.num_stages, f"1 for {what}")
        count = len({device.process_index for device in self._mesh.devices.flat})
        if count > 1:
            raise ValidationError("num_processes", count, f"1 for {what}")

    def demand(self) -> Demand:
        """What a device needs beside KV pages; the temporaries are a bound."""
        # the first two programs are the largest: every slot, every region token, every feature
        layouts_of = self.stages[-1].compiler.layouts
        layouts = [layouts_of(shape, self.features, self.cache) for shape in self._shapes[:2]]
        return Demand(
            weights=self.weights.unmapped_bytes + self._beside,
            tables=self.state_shape().table_bytes + self._buffers.device_bytes,
            transfers=2 * 4 * max(blob.size + result.size for blob, result in layouts)
            + self.controls.moving_pages * self.cache.page_bytes(self._mesh.shape["model"]),
            temporaries=self._working
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
        self._tell("set_pool", (num_pages, max_model_len))
        self.cache, self._max_model_len = self.cache.with_pages(num_pages), max_model_len
        self.programs = ProgramTable(self._shapes, self.compile_program, self._cost)

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
        self._buffers.make(self.stages[-1].compiler.beside)
        self.programs.compile_ahead(self._settings.compile_ahead, progress)
        for program in self.programs.programs:
            self.first_runs[program.layout.shape] = self._idle_run(program)
        for stage in self.stages:
            stage.controls = self.controls.compiled(stage.compiler, self.state_shape())
        for name, blob in self.controls.idle():
            self._call_control(name, blob)
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
        if self.weights.host_bytes:
            refuse_inside_layers(features, self._asked_offload)
        self.features = (*self.features, *features)
        self.packer.add(features)
        self.stages[-1].more.add(features)

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
        self.stages[-1].more.put(feature, tree)

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
            for command, operand in self.controls.before(plan):
                self.run(command, operand)
        for feature in self._fed:
            if feature.name in step.needs.features:
                arrays = feature.step_buffers(self.packer.chunks(plan, step.needs))
                if arrays is not None:
                    self.write_rows(feature.name, 0, arrays)
        result = self._send(step.program.layout.shape.name, step.program, step.packed.blob)
        return StepInFlight(plan, step, *result)

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
        if program in self.stages[-1].controls or program in self._buffers:
            return self._send(program, None, operand)
        return self._send(program, self.programs.named(program), operand)

    def _tell(self, name: str, operand: Sequence[int] | np.ndarray = ()) -> None:
        if self._listener is not None:
            self._listener(Command(self._num_commands, name, np.asarray(operand, np.int32)))
        self._num_commands += 1

    def _send(self, name: str, program: Program | None, operand: np.ndarray) -> Any:
        self._tell(name, operand)
        try:
            if name in self._buffers:
                self._buffers.run(name, self.stages[-1].placed(operand))
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
        """Free the parameters on the devices, see `DeviceWeights.put_away`."""
        self._tell("put_away_weights", (keep,))
        self.weights.put_away(keep=keep)

    def take_back_weights(self) -> None:
        """Have the parameters that were put away on the devices again."""
        self._tell("take_back_weights")
        self.weights.take_back()

    def drop_state(self) -> None:
        """Give back the memory of pages and tables. Nothing may run or be found afterwards."""
        self._tell("drop_state")
        self._drop_states()

    def make_state(self) -> None:
        """Pages and tables of nothing, on the devices."""
        self._tell("make_state")
        for stage in self.stages:
            stage.make_state(self.state_shape())

    def close(self) -> None:
        """Stop background compilation and give back device memory.

        A program that is being traced is waited for, one that the compiler has is not.
        """
        self._tell(CLOSE)
        self.programs.close()
        if self._death is None:
            self._death = "the engine was closed: make a new one", None
        self.weights.close()  # after `check_alive` raises: see there
        for stage in self.stages:
            stage.close()
        self._buffers.close()
        self.controls.close()

    def compile_program(self, shape: StepShape) -> Program:
        """Compile the step for one shape, ahead of time."""
        state = self.state_shape(shape.on_demand)
        parts = [one.compiler.program(shape, self.features, state) for one in self.stages]
        before, most = [one.call for one in parts[:-1]], max(one.device_bytes for one in parts)
        return parts[-1]._replace(before=tuple(before), device_bytes=most)

    def _call(self, program: Program, blob: np.ndarray) -> Any:
        """Dispatch a step: what the last stage's program returns beside the state."""
        passed: Any = None
        *before, last = self.stages
        with self._all_or_none():
            for stage, call in zip(before, program.before, strict=True):
                passed, _ = stage.run(call, blob, passed)
            return last.run(program.call, blob, passed, program.layout.shape.on_demand)

    def _call_control(self, name: str, blob: np.ndarray) -> None:
        with self._all_or_none():
            for stage in self.stages:
                stage.control(name, blob)

    @contextmanager
    def _all_or_none(self) -> Iterator[None]:
        """Within, all stages are given a command; where one of several fails, none has a state."""
        try:
            yield
        except BaseException:
            if self.num_stages > 1:
                self._drop_states()
            raise

    def _drop_states(self) -> None:
        for stage in self.stages:
            stage.drop_state()

    def _die(self, name: str, error: BaseException) -> EngineDeadError:
        """Give up after a failed step: what the device held for requests cannot be trusted."""
        self._drop_states()
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
