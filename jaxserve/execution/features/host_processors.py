"""Logits processors of callers that run on the host: callables on rows, and classes of vLLM's.

The compiled step calls back to the host with the rows that ask for it and waits for their logits,
in every step: that is slow, and nothing else is traced for a new callable.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
from collections.abc import Mapping
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import jax
import numpy as np

from jaxserve.errors import ValidationError
from jaxserve.execution.features.feature import NO_OPTIONS, Facts, Feature, Need, Rows, TakenStep
from jaxserve.execution.layout import array, arrays
from jaxserve.params.logits_processor import FIELD, HOST_PROCESSORS, HostProcessor
from jaxserve.params.vllm_processor import BatchUpdate, MoveDirectionality
from jaxserve.request.request import Request
from jaxserve.request.stop_rule import End, FinishReason

if TYPE_CHECKING:
    from jaxserve.execution.step_shape import StepShape

logger = logging.getLogger(__name__)


@arrays
class HostRow:
    """The number of the request, from 1; 0: its rows stay on the device."""

    number: Any = array()


class Served(NamedTuple):
    """A request whose rows come to the host.

    Attributes:
        request: the request.
        processors: its own, in their order.
        output: ids of its generated tokens; the list grows.
    """

    request: Request
    processors: tuple[HostProcessor, ...]
    output: list[int]


class HostProcessing(Feature):
    """Calls back to the host for the rows of requests with processors there.

    Attributes:
        classes: of vLLM's, which change all rows.
        failures: by sequence what one of its processors has raised.
    """

    name: ClassVar[str] = HOST_PROCESSORS
    row = HostRow
    on_demand: ClassVar[bool] = True
    classes: ClassVar[tuple[type, ...]] = ()

    def __init__(self, facts: Facts, options: Mapping[str, Any] = NO_OPTIONS):
        super().__init__(facts, options)
        self.failures: dict[str, Exception] = {}
        self._served: dict[int, Served] = {}  # by number
        self._numbers: dict[str, int] = {}  # by sequence
        self._count = 0
        self._batches = [VllmBatch(kind, facts) for kind in self.classes]

    # -- the engine's side

    def processors_of(self, request: Request) -> tuple[HostProcessor, ...]:
        """The request's own.

        Raises:
            ValidationError: they are none, or beams are searched where all requests have classes.
        """
        asked = self.asked_of(request)
        if request.is_beam and self.classes:
            names = ", ".join(kind.__name__ for kind in self.classes)
            raise ValidationError(FIELD, names, "none of the engine's where beams are searched")
        if asked is None:
            return ()
        is_list = isinstance(asked, tuple | list)
        if not is_list or not all(isinstance(one, HostProcessor) for one in asked):
            raise ValidationError(FIELD, asked, "callables, of an LLM in this process")
        return tuple(asked)

    def own(self, request: Request) -> None:
        self.processors_of(request)  # refuses before the request is queued

    def need(self, request: Request) -> Need:
        own = self.processors_of(request)
        is_wanted = request.asked.pooling is None and (own or self._batches)
        return Need.ALWAYS if is_wanted else Need.NEVER

    def row_of(self, request: Request) -> HostRow:
        if self.need(request) is Need.NEVER:
            return HostRow(0)
        number = self._numbers.get(request.request_id)
        if number is None:
            self._count += 1
            number = self._numbers[request.request_id] = self._count
            served = Served(request, self.processors_of(request), [])
            self._served = {**self._served, number: served}
        return HostRow(number)

    def took(self, step: TakenStep) -> None:
        seen = step.seen
        for entry, request in enumerate(seen.requests):
            if request.request_id in self.failures and request.error is None:
                request.error = FinishReason.ERROR
                if entry in seen.ends:
                    seen.ends[entry] = End(FinishReason.ERROR, None)
        for entry in seen.ends:
            self.ended(seen.requests[entry].request_id)

    def ended(self, sequence_id: str) -> None:
        number = self._numbers.pop(sequence_id, None)
        if number is not None:
            served = dict(self._served)
            del served[number]
            self._served = served  # a callback may read the other one

    # -- the traced side

    def adjust(
        self, inputs: Any, rows: Rows, logits: jax.Array, state: Any
    ) -> tuple[jax.Array, Any]:
        history, numbers = rows.history[rows.slot], rows.values[self.name].number
        like = jax.ShapeDtypeStruct(logits.shape, logits.dtype)
        given = (numbers, rows.position, history, logits)
        changed = jax.pure_callback(self._on_host, like, *given)
        return jax.numpy.where((numbers > 0)[:, None], changed, logits), state

    def _on_host(self, *given: Any) -> np.ndarray:
        """The rows' logits float32[M, V] after their processors; runs while the step does."""
        numbers, positions, history, logits = map(np.asarray, given)
        found, all_served = np.array(logits), self._served
        rows: dict[int, Served] = {}
        for place, number in enumerate(numbers.tolist()):
            served = all_served.get(number)
            if served is None:
                continue
            rows[place] = served
            first = served.request.num_prompt
            served.output[:] = history[place, first : positions[place] + 1].tolist()
            for processor in served.processors:
                self._run(served, processor, found, place)
        for batch in self._batches:
            try:
                batch.run(rows, found)
            except Exception as error:
                logger.exception("logits processor %s failed", batch.name)
                self.failures |= {one.request.request_id: error for one in rows.values()}
        return found

    def _run(
        self, served: Served, processor: HostProcessor, logits: np.ndarray, place: int
    ) -> None:
        request = served.request
        if request.request_id in self.failures:
            return
        try:
            prompt = request.prompt_token_ids
            logits[place] = processor.apply(prompt, served.output, logits[place])
        except Exception as error:  # the callable is the caller's
            logger.exception("logits processor %s failed", processor.name)
            self.failures[request.request_id] = error

    def cost(self, shape: StepShape) -> float:
        return 100.0 * shape.num_special * self.facts.vocab_size


class VllmBatch:
    """Runs one class of vLLM's V1 interface, which knows rows by their place in a batch.

    Args:
        kind: the class.
        facts: of the engine.

    Raises:
        ValidationError: torch is not there, or the class cannot be made.
    """

    def __init__(self, kind: type, facts: Facts):
        self.name = kind.__name__
        if importlib.util.find_spec("torch") is None:
            allowed = "functions and callables where torch is not installed"
            raise ValidationError(FIELD, self.name, allowed)
        self._torch = importlib.import_module("torch")
        model = SimpleNamespace(get_vocab_size=lambda: facts.vocab_size)
        scheduler = SimpleNamespace(max_num_seqs=facts.max_num_seqs)
        config = SimpleNamespace(model_config=model, scheduler_config=scheduler)
        try:
            self._processor = kind(config, self._torch.device("cpu"), False)
        except Exception as error:
            allowed = f"a class that can be made with (config, device, is_pin_memory): {error!r}"
            raise ValidationError(FIELD, self.name, allowed) from error
        self._batch: list[Served] = []  # by place in vLLM's sense

    def run(self, rows: Mapping[int, Served], logits: np.ndarray) -> None:
        """Change rows of logits float32[M, V] in place.

        Args:
            rows: by place the request of each row.
            logits: all rows.
        """
        place_of = {id(served): place for place, served in rows.items()}
        self._processor.update_state(self._changes(list(rows.values())))
        places = [place_of[id(served)] for served in self._batch]
        if not places:
            return
        given = self._torch.from_dlpack(logits[places])  # a copy, which it may change
        changed = self._processor.apply(given)
        after = np.asarray(changed.detach().cpu().numpy())
        if after.shape != (len(places), logits.shape[1]) or after.dtype != np.float32:
            allowed = f"one whose `apply` returns float32{[len(places), logits.shape[1]]}"
            raise ValidationError(f"{FIELD}.{self.name}", f"{after.dtype}{after.shape}", allowed)
        logits[places] = after

    def _changes(self, now: list[Served]) -> Any:
        """What vLLM calls a batch update, from the last batch to this one; None: it is the same."""
        alive = {id(served) for served in now}
        removed = [i for i, served in enumerate(self._batch) if id(served) not in alive]
        known = {id(served) for served in self._batch}
        fresh = [served for served in now if id(served) not in known]
        if not removed and not fresh:
            return None
        batch: list[Served | None] = [s if id(s) in alive else None for s in self._batch]
        added, free = [], [*removed]
        for served in fresh:
            place = free.pop(0) if free else len(batch)
            batch[place : place + 1] = [served]
            request = served.request
            added.append((place, request.params, request.prompt_token_ids, served.output))
        moved = []
        while None in batch:  # those at the end take the places that were left
            last = batch.pop()
            if last is not None:
                place = batch.index(None)
                batch[place] = last
                moved.append((len(batch), place, MoveDirectionality.UNIDIRECTIONAL))
        self._batch = [served for served in batch if served is not None]
        gone = [place for place in removed if place not in {entry[0] for entry in added}]
        return BatchUpdate(len(self._batch), gone, added, moved)


def host_feature(classes: tuple[type, ...]) -> type[HostProcessing]:
    """The feature of an engine with classes of vLLM's: all requests have it, from the start."""
    return type("HostProcessing", (HostProcessing,), {"classes": classes, "on_demand": False})
