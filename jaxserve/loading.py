"""From an engine configuration to a warmed-up engine: model, memory plan, programs."""

from __future__ import annotations

import gc
import itertools
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxserve.choices import Choices, as_stored, as_weights_say, choose, fetch_weights
from jaxserve.config import EngineConfig
from jaxserve.engine.loop import Engine
from jaxserve.errors import ValidationError
from jaxserve.execution import compilation_cache
from jaxserve.execution.features import ALL_NAMES
from jaxserve.execution.features.named import FeatureChoice, chosen_features
from jaxserve.execution.host_memory import check_limits, trim
from jaxserve.execution.pool_plan import Sizes, plan_pool
from jaxserve.execution.runner import Runner
from jaxserve.execution.shapes import StepShape
from jaxserve.generation_defaults import generation_defaults
from jaxserve.grammars.compiler import GrammarCompiler
from jaxserve.hub import ModelFiles, locate
from jaxserve.load_progress import LoadProgress
from jaxserve.memory.manager import PageManager
from jaxserve.models import Model
from jaxserve.models.config import ModelConfig
from jaxserve.models.cost import ModelCost
from jaxserve.models.kv_cache import KVCache, KVScales
from jaxserve.models.kv_scales import read_kv_scales
from jaxserve.models.layer_groups import LayerGroups
from jaxserve.models.stored import read_scales
from jaxserve.models.weights import abstract_model, load_model
from jaxserve.observability.busy_window import BusyWindow
from jaxserve.parallel.mesh import make_mesh
from jaxserve.resolved import ResolvedConfig
from jaxserve.scheduling.client_turns import ClientTurns
from jaxserve.scheduling.limits import SchedulerLimits
from jaxserve.scheduling.policies import PolicyInputs, make_policy
from jaxserve.scheduling.scheduler import Scheduler
from jaxserve.tokenization.tokenizer import Tokenizer, template_text
from pallas_kernels import Backends

logger = logging.getLogger(__name__)


class Footprint(NamedTuple):
    """Bytes that decode steps move, for benchmarks.

    Attributes:
        weight_bytes: parameters that every step reads, the input embedding table left out.
        kv_bytes_per_token: keys and values of one token over all layers.
    """

    weight_bytes: int
    kv_bytes_per_token: int


class Loaded(NamedTuple):
    """An engine that is ready, and what was decided on the way."""

    engine: Engine
    config: ResolvedConfig
    model_config: ModelConfig
    tokenizer: Tokenizer | None
    backends: Backends
    footprint: Footprint
    seconds: float
    files: ModelFiles
    page_bytes: int  # of one KV page over all devices


def load_engine(
    config: EngineConfig,
    *,
    progress: Callable[[str], Any] = logger.info,
    devices: list[jax.Device] | None = None,
    backends: Backends | None = None,
    with_tokenizer: bool = True,
    keep_steps: bool = False,
    shown: bool = True,
) -> Loaded:
    """Load weights, plan memory, compile and warm up.

    Args:
        config: what the user asked for.
        progress: told one line a phase.
        devices: devices to use; all of the default platform when None.
        backends: kernels to use; chosen from the device and `config` when None.
        with_tokenizer: False: the client is elsewhere, and so is the tokenizer.
        keep_steps: do not trace what an earlier start has traced, see `execution/kept_steps.py`.
        shown: whether a start that takes long says in between what it is doing.

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
        features = chosen_features(config.features, config.feature_config, ALL_NAMES)
        with report.phase("finding the model") as told:
            files = locate(config, told=told)
        asked = as_stored(replace(config, hf_token=None), files)
        check_limits()
        mesh = make_mesh(asked.tensor_parallel_size, devices)
        # all that can be refused is refused before the weights: they cost minutes and gigabytes
        if asked.chat_template is not None:
            template_text(asked.chat_template)
        choices = choose(asked, files, mesh, backends, report)
        wants_text = with_tokenizer and not asked.skip_tokenizer_init
        tokenizer = Tokenizer(files.tokenizer, asked.chat_template) if wants_text else None
        sampling_defaults = generation_defaults(asked, files.model)
        with report.phase("planning memory"):
            runner, kv_cache = _make_runner(asked, choices, files, mesh, features)
            resolved = _plan_memory(asked, choices, mesh, runner, kv_cache, report)
        if resolved.asked.load_format != "dummy" and not files.weights_are_here:
            fetch_weights(files, report)
            if as_weights_say(files, choices.model) != choices.model:
                choices = choose(asked, files, mesh, backends, report)
                runner, kv_cache = _make_runner(asked, choices, files, mesh, features)
                resolved = _plan_memory(asked, choices, mesh, runner, kv_cache, report)
        resolved = resolved.with_sampling_defaults(sampling_defaults)
        resolved = resolved.with_features(tuple(kind.name for kind, _ in features))
        load = partial(_load_weights, resolved, choices, files, mesh)
        again = partial(load, LoadProgress(progress, shown=False))
        runner.set_weights(load(report), again)
        busy = BusyWindow()
        scheduler = _make_scheduler(resolved, runner, busy)
        if keep_steps:
            runner.keep_steps(cache_folder)
        _compile(runner, resolved, cache_folder, report)
    grammars = None
    if not asked.skip_tokenizer_init:
        grammars = GrammarCompiler(lambda: tokenizer or Tokenizer(files.tokenizer), choices.model)
    footprint = _footprint(resolved, choices.model, mesh, runner, kv_cache)
    cost = None
    if asked.enable_mfu_metrics:
        cost = ModelCost(choices.model, *footprint, devices=mesh.size)
    overlap = resolved.asked.overlap
    engine = Engine(scheduler, runner, overlap=overlap, grammars=grammars, cost=cost, busy=busy)
    # hundreds of thousands of objects live as long as the engine; a collection that walks them
    # stops it for tenths of a second. What is garbage already would never be freed.
    gc.collect()
    gc.freeze()
    trim()
    seconds = time.monotonic() - start
    return Loaded(
        engine,
        resolved,
        choices.model,
        tokenizer,
        choices.backends,
        footprint,
        seconds,
        files,
        kv_cache.page_bytes(1),
    )


def load_bare(
    config: EngineConfig, *, progress: Callable[[str], Any] = logger.info
) -> tuple[Model, ModelFiles]:
    """The model of a configuration as an engine would have it, without engine or KV cache.

    Raises:
        ValidationError, HubError, CheckpointError: as `load_engine`.
    """
    with LoadProgress(progress) as report:
        with report.phase("finding the model") as told:
            files = locate(config, told=told)
        asked = as_stored(replace(config, hf_token=None), files)
        check_limits()
        mesh = make_mesh(asked.tensor_parallel_size)
        if asked.load_format != "dummy":
            fetch_weights(files, report)
        choices = choose(asked, files, mesh, None, report)
        return _load_weights(choices.config, choices, files, mesh, report), files


def _make_runner(
    asked: EngineConfig,
    choices: Choices,
    files: ModelFiles,
    mesh: Mesh,
    features: Sequence[FeatureChoice],
) -> tuple[Runner, KVCache]:
    """A runner that knows shapes alone, and the cache whose pages it will have."""
    config = choices.config
    groups = LayerGroups.one(choices.model.num_layers)
    if asked.keep_window_only:
        groups = LayerGroups.by_window(choices.model, config.scheduler.max_model_len)
    kv_cache = KVCache.of(
        choices.model,
        choices.kv_format,
        choices.backends,
        platform=mesh.devices.flat[0].platform,
        page_size=config.cache.page_size,
        scales=_kv_scales(asked, config, files, choices),
        groups=groups,
    )
    model = abstract_model(choices.model, mesh, config.model.dtype, choices.form, choices.plan)
    return Runner(config, choices.model, model, mesh, kv_cache, features), kv_cache


def _plan_memory(
    asked: EngineConfig,
    choices: Choices,
    mesh: Mesh,
    runner: Runner,
    kv_cache: KVCache,
    report: LoadProgress,
) -> ResolvedConfig:
    """Pages and context for the memory that there is."""
    begin = time.monotonic()
    page_bytes = kv_cache.page_bytes(mesh.shape["model"])
    sizes = Sizes(asked, choices.config, page_bytes, runner)
    resolved = plan_pool(sizes, list(mesh.devices.flat))
    cache, scheduler = resolved.cache, resolved.scheduler
    longest = runner.page_groups.most_held(scheduler.max_model_len, cache.page_size)
    report.say(
        f"KV cache: {cache.num_pages} pages of {cache.page_size} tokens and "
        f"{kv_cache.groups.layers_per_page} layers, {kv_cache}, "
        f"max_model_len {scheduler.max_model_len}, of which {(cache.num_pages - 1) // longest} fit "
        f"at once, max_num_seqs {scheduler.max_num_seqs} "
        f"(planned in {time.monotonic() - begin:.1f} s)"
    )
    return resolved


def _load_weights(
    config: ResolvedConfig,
    choices: Choices,
    files: ModelFiles,
    mesh: Mesh,
    report: LoadProgress,
) -> Model:
    """The weights, of the checkpoint or made up."""
    begin = time.monotonic()
    settings, asked = config.model, config.asked
    if asked.load_format != "dummy":
        fetch_weights(files, report)
    with report.phase("loading weights") as told:
        weights = load_model(
            files.model,
            choices.model,
            mesh=mesh,
            dtype=settings.dtype,
            load_format=asked.load_format,
            seed=asked.seed,
            form=choices.form,
            plan=choices.plan,
            told=told,
        )
    report.say(f"loaded {asked.model} in {time.monotonic() - begin:.1f} s")
    return weights


def _make_scheduler(config: ResolvedConfig, runner: Runner, busy: BusyWindow) -> Scheduler:
    settings, cache = config.scheduler, config.cache
    limits = SchedulerLimits(
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        max_prefill_tokens=runner.max_prefill_tokens,
        max_lanes=runner.max_lanes,
        max_model_len=settings.max_model_len,
        num_drafts=runner.num_drafts,
    )
    pages = PageManager(
        cache.num_pages,
        cache.page_size,
        caching=config.asked.enable_prefix_caching,
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
    runner: Runner,
    config: ResolvedConfig,
    cache_folder: Path | None,
    report: LoadProgress,
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


def _kv_scales(
    asked: EngineConfig, config: ResolvedConfig, files: ModelFiles, choices: Choices
) -> KVScales | None:
    """The scales of the KV cache, where the format wants some: programs hold them."""
    if not choices.kv_format.static_scales:
        return None
    scales, layers = None, choices.model.num_layers
    if asked.kv_cache_scales is not None:
        scales = read_kv_scales(asked.kv_cache_scales, layers)
        if scales is None:
            raise ValidationError(
                "kv_cache_scales",
                asked.kv_cache_scales,
                "a file with self_attn.k_scale and v_scale",
            )
    elif config.asked.load_format != "dummy":
        files.fetch_weights()
        scales = read_scales(files.model, layers)
    if scales is None:
        logger.warning(
            "kv_cache_dtype=%s: the checkpoint has no scales (self_attn.k_scale and v_scale of "
            "each layer), so keys and values are stored as they are, cut off at 448; `jaxserve "
            "calibrate-kv` makes some for kv_cache_scales",
            config.asked.kv_cache_dtype,
        )
    return scales


def _footprint(
    config: ResolvedConfig, model: ModelConfig, mesh: Mesh, runner: Runner, kv_cache: KVCache
) -> Footprint:
    itemsize = jnp.dtype(config.model.dtype).itemsize
    weights = runner.weight_bytes * mesh.shape["model"]
    if not model.tie_word_embeddings or config.model.quantization == "int8":  # a head of its own
        weights -= model.vocab_size * model.hidden_size * itemsize
    return Footprint(weights, kv_cache.token_bytes)
