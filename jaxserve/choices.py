"""What is decided of a model before anything large is touched: formats, kernels, weights."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

from jax.sharding import Mesh

from checkpoints.formats import open_checkpoint, quantization_of
from checkpoints.quantized import Checkpoint
from checkpoints.store import is_store
from jaxserve.config import EngineConfig
from jaxserve.errors import ValidationError
from jaxserve.execution.backend_choice import backends_for
from jaxserve.execution.defaults import resolve
from jaxserve.hub import ModelFiles
from jaxserve.load_progress import LoadProgress
from jaxserve.models.config import ModelConfig
from jaxserve.models.kv_cache import KVFormat
from jaxserve.models.linear import LinearForm
from jaxserve.models.stored import holds_integers, stored_plan, stored_quantization
from jaxserve.models.weight_plan import (
    Plan,
    multiplies_integers,
    online_quantization,
    plan_weights,
)
from jaxserve.models.weights import check_tensors, with_stored_head
from jaxserve.resolved import ResolvedConfig
from pallas_kernels import Backends

logger = logging.getLogger(__name__)


def _is_store(asked: EngineConfig, files: ModelFiles) -> bool:
    return asked.load_format in ("auto", "orbax") and is_store(files.model)


def as_stored(asked: EngineConfig, files: ModelFiles) -> EngineConfig:
    """The settings that a store decides, where the model is one."""
    if not _is_store(asked, files):
        return asked
    quantization = stored_quantization(files.model, asked.quantization)
    return replace(asked, quantization=quantization)


class Choices(NamedTuple):
    """What is decided before anything large is touched."""

    config: ResolvedConfig
    model: ModelConfig
    kv_format: KVFormat
    backends: Backends
    form: LinearForm
    plan: Plan


def choose(
    asked: EngineConfig,
    files: ModelFiles,
    mesh: Mesh,
    backends: Backends | None,
    report: LoadProgress,
) -> Choices:
    """Settings, formats and kernels, from config.json and the kind of device."""
    begin = time.monotonic()
    model = ModelConfig.from_folder(files.model, asked.hf_overrides)
    model = replace(model, attention_window=asked.attention_window)
    device = mesh.devices.flat[0]
    stored = _is_store(asked, files)
    quantized = None if stored else quantization_of(files.model)
    found = quantized and quantized[0]
    online = asked.quantization if stored else online_quantization(asked.quantization, found)
    config = resolve(asked, model, device).with_quantization(online or found or "")
    if device.platform == "cpu" and config.model.dtype == "float16":
        logger.warning(
            "dtype=float16: a CPU has no products of it and converts every operand; "
            "bfloat16 and float32 are faster here"
        )
    kv_format = KVFormat.of(config.asked.kv_cache_dtype, config.model.dtype)
    if backends is None and quantized is not None:
        # what no weight could change is refused before they are fetched
        known = backends_for(asked, config, model, kv_format, device, integers=False)
        if device.platform != "cpu":
            LinearForm.of(known, online, asked.row_invariant)
    if config.asked.load_format != "dummy":
        if quantized is not None:
            fetch_weights(files, report)
        model = as_weights_say(files, model)
    with _quantized(config, files, model, quantized) as checkpoint:
        integers = multiplies_integers(online, checkpoint, config.model.dtype)
        if stored:
            integers = holds_integers(files.model)
        # native kernels are compiled at their first use on a machine
        with report.phase("preparing kernels (the first start on a machine compiles some)"):
            backends = backends or backends_for(asked, config, model, kv_format, device, integers)
        report.say(
            f"kernels: decode {backends.decode}, prefill {backends.prefill}, "
            f"linear {backends.linear} ({backends.reason}), after {time.monotonic() - begin:.1f} s"
        )
        form = LinearForm.of(backends, online, asked.row_invariant)
        if stored:
            plan = stored_plan(files.model, form)
        else:
            plan = plan_weights(model, form, config.model.dtype, checkpoint)
    return Choices(config, model, kv_format, backends, form, plan)


def fetch_weights(files: ModelFiles, report: LoadProgress) -> None:
    """See that the weights are here, and say how far that is.

    Raises:
        HubError: the hub does not give them.
    """
    with report.phase("fetching weights") as told:
        files.fetch_weights(told)


def as_weights_say(files: ModelFiles, model: ModelConfig) -> ModelConfig:
    """The config once more, by what the weights contradict; as it is where they are not here."""
    if not model.tie_word_embeddings or not files.weights_are_here or is_store(files.model):
        return model
    with open_checkpoint(files.model) as checkpoint:
        return with_stored_head(model, checkpoint)


@contextmanager
def _quantized(
    config: ResolvedConfig,
    files: ModelFiles,
    model: ModelConfig,
    quantized: tuple[str, Any] | None,
) -> Iterator[Checkpoint | None]:
    """A quantised checkpoint that is here, whose headers say how weights are kept."""
    if quantized is None:
        yield None
        return
    if config.asked.load_format == "dummy":
        allowed = f"auto, for the checkpoint is quantised ({quantized[0]})"
        raise ValidationError("load_format", "dummy", allowed)
    with open_checkpoint(files.model) as checkpoint:
        check_tensors(checkpoint, model)
        yield checkpoint
