"""How many devices a load needs, by sums of memory and by simulation."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jaxserve.bench.percentiles import percentile
from jaxserve.config.engine_config import EngineConfig
from jaxserve.errors import ValidationError
from jaxserve.loading.capacity import Room, gb, weight_bytes
from jaxserve.models.config import ModelConfig, resolve_dtype
from jaxserve.simulation.prices import HOURS_A_MONTH, Offer
from jaxserve.simulation.setting import Setting, settle
from jaxserve.simulation.simulator import Simulation
from jaxserve.simulation.step_time import Rates, Roofline
from jaxserve.simulation.workload import Workload

REQUESTS = 100  # of a simulation
ALONE = 4  # requests that are served one after the other, to see what is possible at all
MOST_REPLICAS = 512
NEARLY = 0.9  # of the usable memory: weights of so much leave no room for the rest
# of the time, that a replica computes prompts alone, from which on the search begins
LEAST_BUSY = 0.4
Known = dict[tuple[Any, ...], "Latency"]  # by engine and workload
SIZES = (1, 2, 4, 8)  # devices that share a model


@dataclass(frozen=True, slots=True)
class Load:
    """What is to be served.

    Attributes:
        qps: requests a second.
        input_len, output_len: tokens of each.
        ttft, tpot: seconds that the p99 of each may be.
    """

    qps: float
    input_len: int
    output_len: int
    ttft: float
    tpot: float

    @property
    def tokens_an_hour(self) -> float:
        """Of prompts and outputs."""
        return self.qps * (self.input_len + self.output_len) * 3600

    def workload(self, replicas: int) -> Workload:
        """What one of several replicas serves."""
        return Workload(
            num_prompts=REQUESTS,
            request_rate=self.qps / replicas,
            input_len=self.input_len,
            output_len=self.output_len,
        )


@dataclass(frozen=True, slots=True)
class Latency:
    """Seconds, simulated."""

    ttft_p50: float
    ttft_p99: float
    tpot_p50: float
    tpot_p99: float
    queue_p50: float

    def meets(self, load: Load) -> bool:
        """Whether both limits are kept."""
        return self.ttft_p99 <= load.ttft and self.tpot_p99 <= load.tpot


@dataclass(frozen=True, slots=True)
class Candidate:
    """One way to serve a load, or why it is none.

    Attributes:
        offer: the machine.
        quantization: of the weights; "": as the model's type.
        devices: that share a model.
        room: of one device's memory.
        setting: of an engine; None: it does not fit.
        slots: requests of the load that run at once.
        replicas: engines.
        latency: of the load; of a single request where the limits cannot be kept.
        reason: why it does not serve the load; None: it does.
    """

    offer: Offer
    quantization: str
    devices: int
    room: Room | None = None
    setting: Setting | None = None
    slots: int = 0
    replicas: int = 0
    latency: Latency | None = None
    reason: str | None = None

    @property
    def machines(self) -> int:
        """How many have to be rented."""
        return math.ceil(self.replicas / (self.offer.devices // self.devices))

    @property
    def per_hour(self) -> float | None:
        """Price of all of them."""
        return None if self.offer.per_hour is None else self.machines * self.offer.per_hour

    @property
    def per_month(self) -> float | None:
        return None if self.per_hour is None else self.per_hour * HOURS_A_MONTH

    def per_million(self, load: Load) -> float | None:
        """Price of a million tokens of prompts and outputs, at this load."""
        return None if self.per_hour is None else self.per_hour / load.tokens_an_hour * 1e6

    @property
    def order(self) -> tuple[float, ...]:
        """The cheapest first; without prices the fewest devices."""
        cost = self.replicas * self.devices if self.per_hour is None else self.per_hour
        worst = math.inf if self.latency is None else self.latency.ttft_p99
        return (self.reason is not None, cost, self.replicas * self.devices, worst)


def candidates(
    asked: EngineConfig,
    model: ModelConfig,
    load: Load,
    offers: Sequence[Offer],
    quantizations: Sequence[str],
    told: Callable[[str], Any],
) -> Iterator[Candidate]:
    """Every machine with every form of the weights and every number of devices that may share them.

    Args:
        asked: settings but for these.
        model: that is served.
        load: that it is to serve.
        offers: the machines.
        quantizations: of the weights.
        told: hears what is looked at.
    """
    known: Known = {}
    for offer in offers:
        for quantization in quantizations:
            for devices in SIZES:
                if devices > offer.devices:
                    continue
                told(f"{offer.name}, {quantization or model.dtype}, {devices} devices")
                yield candidate(asked, model, load, offer, quantization, devices, known)


def candidate(
    asked: EngineConfig,
    model: ModelConfig,
    load: Load,
    offer: Offer,
    quantization: str,
    devices: int,
    known: Known | None = None,
) -> Candidate:
    """One way to serve a load; `known` is what was simulated so far, and is added to."""
    known = {} if known is None else known
    found = Candidate(offer, quantization, devices)
    asked = replace(asked, tensor_parallel_size=devices)
    try:
        setting = settle(asked, model, offer.device, quantization, offer.memory)
    except ValidationError as error:
        return replace(found, reason=_lack(asked, model, offer, quantization) or str(error))
    room = room_in(setting, offer.memory)
    found = replace(found, room=room, setting=setting)
    length = load.input_len + load.output_len
    if setting.limits.max_model_len < length:
        allowed = setting.limits.max_model_len
        return replace(found, reason=f"does not fit: a request has {length} tokens, not {allowed}")
    tokens = (setting.num_pages - 1) * setting.config.cache.page_size
    slots = min(setting.limits.max_num_seqs, tokens // length)
    found = replace(found, slots=slots)

    def serve(workload: Workload, most: int | None = None) -> Latency:
        # pages beyond those of all slots change nothing
        pages = slots * -(-(length + 1) // setting.config.cache.page_size) + 1
        engine = offer.kind, quantization, devices, slots, min(setting.num_pages, pages)
        key = (*engine, workload, most)
        if key not in known:
            known[key] = latency_of(setting, workload, most)
        return known[key]

    alone = serve(replace(load.workload(1), num_prompts=ALONE), 1)
    if not alone.meets(load):
        return replace(found, replicas=1, latency=alone, reason="too slow for a single request")
    replicas, latency = _fewest(serve, load, alone)
    if replicas is None:
        return replace(found, replicas=1, latency=latency, reason="too slow at any load")
    return replace(found, replicas=replicas, latency=latency)


def room_in(setting: Setting, memory: int) -> Room:
    """The sum of one device's memory."""
    demand = setting.demand
    return Room(
        memory,
        setting.config.asked.gpu_memory_utilization,
        demand.weights,
        setting.devices,
        demand.temporaries + demand.tables,
        setting.token_bytes // setting.devices,
    )


def latency_of(setting: Setting, workload: Workload, most: int | None = None) -> Latency:
    """Of a workload on one engine, of which at most `most` requests are under way at once."""
    times = Roofline(setting, Rates.of_data_sheet(setting.device))
    served = Simulation(setting, times, max_concurrency=most).run(workload.requests())
    found = served.samples()
    return Latency(
        percentile(found["ttft"], 50),
        percentile(found["ttft"], 99),
        percentile(found["tpot"], 50),
        percentile(found["tpot"], 99),
        percentile(found["queue"], 50),
    )


def _lack(asked: EngineConfig, model: ModelConfig, offer: Offer, quantization: str) -> str | None:
    """How much memory a device lacks; None: it is not memory that is short."""
    devices, share = asked.tensor_parallel_size, asked.gpu_memory_utilization
    dtype, platform = resolve_dtype(asked.dtype, model), offer.device.platform
    held = weight_bytes(model, dtype, quantization, platform=platform, devices=devices)
    weights = held.total // devices
    if weights < share * offer.memory * NEARLY:
        return None
    usable = gb(share * offer.memory)
    return f"does not fit: {gb(weights)} of weights on a device, of which {usable} may be used"


def _fewest(
    serve: Callable[[Workload], Latency], load: Load, alone: Latency
) -> tuple[int | None, Latency]:
    """The fewest replicas that keep the limits, and their latency: by doubling, then bisection.

    Fewer than those that compute prompts for `LEAST_BUSY` of the time are not tried.
    """
    known: dict[int, Latency] = {}

    def serves(replicas: int) -> bool:
        if replicas not in known:
            known[replicas] = serve(load.workload(replicas))
        return known[replicas].meets(load)

    low = int(load.qps * alone.ttft_p50 * LEAST_BUSY)
    high = low + 1
    while not serves(high):
        low, high = high, 2 * high
        if high > MOST_REPLICAS:
            return None, known[low]
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if serves(middle) else (middle, high)
    return high, known[high]
