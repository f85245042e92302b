"""What steps move, and the least and the expected time of whole models, as a Markdown table."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from benchmarks.memory_table import StepProof
from benchmarks.verify.prove import device_name
from jaxserve.config.engine_config import EngineConfig
from jaxserve.models.config_reader import model_config_of
from jaxserve.models.known_shapes import SHAPES
from jaxserve.models.moe import MoeConfig
from jaxserve.scheduling.plan import StepPlan
from jaxserve.simulation.devices import DEVICES
from jaxserve.simulation.setting import Setting, settle
from jaxserve.simulation.step_time import LOGITS_PASSES, Rates, Roofline
from pallas_kernels.grouped_linear.blocks import GPU_SIZES, TPU_SIZES, Sizes, block_size

CONTEXT = 1024  # tokens of every decode row
SLOTS = 256  # of the engine whose steps are proved
DRAWS = 200  # of experts that tokens choose evenly
COLUMNS = (
    "program",
    "device",
    "weights",
    "kernels a layer",
    "in all",
    "least MB",
    "moved MB",
    "moved / least",
    "least us",
    "expected us",
    "of it launches",
)
LEGEND = f"""\
Of all layers, by the two or more that were compiled; every decode row has {CONTEXT:,} tokens.
**Estimates, not measured.** *least*: weights, keys and values are read once (of experts those that
are chosen when tokens choose evenly), and the longer of bytes and operations at the rates of the
data sheet. *moved*: these, matrices of experts that several blocks read, what rows of 4 bits are
filled up with, and every array between kernels, once as it is written and once a reader.
*expected*: what the simulator takes for the device's rates, and the time between kernels.
"""


class Estimate(NamedTuple):
    """Of a step of a whole model on one device.

    Attributes:
        kernels: launched.
        least_bytes, moved: bytes, and those that the compiled program moves.
        least, expected: seconds.
        launches: seconds of `expected` between kernels.
    """

    kernels: int
    least_bytes: float
    moved: float
    least: float
    expected: float
    launches: float


def _plan(rows: int) -> StepPlan:
    """A step of so many rows, each with its last token."""
    plan = StepPlan()
    plan.rows.requests, plan.rows.lengths = [None] * rows, [1] * rows
    plan.rows.starts = [CONTEXT - 1] * rows
    plan.samples.requests = [None] * rows
    return plan


def _setting(step: StepProof) -> Setting | None:
    """What an engine would decide for the whole model; None where no device of the simulator is."""
    device = next((one for one in DEVICES.values() if one.target == step.proof.device), None)
    if device is None:
        return None
    asked = EngineConfig(
        model=step.shape,
        quantization=step.quantization,
        tensor_parallel_size=step.devices,
        max_model_len=CONTEXT,
        max_num_seqs=SLOTS,
        num_pages=CONTEXT,  # whether the weights fit is the proof's to say
    )
    return settle(asked, model_config_of(SHAPES[step.shape]), device)


def blocks_per_expert(model: MoeConfig, tokens: int, sizes: Sizes = GPU_SIZES) -> float:
    """Blocks of a grouped product for each expert that has rows, tokens choosing evenly."""
    rng, experts, chosen = np.random.default_rng(0), model.num_experts, model.experts_per_token
    size = block_size(tokens * chosen, experts, sizes)
    found = np.zeros(2)
    for _ in range(DRAWS):
        choices = rng.random((tokens, experts)).argpartition(chosen - 1, axis=1)[:, :chosen]
        rows = np.bincount(choices.ravel(), minlength=experts)
        found += (-(-rows // size)).sum(), (rows > 0).sum()
    return float(found[0] / found[1])


def _read_again(setting: Setting, rows: int) -> float:
    """Bytes of experts' matrices that further blocks of an expert read, and with which rows of 4
    bits are filled up."""
    model, least = setting.model, _unfilled(setting).weights
    held = setting.weights
    filled = held.linear - least.linear - (held.experts - least.experts)  # of no experts
    if not isinstance(model, MoeConfig):
        return filled / setting.devices
    sizes = TPU_SIZES if setting.device.platform == "tpu" else GPU_SIZES
    chosen = 1.0 - (1.0 - model.experts_per_token / model.num_experts) ** rows
    read = held.experts * blocks_per_expert(model, rows, sizes) - least.experts
    return (filled + chosen * read) / setting.devices


def _unfilled(setting: Setting) -> Setting:
    """The same setting on a device of which the rates alone count.

    `Roofline` then fills up no rows of 4 bits, and adds no time of launches or links.
    """
    told = replace(setting.device, platform="", launch=0.0, hop=0.0, link=math.inf)
    return replace(setting, device=told)


def estimate(step: StepProof) -> Estimate | None:
    """The estimate of a decode step.

    None of others, where it did not compile or of one layer alone, and where the simulator does not
    know the device.
    """
    counts, setting, rows = step.proof.counts, _setting(step), step.rows
    if counts is None or not counts.a_layer or setting is None or rows is None:
        return None
    model, device = setting.model, setting.device
    free = _unfilled(setting)

    def seconds(rates: Rates) -> float:
        return Roofline(free, rates).of(_plan(rows), 0).device

    def of_all(whole: int, layer: int) -> int:
        return whole + (model.num_layers - step.layers) * layer

    sheet = Rates(device.bandwidth, device.bf16_rate, device.int8_rate, "data sheet")
    least_bytes = seconds(Rates(1.0, math.inf, math.inf, "bytes"))
    logits = LOGITS_PASSES * 4.0 * rows * model.vocab_size / step.devices
    moved = least_bytes - logits + _read_again(setting, rows)
    moved += of_all(counts.moved, counts.moved_a_layer)
    kernels = of_all(sum(counts.kernels.values()), sum(counts.a_layer.values()))
    launches = kernels * device.launch
    hops = 2 * model.num_layers * device.hop if step.devices > 1 else 0.0
    expected = seconds(Rates.of_data_sheet(device)) + launches + hops
    return Estimate(kernels, least_bytes, moved, seconds(sheet), expected, launches)


def _cells(step: StepProof) -> list[str] | None:
    found = estimate(step)
    if found is None or step.proof.counts is None:
        return None
    parallel = f" over {step.devices}" if step.devices > 1 else ""
    return [
        f"{step.shape}{parallel}, {step.step}",
        device_name(step.proof.device),
        step.quantization or "bfloat16",
        str(sum(step.proof.counts.a_layer.values())),
        f"{found.kernels:,}",
        f"{found.least_bytes / 1e6:,.0f}",
        f"{found.moved / 1e6:,.0f}",
        f"{found.moved / found.least_bytes:.2f}",
        f"{found.least * 1e6:,.0f}",
        f"{found.expected * 1e6:,.0f}",
        f"{found.launches * 1e6:,.0f}",
    ]


def time_table(steps: Sequence[StepProof]) -> str:
    """The legend and a line a decode step that can be estimated; "" where none can."""
    rows = [cells for cells in map(_cells, steps) if cells]
    if not rows:
        return ""
    lines = [COLUMNS, ["---"] * len(COLUMNS), *rows]
    return "\n".join([LEGEND, *("| " + " | ".join(line) + " |" for line in lines)]) + "\n"
