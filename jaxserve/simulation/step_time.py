"""How long a step takes: by what it computes and moves, and the rates of a device."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import jax.numpy as jnp

from jaxserve.execution.programs import ProgramQuery
from jaxserve.execution.step_shape import StepShape
from jaxserve.loading.capacity import WEIGHT_FORMS
from jaxserve.models.config import ModelConfig
from jaxserve.models.cost import Row, seen
from jaxserve.models.moe import MoeConfig
from jaxserve.scheduling.plan import StepPlan
from jaxserve.simulation.devices import Device
from jaxserve.simulation.setting import Setting
from jaxserve.simulation.step_figures import launches

# of the engine's thread, measured on a CPU (docs/performance.md, "The host path"): a step, a row
HOST_STEP_S, HOST_ROW_S = 140e-6, 1e-6
COMMIT_SHARE = 0.25  # of that, after the step
# of what a data sheet promises, what kernels are taken to reach: an assumption
BANDWIDTH_SHARE, RATE_SHARE = 0.8, 0.6
LOGITS_PASSES = 3  # over float32 logits, by the sampler


class StepSeconds(NamedTuple):
    """What a step takes, in seconds.

    Attributes:
        device: on the device.
        before, after: on the host, before it is handed over and once its tokens are there.
        delivery: until the server has its tokens, in the middle.
    """

    device: float
    before: float
    after: float
    delivery: float = 0.0


class StepTime(Protocol):
    """Tells how long steps take.

    Attributes:
        intake: seconds that the server takes to read a request, one after the other.
        handover: seconds until the engine has what was read, of each beside the others.
        source: where the figures come from, for people.
    """

    intake: float
    handover: float
    source: str

    def of(self, plan: StepPlan, num_pages: int) -> StepSeconds:
        """Of one step, while requests own `num_pages` pages."""

    def first_delivery(self) -> float:
        """Seconds from the end of a step until the server has the first token of a request."""


class Programs:
    """The programs of an engine, and which of them a step runs."""

    def __init__(self, setting: Setting):
        self._setting = setting
        self._choices: dict[tuple[int, int, int], StepShape] = {}
        self._fast = setting.shapes[2].features  # what every request needs

    def select(self, num_decode: int, num_prefill: int, num_lanes: int) -> StepShape:
        """The cheapest one that holds so many decode rows, prompt tokens and lanes."""
        key = (num_decode, num_prefill, num_lanes)
        found = self._choices.get(key)
        if found is None:
            query = ProgramQuery(num_decode, num_prefill, num_lanes, self._fast, 0)
            fitting = [shape for shape in self._setting.shapes if query.fits(shape)]
            found = self._choices[key] = min(fitting, key=self._setting.predicted_cost)
        return found

    def of_plan(self, plan: StepPlan) -> StepShape:
        """That of a plan; as `RowPacker.needs` has it, a row of one token is none of the region."""
        rows, num_decode = plan.rows, plan.num_decode
        if not plan.tokens:
            return self.select(num_decode, 0, 0)
        lengths = rows.lengths[num_decode:]
        lanes = [length for length in lengths if length > 1]
        num_lanes = 0
        if lanes:
            num_lanes = max(len(lanes), len(plan.samples) - num_decode)
        return self.select(num_decode + len(lengths) - len(lanes), sum(lanes), num_lanes)


@dataclass(frozen=True, slots=True)
class Rates:
    """What a device does in a second.

    Attributes:
        bandwidth: bytes read.
        flops: operations of products of 16-bit numbers.
        narrow: of 8-bit numbers.
        source: where the figures come from.
    """

    bandwidth: float
    flops: float
    narrow: float
    source: str

    @staticmethod
    def of_data_sheet(device: Device) -> Rates:
        """The maker's, and the share of them that kernels are taken to reach."""
        return Rates(
            device.bandwidth * BANDWIDTH_SHARE,
            device.bf16_rate * RATE_SHARE,
            device.int8_rate * RATE_SHARE,
            f"data sheet of {device.name}, of which {BANDWIDTH_SHARE:.0%} of the bandwidth and "
            f"{RATE_SHARE:.0%} of the products are assumed to be reached",
        )


class Roofline:
    """Each part of a step takes the longer of its bytes and its operations.

    Williams, Waterman and Patterson, "Roofline: an insightful visual performance model for
    multicore architectures" (2009). Linear layers and logits compute all rows of the program,
    attention the tokens that are there. Kernels are launched one after the other, and devices that
    share a model add up their parts twice a layer.

    Args:
        setting: what an engine would decide for the model and the device.
        rates: of one device.
    """

    def __init__(self, setting: Setting, rates: Rates):
        self.intake = self.handover = 0.0
        self.source = f"estimated from bytes and operations by rates: {rates.source}"
        self._programs = Programs(setting)
        model, self._devices = setting.model, setting.devices
        form, weights = WEIGHT_FORMS[setting.quantization], setting.weights
        shared = setting.devices
        self._layers, self._hidden = model.num_layers, model.hidden_size
        self._linear_bytes = weights.linear / shared
        self._head_bytes = (weights.head or weights.embedding) / shared
        self._token_flops = 2.0 * model.numbers_per_token / shared
        self._row_flops = 2.0 * model.vocab_size * model.hidden_size / shared
        self._row_bytes = LOGITS_PASSES * 4.0 * model.vocab_size / shared
        self._pair_flops = 4.0 * model.num_heads * model.head_dim / shared
        self._kv_bytes = setting.token_bytes / model.num_layers / shared
        self._bandwidth = rates.bandwidth
        self._flops = rates.narrow if form.eight_bit else rates.flops
        self._attention_flops = self._head_flops = rates.flops
        self._experts = _Experts.of(model, weights.experts / max(1, weights.linear))
        windows = Counter(model.layer_window(layer) for layer in range(model.num_layers))
        self._full = windows.pop(None, 0)
        self._windows = [(window, count) for window, count in windows.items() if window]
        item = jnp.dtype(setting.config.model.dtype).itemsize
        device, overhead = setting.device, []
        for has_prefill in (False, True):
            number = launches(device.target, model.num_layers, has_prefill)
            overhead.append(number * device.launch)
        self._launches = overhead
        self._hops = 2 * model.num_layers * device.hop if shared > 1 else 0.0
        self._sum_bytes = 0.0  # seconds of a token that devices add up
        if shared > 1:
            sent = 2 * (shared - 1) / shared * model.hidden_size * item
            self._sum_bytes = 2 * model.num_layers * sent / device.link

    def of(self, plan: StepPlan, num_pages: int) -> StepSeconds:
        shape, rows = self._programs.of_plan(plan), plan.rows
        tokens = shape.num_decode_tokens + shape.num_prefill
        linear = self._linear_bytes
        if self._experts is not None:
            linear *= self._experts.read(sum(rows.lengths))  # rows without a token choose none
        bandwidth = self._bandwidth
        seconds = max(linear / bandwidth, tokens * self._token_flops / self._flops)
        head = self._head_bytes + shape.num_rows * self._row_bytes
        seconds += max(head / bandwidth, shape.num_rows * self._row_flops / self._head_flops)
        num_decode = plan.num_decode
        pairs = held = float(sum(rows.starts[:num_decode]) + num_decode)
        for start, length in zip(rows.starts[num_decode:], rows.lengths[num_decode:]):
            held += start + length
            pairs += length * start + length * (length + 1) / 2
        seconds += self._full * self._attention(held, pairs)
        for window, count in self._windows:
            seen_rows = [Row(*one) for one in zip(rows.starts, rows.lengths)]
            pairs = float(sum(seen(row, window) for row in seen_rows))
            held = float(sum(min(r.start + r.length, window + r.length - 1) for r in seen_rows))
            seconds += count * self._attention(held, pairs)
        seconds += self._launches[bool(shape.num_prefill)]
        seconds += self._hops + tokens * self._sum_bytes
        host = HOST_STEP_S + HOST_ROW_S * num_decode
        return StepSeconds(seconds, host * (1 - COMMIT_SHARE), host * COMMIT_SHARE)

    def first_delivery(self) -> float:
        return 0.0

    def _attention(self, held: float, pairs: float) -> float:
        """Of one layer: keys and values of `held` tokens, `pairs` of a query and a key."""
        moved, computed = held * self._kv_bytes, pairs * self._pair_flops
        return max(moved / self._bandwidth, computed / self._attention_flops)


class _Experts(NamedTuple):
    """How much of a sparse model's weights a step reads.

    Attributes:
        share: of the linear layers' bytes that are experts'.
        missed: that a token leaves an expert alone.
    """

    share: float
    missed: float

    @staticmethod
    def of(model: ModelConfig, share: float) -> _Experts | None:
        if not isinstance(model, MoeConfig):
            return None
        return _Experts(share, 1.0 - model.experts_per_token / model.num_experts)

    def read(self, tokens: int) -> float:
        """Share of the linear layers' bytes, tokens being routed evenly."""
        return 1.0 - self.share * self.missed**tokens
