"""From an engine configuration to a warmed-up engine: model, memory plan, programs."""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from tqdm import tqdm

from jaxserve.config import EngineConfig
from jaxserve.engine import Engine
from jaxserve.errors import ValidationError
from jaxserve.execution import compilation_cache
from jaxserve.execution.defaults import resolve
from jaxserve.execution.memory_plan import (
    DEFAULT_HOST_CACHE_BYTES,
    CacheBudget,
    cache_budget,
    device_limit,
    page_bytes,
    plan_num_pages,
)
from jaxserve.execution.runner import Runner
from jaxserve.execution.shapes import StepShape
from jaxserve.memory.manager import PageManager
from jaxserve.models.config import ModelConfig
from jaxserve.models.layers import LinearForm
from jaxserve.models.weights import load_model
from jaxserve.parallel.mesh import make_mesh
from jaxserve.scheduling.scheduler import Scheduler, SchedulerLimits
from jaxserve.tokenization.tokenizer import Tokenizer
from pallas_kernels import (
    AttentionShape,
    Backends,
    KernelError,
    choose_backends,
    require_backend,
    storage_dtype,
)

logger = logging.getLogger(__name__)

MOST_PLANS = 3  # of the memory, each with two compilations


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
    config: EngineConfig
    model_config: ModelConfig
    tokenizer: Tokenizer | None
    footprint: Footprint
    seconds: float


def load_engine(
    config: EngineConfig,
    *,
    progress: Callable[[str], Any] = logger.info,
    devices: list[jax.Device] | None = None,
    backends: Backends | None = None,
) -> Loaded:
    """Load weights, plan memory, compile and warm up.

    Args:
        config: what the user asked for.
        progress: told one line a phase.
        devices: devices to use; all of the default platform when None.
        backends: kernels to use; chosen from the device and `config` when None.

    Raises:
        ValidationError: settings that the model or the device cannot serve.
        checkpoints.CheckpointError: weights that cannot be read or do not fit the model.
    """
    start = time.monotonic()
    gc.unfreeze()  # an engine that was dropped without `close` can be collected again
    cache = compilation_cache.use(config.compilation_cache)
    model_config = ModelConfig.from_folder(config.model)
    mesh = make_mesh(config.tensor_parallel_size, devices)
    device = mesh.devices.flat[0]
    resolved = resolve(config, model_config, device)
    backends = backends or _choose_backends(resolved, model_config, device)
    chosen = time.monotonic()  # native kernels are compiled at their first use on a machine
    progress(
        f"kernels: decode {backends.decode}, prefill {backends.prefill}, "
        f"linear {backends.linear} ({backends.reason}), after {chosen - start:.1f} s"
    )
    # before the weights: a folder without a tokenizer should not cost minutes to find out
    tokenizer = None if resolved.skip_tokenizer_init else Tokenizer(str(resolved.tokenizer))
    model = load_model(
        resolved.model,
        model_config,
        mesh=mesh,
        dtype=resolved.dtype,
        load_format=resolved.load_format,
        seed=resolved.seed,
        form=LinearForm.of(backends, resolved.quantization),
    )
    loaded = time.monotonic()
    progress(f"loaded {resolved.model} in {loaded - chosen:.1f} s")

    runner = Runner(resolved, model_config, model, mesh, backends)
    head_dim = backends.stored_head_dim(model_config.head_dim)
    longest = resolved.max_model_len
    resolved = _plan_memory(config, resolved, model_config, mesh, head_dim, runner)
    if resolved.max_model_len != longest:
        logger.warning(
            "max_model_len lowered from the model's %d to %d, what the KV cache holds",
            longest,
            resolved.max_model_len,
        )
    assert resolved.num_pages and resolved.max_model_len and resolved.block_size
    assert resolved.max_num_seqs and resolved.max_num_batched_tokens
    progress(
        f"KV cache: {resolved.num_pages} pages of {resolved.block_size} tokens, "
        f"max_model_len {resolved.max_model_len}, max_num_seqs {resolved.max_num_seqs} "
        f"(planned in {time.monotonic() - loaded:.1f} s)"
    )
    limits = SchedulerLimits(
        max_num_seqs=resolved.max_num_seqs,
        max_num_batched_tokens=resolved.max_num_batched_tokens,
        max_prefill_tokens=runner.max_prefill_tokens,
        max_lanes=runner.max_lanes,
        max_model_len=resolved.max_model_len,
    )
    scheduler = Scheduler(limits, PageManager(resolved.num_pages, resolved.block_size))
    compiling = time.monotonic()
    # a bar for people: none where standard error is a file
    assert resolved.compile_ahead
    wanted = min(resolved.compile_ahead, len(runner.programs.wanted))
    with tqdm(total=wanted, desc="compiling", disable=None, leave=False) as bar:

        def compiled(shape: StepShape) -> None:
            logger.debug("compiled %s", shape.name)
            bar.update()

        runner.warm_up(compiled)
    programs = len(runner.programs.programs)
    kept = f"kept in {cache}" if cache else "kept nowhere"
    progress(f"compiled {programs} programs in {time.monotonic() - compiling:.1f} s ({kept})")
    engine = Engine(scheduler, runner, overlap=resolved.overlap)
    footprint = _footprint(resolved, model_config, mesh, runner)
    # hundreds of thousands of objects live as long as the engine; a collection that walks them
    # stops it for tenths of a second. What is garbage already would never be freed.
    gc.collect()
    gc.freeze()
    seconds = time.monotonic() - start
    return Loaded(engine, resolved, model_config, tokenizer, footprint, seconds)


def _choose_backends(config: EngineConfig, model: ModelConfig, device: jax.Device) -> Backends:
    dtype = jnp.dtype(config.dtype)
    shape = AttentionShape(
        head_dim=model.head_dim,
        page_size=config.block_size,
        group=model.num_heads // model.num_kv_heads,
        pool_dtype=storage_dtype(dtype, device.platform),
        query_dtype=dtype,
        kv_heads=model.num_kv_heads // config.tensor_parallel_size,
    )
    chosen = choose_backends(device.device_kind, device.platform, shape)
    if config.tensor_parallel_size > 1:
        chosen = chosen.sharded()
    for operation in ("decode", "prefill", "linear"):
        asked = getattr(config, f"{operation}_backend")
        if asked is not None:
            try:
                require_backend(operation, asked, device.device_kind, device.platform, shape)
            except KernelError as error:
                raise ValidationError(f"{operation}_backend", asked, error.allowed) from error
            changed: dict[str, Any] = {operation: asked}
            if operation == "decode" and asked != chosen.decode_and_write:
                changed["decode_and_write"] = None
            if operation == "linear" and asked != "gpu":
                changed["residual_norm"] = None
            chosen = replace(chosen, **changed)
    return chosen


def _plan_memory(
    asked: EngineConfig,
    config: EngineConfig,
    model: ModelConfig,
    mesh: Mesh,
    head_dim: int,
    runner: Runner,
) -> EngineConfig:
    """Settle `num_pages`, give the runner its pool, lower an open `max_model_len` to what fits.

    `head_dim` is that of the pool. Where the device says how much memory it has, the plan takes a
    bound of the steps' temporaries, and the two largest programs are compiled to verify it. They
    serve; only if they need more than the bound left is the plan made, and they compiled, again.
    """
    heads = model.num_kv_heads // mesh.shape["model"]
    size = page_bytes(model.num_layers, config.block_size or 0, heads, head_dim, _itemsize(config))
    limit = device_limit(mesh.devices.flat[0])
    if config.num_pages is not None or config.kv_cache_memory_bytes is not None or limit is None:
        num_bytes = config.kv_cache_memory_bytes
        budget = CacheBudget(
            DEFAULT_HOST_CACHE_BYTES if num_bytes is None else num_bytes,
            "kv_cache_memory_bytes",
            num_bytes,
        )
        return _settle(asked, config, budget, size, runner)
    share = int(limit * config.gpu_memory_utilization)
    demand = runner.demand()
    logger.info("of %d bytes of device memory: %s", share, demand)
    held = sum(demand)
    for _ in range(MOST_PLANS):
        budget = cache_budget(
            limit_bytes=limit, utilization=config.gpu_memory_utilization, held_bytes=held
        )
        settled = _settle(asked, config, budget, size, runner)
        assert settled.num_pages
        needed = runner.compile_largest()
        if needed <= share:
            return settled
        held = needed - settled.num_pages * size
        logger.info("the compiled steps need %d bytes: planned again", needed)
    raise ValidationError(
        "gpu_memory_utilization",
        config.gpu_memory_utilization,
        f"the compiled steps need {needed} bytes, its share is {share}, after {MOST_PLANS} plans: "
        "set num_pages, or lower max_num_seqs or max_num_batched_tokens",
    )


def _settle(
    asked: EngineConfig, config: EngineConfig, budget: CacheBudget, size: int, runner: Runner
) -> EngineConfig:
    """Pages of `size` bytes for a budget, and the context that they hold."""
    assert config.max_model_len and config.max_num_seqs and config.block_size
    num_pages = config.num_pages
    if num_pages is None:
        num_pages = plan_num_pages(
            budget=budget,
            bytes_per_page=size,
            max_num_seqs=config.max_num_seqs,
            max_model_len=config.max_model_len,
            page_size=config.block_size,
        )
    fits = (num_pages - 1) * config.block_size
    if asked.max_model_len is None and config.max_model_len > fits:
        config = replace(config, max_model_len=fits)
    assert config.max_model_len
    runner.set_pool(num_pages, config.max_model_len)
    return replace(config, num_pages=num_pages)


def _itemsize(config: EngineConfig) -> int:
    return jnp.dtype(config.dtype).itemsize


def _footprint(config: EngineConfig, model: ModelConfig, mesh: Mesh, runner: Runner) -> Footprint:
    itemsize = _itemsize(config)
    weights = runner.weight_bytes * mesh.shape["model"]
    if not model.tie_word_embeddings or config.quantization is not None:
        weights -= model.vocab_size * model.hidden_size * itemsize
    token = page_bytes(model.num_layers, 1, model.num_kv_heads, model.head_dim, itemsize)
    return Footprint(weights, token)
