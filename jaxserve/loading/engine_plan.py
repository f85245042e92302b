"""What an engine is made with, decided before anything large is touched: plain data."""

from __future__ import annotations

import logging
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace

from jax.sharding import Mesh

from checkpoints.quantized import Checkpoint
from checkpoints.quantized_formats import open_checkpoint, quantization_of
from checkpoints.store import is_store
from jaxserve.boundary.processor_kwargs import processor_kwargs
from jaxserve.config.deterministic import check_device
from jaxserve.config.engine_config import EngineConfig
from jaxserve.config.resolved_config import ResolvedConfig
from jaxserve.errors import ValidationError
from jaxserve.execution.encoder import Encoder
from jaxserve.execution.host_memory import share_of_host
from jaxserve.execution.memory_plan import device_limit
from jaxserve.execution.runner import Runner
from jaxserve.loading.backend_choice import backends_for, warn_of_token_scales
from jaxserve.loading.capacity import MUCH, WEIGHT_FORMS, require_room, room_of, weights_at_most
from jaxserve.loading.defaults import resolve, whole_places
from jaxserve.loading.generation_defaults import generation_defaults
from jaxserve.loading.hub import ModelFiles
from jaxserve.loading.image_checks import refusal_of_images
from jaxserve.loading.load_progress import LoadProgress
from jaxserve.loading.offload_plan import check_offload, plan_streamed
from jaxserve.loading.pool_plan import plan_pool
from jaxserve.models.config import ModelConfig
from jaxserve.models.config_reader import read_model_config
from jaxserve.models.encoders import abstract_encoder, encoding_of, load_encoder
from jaxserve.models.kv_cache import KVCache, KVFormat, KVScales
from jaxserve.models.kv_scales import read_kv_scales
from jaxserve.models.layer_groups import LayerGroups
from jaxserve.models.linear import LinearForm
from jaxserve.models.moe import MoeConfig
from jaxserve.models.store import holds_integers, read_scales, stored_plan, stored_quantization
from jaxserve.models.weight_plan import Plan, multiplies_integers, online_quantization, plan_weights
from jaxserve.models.weights import abstract_model, check_tensors, with_stored_head
from jaxserve.parallel.platform import kind_of
from jaxserve.parallel.sharding import ShardingRules
from jaxserve.parallel.stages import check_stages, stages_of
from jaxserve.tokenization.tokenizer import Tokenizer, template_text
from pallas_kernels import Backends

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class EnginePlan:
    """What was decided by the files, the memory and the devices of one process.

    Plain data, without secrets: every process that finds the same files in the same places, and
    has a mesh of such devices, builds the same engine from it.

    Attributes:
        config: the settings; its pages are 0 until memory is planned.
        model: the model's configuration, by config.json and the weights.
        backends: the kernels.
        form: of the linear layers.
        plan: how quantised weights are kept.
        model_path, tokenizer_path: folders, or GGUF files.
        kv_scales: of a KV cache whose format has a scale a layer; None: of 1, or another format.
        streamed: how many of the last layers have their weights in the host's memory.
    """

    config: ResolvedConfig
    model: ModelConfig
    backends: Backends
    form: LinearForm
    plan: Plan
    model_path: str
    tokenizer_path: str
    kv_scales: KVScales | None = None
    streamed: int = 0

    @property
    def kv_format(self) -> KVFormat:
        return KVFormat.of(self.config.asked.kv_cache_dtype, self.config.model.dtype)

    @property
    def layer_groups(self) -> LayerGroups:
        """How layers share page tables; memory, which may lower `max_model_len`, plays no part."""
        asked = self.config.asked
        stages = asked.pipeline_parallel_size
        if not asked.keep_window_only or stages > 1:
            return LayerGroups.one(self.model.num_layers, stages)
        longest = asked.max_model_len or self.model.max_context_length
        return LayerGroups.by_window(self.model, longest)

    @property
    def of_steps(self) -> str:
        """Text of what decides the compiled steps, their features left out."""
        config = self.config
        cache = replace(config.cache, num_host_pages=0)  # no step knows of them
        settings = config.model, cache, config.scheduler, config.asked.kv_cache_dtype
        weights = self.model, self.form, self.plan, self.streamed
        return repr((*weights, self.layer_groups, self.backends, self.kv_scales, *settings))

    @property
    def of_pages(self) -> str:
        """Text of what decides, beside the weights, what a page with some tokens holds."""
        config = self.config
        form = config.model, config.asked.kv_cache_dtype, config.cache.page_size
        weights = self.model, self.form, self.plan, self.streamed
        return repr((*weights, self.layer_groups, self.backends, self.kv_scales, *form))

    @property
    def has_encoder(self) -> bool:
        """Whether the engine reads more than text."""
        return self.model.images is not None and self.config.asked.max_images > 0

    def encoder(self, mesh: Mesh, *, loaded: bool) -> Encoder:
        """The encoder of a model that has one, with its weights or knowing shapes alone.

        Raises:
            ValidationError, CheckpointError: see `load_encoder`.
        """
        images, asked, dtype = self.model.images, self.config.asked, self.config.model.dtype
        assert images is not None
        module = abstract_encoder(self.model, mesh, dtype)
        if loaded:
            module = load_encoder(
                self.model_path,
                self.model,
                mesh=mesh,
                dtype=dtype,
                load_format=asked.load_format,
                seed=asked.seed,
            )
        most = asked.max_encoder_patches // images.patches_per_row
        return Encoder(
            module,
            mesh,
            images.row,
            axes=images.row_axes,
            unit=images.rows_per_cell,
            # with others in a launch the rounding of a row would be another one
            most=most if images.row_axes or not asked.deterministic else 1,
            is_alone=asked.deterministic,
            cache_bytes=asked.encoder_cache_bytes,
        )

    def runner(self, mesh: Mesh) -> Runner:
        """A runner that knows shapes alone."""
        kv_cache = KVCache.of(
            self.model,
            self.kv_format,
            self.backends,
            platform=mesh.devices.flat[0].platform,
            page_size=self.config.cache.page_size,
            scales=self.kv_scales,
            groups=self.layer_groups,
        )
        dtype = self.config.model.dtype
        stages = stages_of(mesh, self.model.num_layers)
        models = [
            abstract_model(self.model, one.mesh, dtype, self.form, self.plan, one, self.streamed)
            for one in stages
        ]
        encodes = self.has_encoder and len(stages) == 1  # a runner of several refuses images
        beside = self.encoder(mesh, loaded=False).device_bytes if encodes else 0
        return Runner(self.config, self.model, models, stages, kv_cache, beside=beside)


def decide(
    asked: EngineConfig,
    files: ModelFiles,
    mesh: Mesh,
    report: LoadProgress,
    *,
    with_tokenizer: bool = True,
) -> tuple[EnginePlan, Runner, Tokenizer | None]:
    """Decide all that is open, and fetch the weights; all that can be refused is refused before.

    Args:
        asked: the settings.
        files: of the model.
        mesh: the devices.
        report: told one line a phase.
        with_tokenizer: whether there is to be one, if `asked` does not say otherwise.

    Returns:
        The decision; and what was made for it, which a build in this process need not make again:
        the runner that memory was planned with, and the tokenizer.

    Raises:
        ValidationError, HubError, CheckpointError: see `load_engine`.
    """
    if asked.chat_template is not None:
        template_text(asked.chat_template)
    were_here = files.weights_are_here
    chosen = choose(asked, files, mesh, report)
    wants_text = with_tokenizer and not asked.skip_tokenizer_init
    tokenizer = Tokenizer(files.tokenizer, asked.chat_template) if wants_text else None
    decided, runner = _planned(chosen, files, mesh, report)
    if asked.load_format != "dummy":
        fetch_weights(files, report)
        if not were_here and (
            _as_weights_say(files, decided.model) != decided.model
            or refusal_of_images(decided.config, decided.model, files) is not None
        ):
            chosen = choose(asked, files, mesh, report)
            decided, runner = _planned(chosen, files, mesh, report)
    return decided, runner, tokenizer


def choose(
    asked: EngineConfig,
    files: ModelFiles,
    mesh: Mesh,
    report: LoadProgress,
    *,
    in_memory: bool = True,
) -> EnginePlan:
    """Settings, formats and kernels, from config.json and the kind of device; no memory yet.

    `in_memory`: whether there has to be room for all weights at once.

    Raises:
        ValidationError, HubError, CheckpointError: see `load_engine`.
    """
    begin = time.monotonic()
    stored = asked.load_format in ("auto", "orbax") and is_store(files.model)
    if stored:
        written = stored_quantization(files.model, asked.quantization)
        asked = replace(asked, quantization=written)
    model = read_model_config(files.model, asked.hf_overrides)
    model = replace(_with_head_tokens(model, files), attention_window=asked.attention_window)
    model = model.spread_over(mesh.shape["model"])
    ShardingRules.for_model(mesh, model)  # refuses what does not divide before it is fetched
    check_stages(mesh.shape["stage"], model.num_layers)
    if stored and mesh.shape["stage"] > 1:
        allowed = f"1 for a store, which is read whole: {files.model}"
        raise ValidationError("pipeline_parallel_size", mesh.shape["stage"], allowed)
    device = mesh.devices.flat[0]
    quantized = None if stored else quantization_of(files.model)
    found = quantized and quantized[0]
    online = asked.quantization if stored else online_quantization(asked.quantization, found)
    # devices of other platforms have no compute capability
    capability = getattr(device, "compute_capability", None)
    of_device = device.platform, online or found or "", capability
    config = resolve(asked, model, *of_device)
    processor_kwargs(asked.mm_processor_kwargs, model.images)
    refusal = refusal_of_images(config, model, files)
    if refusal is not None:
        if asked.limit_mm_per_prompt is not None or not encoding_of(model).is_optional:
            raise refusal
        logger.warning("text alone is read, as with limit_mm_per_prompt=0: %s", refusal)
        asked = replace(asked, limit_mm_per_prompt=0)
        config = resolve(asked, model, *of_device)
    dtype = config.model.dtype
    if asked.deterministic:
        check_device(
            asked,
            device.platform,
            dtype,
            is_quantized=bool(online or found),
            is_sparse=isinstance(model, MoeConfig),
            reads_images=model.images is not None and asked.max_images > 0,
        )
    # of other devices one program is enough
    row_invariant = asked.row_invariant or (asked.deterministic and device.platform == "cpu")
    if asked.offloaded_bytes:
        check_offload(asked, kind_of(device), is_stored=stored)
    if in_memory:
        _require_room(config, model, mesh)
    if device.platform == "cpu" and dtype == "float16":
        logger.warning(
            "dtype=float16: a CPU has no products of it and converts every operand; "
            "bfloat16 and float32 are faster here"
        )
    if quantized is not None:
        # what no weight could change is refused before they are fetched
        known = backends_for(config, model, device, integers=False)
        if device.platform != "cpu":
            LinearForm.of(known, online, row_invariant)
    if asked.load_format != "dummy":
        if quantized is not None:
            fetch_weights(files, report)
        model = _as_weights_say(files, model)
    reading: AbstractContextManager[Checkpoint | None] = nullcontext()
    if quantized is not None:
        if asked.load_format == "dummy":
            allowed = f"auto, for the checkpoint is quantised ({found})"
            raise ValidationError("load_format", "dummy", allowed)
        reading = open_checkpoint(files.model)  # its headers say how weights are kept
    with reading as checkpoint:
        if checkpoint is not None:
            check_tensors(checkpoint, model)
        integers = multiplies_integers(online, checkpoint, dtype)
        if stored:
            integers = holds_integers(files.model)
        # native kernels are compiled at their first use on a machine
        with report.phase("preparing kernels (the first start on a machine compiles some)"):
            backends = backends_for(config, model, device, integers)
            warn_of_token_scales(config, model, device, backends)
        report.say(
            f"kernels: decode {backends.decode}, prefill {backends.prefill}, "
            f"linear {backends.linear} ({backends.reason}), after {time.monotonic() - begin:.1f} s"
        )
        if whole_places(asked, model) and not backends.sees_ahead:
            report.say(
                f"prefill of images by xla: {backends.prefill} rows see nothing behind themselves"
            )
        form = LinearForm.of(backends, online, row_invariant)
        if stored:
            plan = stored_plan(files.model, form)
        else:
            plan = plan_weights(model, form, dtype, checkpoint)
    streamed = 0
    if asked.offloaded_bytes and device.platform != "cpu":
        shapes = abstract_model(model, mesh, dtype, form, plan)
        streamed = plan_streamed(shapes, asked, kind_of(device))
    paths = str(files.model), str(files.tokenizer)
    return EnginePlan(config, model, backends, form, plan, *paths, streamed=streamed)


def _require_room(config: ResolvedConfig, model: ModelConfig, mesh: Mesh) -> None:
    """Refuse by config.json alone what no device here holds; warn where one context does not fit.

    Raises:
        ValidationError: the weights do not fit, with the sum.
    """
    asked, quantization = config.asked, config.model.quantization
    if quantization not in WEIGHT_FORMS:
        return  # what the weights of these take only their headers say
    memory, share, devices = device_limit(mesh.devices.flat[0]), asked.gpu_memory_utilization, 1
    if memory is not None and asked.offloaded_bytes:
        return  # the plan of the memory tells
    if memory is None:  # devices of a CPU share the host's
        memory, share = share_of_host(asked), 1.0
        if memory is not None:
            memory += asked.offloaded_bytes
    else:
        devices = mesh.size
    if memory is None or weights_at_most(model) < MUCH * memory * share:
        return
    kv_format = KVFormat.of(asked.kv_cache_dtype, config.model.dtype)
    row = (
        2
        * model.num_kv_heads
        * (model.head_dim * kv_format.dtype.itemsize + (2 if kv_format.token_scales else 0))
    )
    room = room_of(
        model,
        config.model.dtype,
        quantization,
        memory=memory,
        share=share,
        devices=devices,
        token_bytes=row * model.num_layers,
        platform=mesh.devices.flat[0].platform,
    )
    require_room(model, asked.model, config.model.dtype, quantization, room)
    longest = config.scheduler.max_model_len
    if room.tokens < longest and not any(model.windows):
        logger.warning(
            "of a context of %d tokens %d fit beside the weights:\n%s",
            longest,
            room.tokens,
            "\n".join(room.lines()),
        )


def _with_head_tokens(model: ModelConfig, files: ModelFiles) -> ModelConfig:
    """The config with the ids of the tokens that its head of labels is made of."""
    head = model.head
    if head is None or not head.tokens:
        return model
    ids = tuple(Tokenizer(files.tokenizer).convert_tokens_to_ids(head.tokens))
    known = tuple(one for one in ids if one is not None and one < model.vocab_size)
    if len(known) != len(ids):
        allowed = "tokens of the vocabulary, as it spells them"
        raise ValidationError("hf_overrides.classifier_from_token", [*head.tokens], allowed)
    return replace(model, head=replace(head, token_ids=known))


def fetch_weights(files: ModelFiles, report: LoadProgress) -> None:
    """See that the weights are here, and say how far that is.

    Raises:
        HubError: the hub does not give them.
    """
    with report.phase("fetching weights") as told:
        files.fetch_weights(told)


def _planned(
    chosen: EnginePlan, files: ModelFiles, mesh: Mesh, report: LoadProgress
) -> tuple[EnginePlan, Runner]:
    """The decision with pages and context for the memory that there is, and its runner."""
    config = chosen.config
    defaults = generation_defaults(config.asked, files.model)
    config = replace(config, sampling_defaults=defaults)
    with report.phase("planning memory"):
        chosen = replace(chosen, kv_scales=kv_scales_of(chosen, files))
        begin = time.monotonic()
        while not config.cache.num_pages:
            runner = replace(chosen, config=config).runner(mesh)
            config = plan_pool(config, runner, mesh)
        cache, scheduler = config.cache, config.scheduler
        longest = runner.page_groups.most_held(scheduler.max_model_len, cache.page_size)
        report.say(
            f"KV cache: {cache.num_pages} pages of {cache.page_size} tokens and "
            f"{runner.cache.groups.layers_per_page} layers, {runner.cache}, "
            f"max_model_len {scheduler.max_model_len}, of which {(cache.num_pages - 1) // longest} "
            f"fit at once, max_num_seqs {scheduler.max_num_seqs} "
            f"(planned in {time.monotonic() - begin:.1f} s)"
        )
    return replace(chosen, config=config), runner


def kv_scales_of(chosen: EnginePlan, files: ModelFiles) -> KVScales | None:
    """The scales of the KV cache, where the format wants some: programs hold them."""
    if not chosen.kv_format.static_scales:
        return None
    asked, layers = chosen.config.asked, chosen.model.num_layers
    scales = None
    if asked.kv_cache_scales is not None:
        scales = read_kv_scales(asked.kv_cache_scales, layers)
        if scales is None:
            raise ValidationError(
                "kv_cache_scales",
                asked.kv_cache_scales,
                "a file with self_attn.k_scale and v_scale",
            )
    elif asked.load_format != "dummy":
        files.fetch_weights()
        scales = read_scales(files.model, layers)
    if scales is None:
        logger.warning(
            "kv_cache_dtype=%s: the checkpoint has no scales (self_attn.k_scale and v_scale of "
            "each layer), so keys and values are stored as they are, cut off at 448; `jaxserve "
            "calibrate-kv` makes some for kv_cache_scales",
            asked.kv_cache_dtype,
        )
    return scales


def _as_weights_say(files: ModelFiles, model: ModelConfig) -> ModelConfig:
    """The config once more, by what the weights contradict; as it is where they are not here."""
    if not model.tie_word_embeddings or not files.weights_are_here or is_store(files.model):
        return model
    with open_checkpoint(files.model) as checkpoint:
        return with_stored_head(model, checkpoint)
