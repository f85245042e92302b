"""From an engine configuration to a warmed-up engine: decide, load weights, compile."""

from __future__ import annotations

import gc
import itertools
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxserve.compilation import compilation_cache
from jaxserve.config.engine_config import EngineConfig
from jaxserve.config.resolved_config import ResolvedConfig
from jaxserve.engine.loop import Engine
from jaxserve.errors import ValidationError
from jaxserve.execution.features import ALL_NAMES
from jaxserve.execution.features.own_features import asked_features
from jaxserve.execution.host_memory import check_limits, trim
from jaxserve.execution.runner import Runner
from jaxserve.execution.step_shape import StepShape
from jaxserve.grammars.compiler import GrammarCompiler
from jaxserve.loading.cold_tier import cold_store
from jaxserve.loading.engine_plan import EnginePlan, choose, decide, fetch_weights
from jaxserve.loading.hub import ModelFiles, locate
from jaxserve.loading.load_progress import LoadProgress
from jaxserve.loading.move_costs import measure_costs
from jaxserve.loading.process_group import ProcessGroup
from jaxserve.memory.host_tier import HostTier
from jaxserve.memory.manager import PageManager
from jaxserve.memory.tier import Tier
from jaxserve.models import Model
from jaxserve.models.cost import ModelCost
from jaxserve.models.weights import load_model
from jaxserve.observability.busy_window import BusyWindow
from jaxserve.parallel.mesh import make_mesh, own_part
from jaxserve.parallel.stages import Stage, stages_of
from jaxserve.scheduling.client_turns import ClientTurns
from jaxserve.scheduling.policies import PolicyInputs, make_policy
from jaxserve.scheduling.scheduler import Scheduler
from jaxserve.scheduling.step_limits import SchedulerLimits
from jaxserve.tokenization.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


class Footprint(NamedTuple):
    """Bytes that decode steps move, for benchmarks.

    Attributes:
        weight_bytes: parameters that every step reads, the input embedding table left out.
        kv_bytes_per_token: keys and values of one token over all layers.
    """

    weight_bytes: int
    kv_bytes_per_token: int


class LoadedEngine(NamedTuple):
    """An engine that is ready, and what was decided on the way."""

    engine: Engine
    decided: EnginePlan
    tokenizer: Tokenizer | None
    footprint: Footprint
    seconds: float
    page_bytes: int  # of one KV page over all devices


def load_engine(
    config: EngineConfig,
    *,
    progress: Callable[[str], Any] = logger.info,
    with_tokenizer: bool = True,
    keep_steps: bool = False,
    shown: bool = True,
    on_lost: Callable[[str], None] | None = None,
) -> LoadedEngine:
    """Load weights, plan memory, compile and warm up.

    Args:
        config: what the user asked for.
        progress: told one line a phase.
        with_tokenizer: False: the client is elsewhere, and so is the tokenizer.
        keep_steps: do not trace what an earlier start has traced (`lowered_step_cache.py`).
        shown: whether a start that takes long says in between what it is doing.
        on_lost: of an engine of several processes, see `ProcessGroup`; None: its next step raises
            EngineDeadError.

    Raises:
        ValidationError: settings that the model or the device cannot serve.
        HubError: the model is neither a folder nor can it be fetched.
        checkpoints.CheckpointError: weights that cannot be read or do not fit the model.
    """
    start = time.monotonic()
    gc.unfreeze()  # an engine that was dropped without `close` can be collected again
    with LoadProgress(progress, shown=shown) as report:
        cache_folder = compilation_cache.use(config.compilation_cache)
        # classes are imported before anything is fetched
        make_policy(config)
        asked_features(config, ALL_NAMES)
        with _others(config, report, on_lost) as others:
            files = _found(config, report)
            mesh = make_mesh(config.tensor_parallel_size, config.pipeline_parallel_size)
            _require_own_devices(config, mesh)
            decided, runner, tokenizer = decide(
                config, files, mesh, report, with_tokenizer=with_tokenizer
            )
            if others is not None:
                others.settle(decided, files)
                if on_lost is None:  # from here on, since `build` runs steps with the others
                    others.on_lost = runner.lose
            engine = build(
                decided,
                mesh,
                report,
                runner=runner,
                tokenizer=tokenizer,
                others=others,
                cache_folder=cache_folder,
                keep_steps=keep_steps and others is None,
            )
    # hundreds of thousands of objects live as long as the engine; a collection that walks them
    # stops it for tenths of a second. What is garbage already would never be freed.
    gc.collect()
    gc.freeze()
    trim()
    footprint, seconds = _footprint(decided, mesh, runner), time.monotonic() - start
    page_bytes = runner.cache.page_bytes(1) * mesh.shape["stage"]
    return LoadedEngine(engine, decided, tokenizer, footprint, seconds, page_bytes)


@contextmanager
def _others(
    config: EngineConfig, report: LoadProgress, on_lost: Callable[[str], None] | None
) -> Iterator[ProcessGroup | None]:
    """The other processes of an engine, which are told where it cannot be built; None: none."""
    if config.num_processes == 1:
        yield None
        return
    with report.phase("waiting for the other processes"):
        others = ProcessGroup(config, on_lost or logger.error)
    try:
        yield others
    except BaseException as error:
        others.refuse(error)
        raise


def _require_own_devices(config: EngineConfig, mesh: Mesh) -> None:
    """Raises ValidationError where engines beside each other would all take the same devices."""
    platform, engines = mesh.devices.flat[0].platform, config.data_parallel_size
    if engines == 1 or platform == "cpu":
        return
    allowed = f"1 on devices of the kind {platform}, which one process takes all of"
    if platform == "gpu":
        if len(jax.local_devices()) == mesh.size:
            return
        allowed = "1 where CUDA_VISIBLE_DEVICES is not set and the driver does not list its GPUs"
    raise ValidationError("data_parallel_size", engines, allowed)


def build(
    decided: EnginePlan,
    mesh: Mesh,
    report: LoadProgress,
    *,
    runner: Runner | None = None,
    tokenizer: Tokenizer | None = None,
    tier: Tier | None = None,
    others: ProcessGroup | None = None,
    cache_folder: Path | None = None,
    keep_steps: bool = False,
) -> Engine:
    """The engine that was decided, warmed up: nothing more is decided here.

    Args:
        decided: by this process or another one.
        mesh: as the one that it was decided for.
        report: told one line a phase.
        runner: that memory was planned with; made anew when None.
        tokenizer: of the model; read for the first grammar when None.
        tier: where cached pages go that would be forgotten; None: a `HostTier`, where there are
            `CacheSettings.num_host_pages`.
        others: the processes that do what this one does, from when it is warm.
        cache_folder: of compiled programs, from `compilation_cache.use`.
        keep_steps: see `load_engine`.

    Raises:
        checkpoints.CheckpointError: weights that cannot be read.
    """
    config, asked = decided.config, decided.config.asked
    if runner is None:
        runner = decided.runner(mesh)
        runner.set_pool(config.cache.num_pages, config.scheduler.max_model_len)
    load = partial(load_stages, decided, mesh)
    runner.weights.set(load(report), partial(load, LoadProgress(logger.info, shown=False)))
    busy = BusyWindow()
    num_host_pages = config.cache.num_host_pages
    own = None
    if num_host_pages and tier is None:
        own = HostTier(num_host_pages, cold=cold_store(decided, runner))
    scheduler = _make_scheduler(config, runner, busy, tier if own is None else own)
    if own is not None:
        runner.controls.landing = own
        own.is_told = True
    if keep_steps and mesh.shape["stage"] == 1:
        of_engine = decided.of_steps, runner.features, decided.backends
        runner.stages[-1].compiler.keep_steps(cache_folder, *of_engine)
    _compile(runner, config, cache_folder, report)
    encoder = None
    if decided.has_encoder:
        with report.phase("loading the encoder"):
            encoder = decided.encoder(own_part(mesh), loaded=True)
            encoder.warm_up()
    grammars = None
    if not asked.skip_tokenizer_init:
        grammars = GrammarCompiler(
            lambda: tokenizer or Tokenizer(decided.tokenizer_path), decided.model
        )
    cost = None
    if asked.enable_mfu_metrics:
        footprint = _footprint(decided, mesh, runner)
        cost = ModelCost(decided.model, *footprint, devices=mesh.size)
    overlap = asked.overlap
    engine = Engine(
        scheduler, runner, overlap=overlap, grammars=grammars, cost=cost, busy=busy, encoder=encoder
    )
    if others is not None:
        others.serve(runner)
    if own is not None:
        _settle(own, engine, report, preload=asked.kv_offloading_preload)
    return engine


def load_bare(config: EngineConfig) -> tuple[Model, ModelFiles]:
    """The model of a configuration as an engine would have it, without engine or KV cache.

    Raises:
        ValidationError, HubError, CheckpointError: as `load_engine`.
    """
    with LoadProgress(logger.info) as report:
        decided, files, mesh = decide_bare(config, report)
        return load_weights(decided, mesh, report), files


def decide_bare(
    config: EngineConfig, report: LoadProgress, *, in_memory: bool = True
) -> tuple[EnginePlan, ModelFiles, Mesh]:
    """How an engine would have the model of a configuration, whose weights are fetched.

    Args:
        config: the settings.
        report: told one line a phase.
        in_memory: whether there has to be room for all weights at once.

    Raises:
        ValidationError, HubError, CheckpointError: as `load_engine`.
    """
    for field in ("num_processes", "pipeline_parallel_size"):
        if getattr(config, field) != 1:
            raise ValidationError(field, getattr(config, field), "1 without an engine")
    files = _found(config, report)
    mesh = make_mesh(config.tensor_parallel_size)
    if config.offloaded_bytes and mesh.devices.flat[0].platform != "cpu":
        allowed = "none without an engine, whose steps bring weights from the host's memory"
        raise ValidationError("cpu_offload_gb", config.cpu_offload_gb, allowed)
    if config.load_format != "dummy":
        fetch_weights(files, report)
    return choose(config, files, mesh, report, in_memory=in_memory), files, mesh


def _found(config: EngineConfig, report: LoadProgress) -> ModelFiles:
    """Where the model's files are, in a process that has room for an engine."""
    with report.phase("finding the model") as told:
        files = locate(config, told=told)
    check_limits()
    return files


def load_stages(decided: EnginePlan, mesh: Mesh, report: LoadProgress) -> list[Model]:
    """A model of each stage with its weights, in order."""
    stages = stages_of(mesh, decided.model.num_layers)
    return [load_weights(decided, one.mesh, report, one) for one in stages]


def load_weights(
    decided: EnginePlan, mesh: Mesh, report: LoadProgress, stage: Stage | None = None
) -> Model:
    """The weights, of the checkpoint or made up; of a stage alone where one is given."""
    begin = time.monotonic()
    asked = decided.config.asked
    with report.phase("loading weights") as told:
        weights = load_model(
            decided.model_path,
            decided.model,
            mesh=mesh,
            dtype=decided.config.model.dtype,
            load_format=asked.load_format,
            seed=asked.seed,
            form=decided.form,
            plan=decided.plan,
            mapped=bool(asked.offloaded_bytes) and not decided.streamed,
            streamed=decided.streamed,
            stage=stage,
            told=told,
        )
    report.say(f"loaded {asked.model} in {time.monotonic() - begin:.1f} s")
    return weights


def _make_scheduler(
    config: ResolvedConfig, runner: Runner, busy: BusyWindow, tier: Tier | None
) -> Scheduler:
    settings, cache = config.scheduler, config.cache
    limits = SchedulerLimits(
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        max_prefill_tokens=runner.max_prefill_tokens,
        max_lanes=runner.max_lanes,
        max_model_len=settings.max_model_len,
        num_drafts=runner.num_drafts,
        num_groups=config.asked.pipeline_parallel_size if config.asked.overlap else 1,
    )
    pages = PageManager(
        cache.num_pages,
        cache.page_size,
        caching=config.asked.enable_prefix_caching,
        tier=tier,
        groups=runner.page_groups,
    )
    inputs = PolicyInputs(
        num_found=lambda request: pages.tokens_in(len(pages.find(request))),
        device_busy=busy.fraction,
    )
    resources = [feature.resource for feature in runner.features if feature.resource is not None]
    turns = ClientTurns(partial(make_policy, config.asked, inputs))
    return Scheduler(limits, pages, turns, resources, runner.drafts_for)


def _compile(
    runner: Runner, config: ResolvedConfig, cache_folder: Path | None, report: LoadProgress
) -> None:
    """The programs that are wanted before the engine is ready."""
    begin = time.monotonic()
    wanted = min(config.programs.compile_ahead, len(runner.programs.wanted))
    with report.phase("compiling", "programs") as told:
        told(0, wanted)
        done = itertools.count(1)

        def compiled(shape: StepShape) -> None:
            logger.debug("compiled %s", shape.name)
            told(next(done), wanted)

        runner.warm_up(compiled)
    kept = f"kept in {cache_folder}" if cache_folder else "kept nowhere"
    programs = len(runner.programs.programs)
    report.say(f"compiled {programs} programs in {time.monotonic() - begin:.1f} s ({kept})")


def _settle(tier: HostTier, engine: Engine, report: LoadProgress, *, preload: bool) -> None:
    """Measure whether cached pages are sooner moved or computed, and have the tier know.

    Args:
        tier: of the engine; files may fill its pages from now on.
        engine: that has served nothing yet.
        report: told what was measured.
        preload: whether files fill its pages now.
    """
    host_pages = engine.runner.controls.host_pages
    assert host_pages is not None
    tier.fill = host_pages.fill
    with report.phase("measuring moves of pages"):
        costs = tier.costs = measure_costs(engine)
    moved, computed = costs.call_seconds / costs.pages, costs.recompute_seconds
    verdict = "pages come back" if costs.may_pay else "pages are computed again"
    if costs.most_spared:
        verdict = f"with up to {costs.most_spared:.2g} others that it spares, {verdict}"
    report.say(
        f"host memory: {tier.stats().num_host_pages} KV pages; a page is moved back in "
        f"{1e3 * moved:.3g} ms and computed in {1e3 * computed:.3g} ms: {verdict}"
    )
    if preload:
        with report.phase("reading files of pages"):
            count = tier.preload()
        report.say(f"read {count} KV pages of files")


def _footprint(decided: EnginePlan, mesh: Mesh, runner: Runner) -> Footprint:
    model, settings = decided.model, decided.config.model
    weights = runner.weights.device_bytes * mesh.size + runner.weights.host_bytes
    if not model.tie_word_embeddings or settings.quantization == "int8":  # a head of its own
        weights -= model.vocab_size * model.hidden_size * jnp.dtype(settings.dtype).itemsize
    return Footprint(weights, runner.cache.token_bytes)
