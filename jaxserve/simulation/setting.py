"""What an engine would decide on a device that need not be here: sizes, pages, programs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from jaxserve.config.device_defaults import device_defaults
from jaxserve.config.engine_config import EngineConfig
from jaxserve.config.resolved_config import ResolvedConfig
from jaxserve.errors import ValidationError
from jaxserve.execution.device_state import StateShape
from jaxserve.execution.features import Facts, Feature, feature_sets, make_features
from jaxserve.execution.memory_plan import (
    DEFAULT_HOST_CACHE_BYTES,
    CacheBudget,
    Demand,
    plan_num_pages,
    temporary_bound,
)
from jaxserve.execution.programs import lanes_for, predicted_cost, wanted_shapes
from jaxserve.execution.step_shape import StepShape
from jaxserve.loading.capacity import WEIGHT_FORMS, WeightBytes, numbers_of, weight_bytes
from jaxserve.loading.defaults import resolve
from jaxserve.loading.hub import locate
from jaxserve.memory.page_groups import PageGroups
from jaxserve.models.config import ModelConfig
from jaxserve.models.config_reader import model_config_of, read_model_config
from jaxserve.models.known_shapes import HUB_IDS, SHAPES, shape_of
from jaxserve.models.kv_cache import KVCache, KVFormat
from jaxserve.models.layer_groups import LayerGroups
from jaxserve.parallel.sharding import check_divides
from jaxserve.scheduling.step_limits import SchedulerLimits
from jaxserve.simulation.devices import Device
from pallas_kernels import choose_backends


def find_model(asked: EngineConfig) -> tuple[ModelConfig, str]:
    """The config of a model, of which nothing else is read, and what quantised its checkpoint.

    A folder or file that is here is taken first, then a shape that is known by name, then the hub.

    Raises:
        ValidationError: there is none.
        HubError, CheckpointError: its config.json cannot be had.
    """
    name, path = asked.model, Path(asked.model)
    if path.is_file() and path.suffix == ".json":
        config = _read(path)
        return model_config_of({**config, **(asked.hf_overrides or {})}), _quantization(config)
    known = None if path.exists() else shape_of(name)
    if known is not None:
        return model_config_of({**known, **(asked.hf_overrides or {})}), ""
    if not path.exists() and "/" not in name:
        allowed = f"a folder, a config.json, an id on the hub, or one of {', '.join(SHAPES)}"
        raise ValidationError("--model", name, allowed)
    folder = locate(asked).model
    file = folder / "config.json"
    found = _quantization(_read(file)) if file.is_file() else ""
    return read_model_config(folder, asked.hf_overrides), found


def known_models() -> tuple[str, ...]:
    """Names that need neither a folder nor the hub."""
    return (*SHAPES, *HUB_IDS)


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValidationError(str(path), "not read", f"a config.json ({error})") from error
    if not isinstance(found, dict):
        raise ValidationError(str(path), type(found).__name__, "a JSON object")
    return found


def _quantization(config: Mapping[str, Any]) -> str:
    """What a checkpoint is quantised as, by its config.json; "" where it is not."""
    told = config.get("quantization_config") or {}
    method = str(told.get("quant_method", ""))
    if method != "compressed-tensors":
        return method
    groups = [*(told.get("config_groups") or {}).values()]
    weights = (groups[0].get("weights") or {}) if groups else {}
    if weights.get("type") == "float":
        return "fp8"
    return {"4": "int4", "8": "int8"}.get(str(weights.get("num_bits")), method)


@dataclass(frozen=True, slots=True)
class Setting:
    """An engine as it would be: what its scheduler is given, and what its memory holds.

    Attributes:
        config: the settings, with pages and context for the memory.
        model, device: what serves.
        devices: that share the model.
        quantization: a key of `WEIGHT_FORMS`.
        limits, groups: of the scheduler.
        demand: bytes on one device that are no pages.
        page_bytes: of a page on one device.
        token_bytes: keys and values of a token over all layers and devices.
        memory: bytes of one device that the engine may use.
        shapes: of its programs, all of them compiled.
        features, numbers_per_token: see `predicted_cost`.
    """

    config: ResolvedConfig
    model: ModelConfig
    device: Device
    devices: int
    quantization: str
    limits: SchedulerLimits
    groups: PageGroups
    demand: Demand
    page_bytes: int
    token_bytes: int
    memory: int
    shapes: tuple[StepShape, ...]
    features: tuple[Feature, ...]
    numbers_per_token: float

    @property
    def weights(self) -> WeightBytes:
        """Bytes of the weights over all devices."""
        return weight_bytes(
            self.model,
            self.config.model.dtype,
            self.quantization,
            platform=self.device.platform,
            devices=self.devices,
        )

    @property
    def num_pages(self) -> int:
        return self.config.cache.num_pages

    def predicted_cost(self, shape: StepShape) -> float:
        """By which the engine chooses the cheapest program that holds a step."""
        return predicted_cost(shape, self.features, self.numbers_per_token)


def settle(
    asked: EngineConfig,
    model: ModelConfig,
    device: Device,
    found: str = "",
    memory: int | None = None,
) -> Setting:
    """What an engine would decide; pages as `loading.pool_plan`, but nothing is compiled.

    Args:
        asked: the settings.
        model: that is served.
        device: that serves it.
        found: what quantised its checkpoint.
        memory: bytes of one device; None: by its data sheet.

    Raises:
        ValidationError: settings that contradict each other or the model, or the memory does not
            hold them.
    """
    quantization = asked.quantization or found
    if quantization not in WEIGHT_FORMS:
        allowed = f"none or one of {', '.join(filter(None, WEIGHT_FORMS))}: others are not known"
        raise ValidationError("quantization", quantization, allowed)
    devices = asked.tensor_parallel_size
    if asked.data_parallel_size > 1:
        allowed = "1: one engine is simulated, of several each has its share of the load"
        raise ValidationError("data_parallel_size", asked.data_parallel_size, allowed)
    if asked.pipeline_parallel_size > 1:
        allowed = "1: stages are not simulated (docs/scaling.md says what they leave idle)"
        raise ValidationError("pipeline_parallel_size", asked.pipeline_parallel_size, allowed)
    model = replace(model, attention_window=asked.attention_window).spread_over(devices)
    check_divides(devices, model)
    config = resolve(asked, model, device.platform, quantization, device.capability)
    scheduler, page_size, dtype = config.scheduler, config.cache.page_size, config.model.dtype
    kv_format = KVFormat.of(asked.kv_cache_dtype, dtype)
    attention = kv_format.attention_shape(model, dtype, device.platform, page_size, devices)
    chosen = choose_backends(device.name, device.platform, attention, capability=device.capability)
    longest = scheduler.max_model_len
    layers = LayerGroups.one(model.num_layers)
    if asked.keep_window_only:
        layers = LayerGroups.by_window(model, longest)
    cache = KVCache.of(
        model, kv_format, chosen, platform=device.platform, page_size=page_size, groups=layers
    )
    prefill, slots = scheduler.max_prefill_tokens, scheduler.max_num_seqs
    facts = Facts(model.vocab_size, max(0, asked.max_logprobs), model.hidden_size, prefill, model)
    features = make_features(facts, partial(getattr, config.asked))
    defaults = device_defaults(device.platform, device.capability)
    shapes = wanted_shapes(slots, prefill, defaults.smallest_bucket, feature_sets(features))
    groups = replace(cache.groups.pages, ahead=prefill + 2)
    held = weight_bytes(model, dtype, quantization, platform=device.platform, devices=devices)
    demand = Demand(
        weights=held.total // devices,
        tables=StateShape(cache, slots, longest, features={}).table_bytes,
        transfers=0,
        temporaries=max(
            temporary_bound(shape, model, jnp.dtype(dtype).itemsize) for shape in shapes[:2]
        ),
    )
    total = device.memory if memory is None else memory
    field, value = "gpu_memory_utilization", asked.gpu_memory_utilization
    share = int(total * value)
    num_bytes = share - sum(demand)
    if asked.kv_cache_memory_bytes is not None:
        field, num_bytes = "kv_cache_memory_bytes", asked.kv_cache_memory_bytes
    elif not total:  # a CPU: the host's memory, of which nothing is known here
        field, num_bytes = "kv_cache_memory_bytes", DEFAULT_HOST_CACHE_BYTES
    page_bytes = cache.page_bytes(devices)
    useful = slots * groups.most_held(longest, page_size) + 1
    budget = CacheBudget(num_bytes, field, value)
    num_pages = asked.num_pages or plan_num_pages(budget, page_bytes, useful)
    fits = groups.longest(num_pages - 1, page_size, longest)
    if asked.max_model_len is None:
        longest = min(longest, fits)
    limits = SchedulerLimits(
        max_num_seqs=slots,
        max_num_batched_tokens=scheduler.max_num_batched_tokens,
        max_prefill_tokens=prefill,
        max_lanes=lanes_for(prefill, slots),
        max_model_len=longest,
    )
    return Setting(
        config=replace(
            config,
            cache=replace(config.cache, num_pages=num_pages),
            scheduler=replace(scheduler, max_model_len=longest),
        ),
        model=model,
        device=device,
        devices=devices,
        quantization=quantization,
        limits=limits,
        groups=groups,
        demand=demand,
        page_bytes=page_bytes,
        token_bytes=cache.token_bytes,
        memory=share,
        shapes=tuple(shapes),
        features=features,
        numbers_per_token=2.0 * numbers_of(model).total / defaults.flops_per_number,
    )
