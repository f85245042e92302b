"""Which weights of a model are quantised, and how each is kept on the device and multiplied.

A checkpoint's own formats are kept where the device's kernels have their product; others become
8-bit integers with a scale an output. Without any, `--quantization` says what weights become.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

from flax import nnx

from checkpoints.quantized import Checkpoint, Encoding
from jaxserve.config.engine_config import CHECKPOINT_QUANTIZATIONS, ONLINE_QUANTIZATIONS
from jaxserve.errors import ValidationError
from jaxserve.models.config import ModelConfig
from jaxserve.models.linear import LinearForm
from jaxserve.models.quant_array import WeightFormat
from jaxserve.models.registry import family_of
from jaxserve.models.sources import Place
from pallas_kernels.backends.mosaic_tpu import LENGTH_MULTIPLE
from pallas_kernels.linear.native import GROUP_MULTIPLE
from pallas_kernels.native.weights import LANES
from pallas_kernels.quantized_matmul.formats import FP8_GROUP, GROUPS

logger = logging.getLogger(__name__)

Plan = Mapping[Place, WeightFormat]

# what a weight becomes when it is loaded
ONLINE = {
    "int8": Encoding("int8", activations="int8"),
    "int4": Encoding("int4", 128),
    "fp8": Encoding("fp8", activations="fp8"),
}
REQUANTIZED = Encoding("int8")


def online_quantization(asked: str | None, found: str | None) -> str | None:
    """What weights become when they are loaded: a choice that fits the checkpoint.

    Args:
        asked: `quantization` of the configuration.
        found: the checkpoint's format; None: it is not quantised.

    Raises:
        ValidationError: they contradict each other.
    """
    if found is None:
        if asked is not None and asked not in ONLINE_QUANTIZATIONS:
            allowed = f"{', '.join(ONLINE_QUANTIZATIONS)} or none: the checkpoint is not quantised"
            raise ValidationError("quantization", asked, allowed)
        return asked
    assert found in CHECKPOINT_QUANTIZATIONS
    if asked not in (None, found):
        raise ValidationError(
            "quantization", asked, f"{found}, or left out: so this checkpoint is quantised already"
        )
    return None


def multiplies_integers(
    online: str | None, checkpoint: Checkpoint | None, dtype: str
) -> bool | None:
    """Whether native kernels multiply all quantised weights as integers, with rounded activations.

    None: no weight is quantised.

    Args:
        online: what weights become when they are loaded; None: what they are.
        checkpoint: whose matrices are quantised; None: none.
        dtype: of the activations.
    """
    kinds = set() if checkpoint is None else {m.stored for m in checkpoint.matrices.values()}
    if online is not None:
        kinds = {ONLINE[online]}

    def are_integers(stored: Encoding) -> bool:
        if stored.static or stored.kind == "fp8":
            return False
        in_groups = stored.kind == "int4" or stored.group is not None
        if in_groups:
            return dtype != "float32"
        return stored.activations == "int8" and stored.zeros == "none" and not stored.ordered

    return all(map(are_integers, kinds)) if kinds else None


def plan_weights(
    config: ModelConfig, form: LinearForm, dtype: str, checkpoint: Checkpoint | None
) -> Plan:
    """The format of every weight that is quantised, by its place in the module tree.

    Args:
        config: of the model.
        form: of the linear layers.
        dtype: of the activations.
        checkpoint: None: weights that are not quantised yet.
    """
    family = family_of(config)
    model = nnx.eval_shape(lambda: family.model(config, dtype, form))
    plan: dict[Place, WeightFormat] = {}
    changed: Counter[str] = Counter()
    unrounded: Counter[str] = Counter()
    for place, variable in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        role = variable.get_metadata("role")
        if role is None:
            continue
        *_, outputs, inputs = variable.get_value().shape
        names = family.source(source_place(place, config), config).names
        found = None if checkpoint is None else _stored(checkpoint, names)
        if isinstance(found, str):
            changed[f"{found}: {dtype}"] += 1
        elif found is not None:
            kept = device_format(found, role, form, dtype, inputs, outputs)
            plan[place] = kept
            if found.static and not kept.stored.static:
                changed[f"{found}: activations of experts are not rounded"] += 1
            elif found.activations != "float" and kept.stored.activations == "float":
                unrounded[found.activations] += 1
            if not same_elements(kept.stored, found):
                changed[f"{found}: {kept.stored}, for which there is a kernel"] += 1
        elif form.quantization is not None and (role != "head" or form.quantizes_head):
            wanted = online_stored(form.quantization, inputs)
            plan[place] = device_format(wanted, role, form, dtype, inputs, outputs)
    for what, count in changed.items():
        logger.warning("%d weights are stored otherwise than in the checkpoint, %s", count, what)
    for kind, count in unrounded.items():
        logger.warning(
            "%d weights are made for activations that are rounded to %s token by token: "
            "this device's kernels do not round them",
            count,
            kind,
        )
    return plan


def source_place(place: Place, config: ModelConfig) -> Place:
    """Where a parameter's values are from: a tied head of its own is the embedding."""
    return ("embedding",) if place[0] == "lm_head" and config.tie_word_embeddings else place


def online_stored(quantization: str, inputs: int) -> Encoding:
    """What a weight of so many inputs becomes: groups of 4 bits are the largest that divide it."""
    stored = ONLINE[quantization]
    if stored.group is None:
        return stored
    group = next((size for size in reversed(GROUPS) if inputs % size == 0), None)
    return replace(stored, group=group)


def _stored(checkpoint: Checkpoint, names: tuple[str, ...]) -> Encoding | str | None:
    """How the tensors of one parameter are all stored; text that says why they are taken as floats.

    None: none of them is quantised.
    """
    matrices = [checkpoint.matrices.get(name) for name in names]
    kinds = {None if matrix is None else matrix.stored for matrix in matrices}
    if len(kinds) > 1:
        return "tensors of one weight that are quantised differently"
    (stored,) = kinds
    if stored is not None and stored.ordered:
        orders = {order.tobytes() for m in matrices if m and (order := m.order()) is not None}
        if len(orders) > 1:
            return "tensors of one weight whose groups are of inputs in different orders"
    return stored


def same_elements(kept: Encoding, found: Encoding) -> bool:
    """Whether a weight is kept in the elements, scales and zeros that the checkpoint has."""
    return (kept.kind, kept.group, kept.ordered, kept.zeros == "none") == (
        found.kind,
        found.group,
        found.ordered,
        found.zeros == "none",
    )


def device_format(
    stored: Encoding, role: str, form: LinearForm, dtype: str, inputs: int, outputs: int
) -> WeightFormat:
    """How a weight that is stored so is kept: as it is where its product has a kernel.

    `outputs` are those of the last but one axis: of each expert.
    """
    native = form.backend == "native"
    if stored.kind != "int4" or not _has_gpu_kernels(form):
        stored = replace(stored, scales="float32")
    if role == "experts":
        # experts begin with a block of outputs of their own
        if stored.ordered or (native and outputs % LANES):
            return WeightFormat(Encoding("int8", activations="int8"), native)
        activations = "float" if stored.static else stored.activations
        stored = replace(stored, static=False, activations=activations)
    requantized = REQUANTIZED
    if stored.static:
        requantized = replace(REQUANTIZED, activations=stored.activations, static=True)
    grouped = stored.group is not None
    plain = not grouped and stored.zeros == "none" and not stored.ordered
    if stored.kind == "int8" and plain and stored.activations == "int8":
        return WeightFormat(stored, native)
    if native:
        if grouped and (inputs % (stored.group or 1) or (stored.group or 0) % GROUP_MULTIPLE):
            return WeightFormat(requantized, native)
        integers = stored.kind == "int4" or (stored.kind == "int8" and grouped)
        rounded = integers and dtype != "float32"
        zeros = "none" if stored.zeros == "none" else "offset"
        activations = "int8" if rounded else "float"
        if stored.static:
            activations = stored.activations
        return WeightFormat(replace(stored, zeros=zeros, activations=activations), native)
    if stored.kind == "int4":
        known = stored.group is None or (stored.group in GROUPS and inputs % stored.group == 0)
        if known and stored.zeros != "offset":
            kept = WeightFormat(replace(stored, activations="float", static=False), native)
            is_tpu = role == "experts" and form.experts == "mosaic_tpu"
            return replace(kept, words=LENGTH_MULTIPLE) if is_tpu else kept
    elif (not grouped or _keeps_groups(stored, form, inputs)) and stored.zeros == "none":
        rounded = stored.kind == "fp8" and "mosaic_gpu" in form.matmul
        activations = stored.activations if rounded or stored.static else "float"
        return WeightFormat(replace(stored, activations=activations), native)
    return WeightFormat(requantized, native)


def _keeps_groups(stored: Encoding, form: LinearForm, inputs: int) -> bool:
    """Whether kernels multiply 8-bit elements with scales by group: e4m3, on a GPU."""
    fits = stored.kind == "fp8" and stored.group == FP8_GROUP and inputs % FP8_GROUP == 0
    return _has_gpu_kernels(form) and fits


def _has_gpu_kernels(form: LinearForm) -> bool:
    return form.backend != "native" and not {"mosaic_gpu", "triton"}.isdisjoint(form.matmul)
