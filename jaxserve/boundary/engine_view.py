"""The view of an engine for watchers: sizes and counts, and no text."""

from __future__ import annotations

from typing import NamedTuple

MAX_CELLS = 8192  # of the map: what a screen can show, and a message hold
MAX_SLOTS = 1024
MAX_OWNER = (1 << 14) - 1  # that has room beside the state of a page


class SlotView(NamedTuple):
    """A request that runs.

    Attributes:
        slot: its row of the device state.
        sequence_id: its name in the engine; of a beam search that of its first sequence.
        rank: its class, from `Policy.rank`.
        num_prompt, num_output: tokens that the host knows.
        num_computed: tokens with keys and values in pages, or that will have them after the step.
        max_tokens: the most output tokens.
        num_pages: pages that it owns, alone or shared.
        num_cached: prompt tokens that the prefix cache had.
        is_prefilling: its prompt is not computed yet.
        num_preemptions: times that it lost its slot.
        age: seconds since it arrived.
    """

    slot: int
    sequence_id: str
    rank: int
    num_prompt: int
    num_output: int
    num_computed: int
    max_tokens: int
    num_pages: int
    num_cached: int
    is_prefilling: bool
    num_preemptions: int
    age: float


class QueueView(NamedTuple):
    """Requests of one class that wait for a slot.

    Attributes:
        rank: the class.
        num_waiting: number of requests.
        oldest: seconds since the first of them arrived.
    """

    rank: int
    num_waiting: int
    oldest: float


class EngineView(NamedTuple):
    """An engine at one moment.

    Attributes:
        num_slots: running and free slots together.
        slots: the running requests, by slot; at most MAX_SLOTS.
        queues: the waiting requests, by class.
        num_pages: pages of the pool, without the trash page.
        pages_per_cell: pages that a cell of the map stands for.
        cells: the map, little-endian uint16[ceil(num_pages / pages_per_cell)]: the `PageState` of a
            page in the two lowest bits, above them 1 + the slot of a request that owns it, 0 for
            none and MAX_OWNER for all slots from there on. A cell of several pages shows the one
            with the highest state.
        seconds: that making this view took.
        profile: the folder that the engine's work is recorded into; "": it is not.
        num_host_pages: pages of the host's memory; 0: no page leaves the device.
        host_pages_per_cell: of them that a cell of their map stands for.
        host_cells: their map, as `cells`: a `HostPageState` each, of several the highest.
    """

    num_slots: int
    slots: list[SlotView]
    queues: list[QueueView]
    num_pages: int
    pages_per_cell: int
    cells: bytes
    seconds: float
    profile: str = ""
    num_host_pages: int = 0
    host_pages_per_cell: int = 1
    host_cells: bytes = b""
