"""Writes the load of a server as it comes, without its text: see `load_trace`."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import secrets
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jaxserve.boundary.messages import AddGroup, StepOutput
from jaxserve.config.resolved_config import ResolvedConfig
from jaxserve.errors import ValidationError
from jaxserve.memory.page_keys import page_keys, root_key
from jaxserve.observability.load_trace import KEY_PAGE, VERSION, TracedStep

logger = logging.getLogger(__name__)

KEY_LETTERS = 12  # of a key: 48 bits
FLUSH_LINES = 256


@dataclass(slots=True)
class _Sequence:
    """What is known of one sequence; moments by `time.monotonic()`, None before they come."""

    tokens: list[int] = field(default_factory=list)
    first_step: float | None = None
    overhead: float | None = None
    first_token: float | None = None
    last_token: float | None = None
    delivery: float | None = None


class TraceRecorder:
    """Writes a line a sequence when it has ended, and a line a step.

    A key is a hash with a secret that is made for the file and kept nowhere, so that nothing of a
    prompt can be found from it. Names of clients are hashed with it too. Beam searches and requests
    that are embedded are left out.

    Args:
        path: of the file, which is written anew.

    Raises:
        ValidationError: it cannot be written.
    """

    def __init__(self, path: Path):
        try:
            # who may record may read: lengths and times of others' requests are in it
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            self._file = os.fdopen(descriptor, "w", encoding="utf-8")
        except OSError as error:
            allowed = f"a file that can be written ({error.strerror})"
            raise ValidationError("--record-trace", str(path), allowed) from error
        self._secret = secrets.token_hex(16)
        self._start: float | None = None  # when the first request came
        self._groups: dict[str, AddGroup] = {}
        self._sequences: dict[str, _Sequence] = {}
        self._num_lines = 0
        self._has_ended = False

    def begin(self, config: ResolvedConfig) -> None:
        """The engine is ready: say what is recorded."""
        self._write(
            {
                "trace": VERSION,
                "model": config.asked.model_names[0],
                "max_num_seqs": config.scheduler.max_num_seqs,
                "max_num_batched_tokens": config.scheduler.max_num_batched_tokens,
                "max_prefill_tokens": config.scheduler.max_prefill_tokens,
                "max_model_len": config.scheduler.max_model_len,
                "num_pages": config.cache.num_pages,
                "page_size": config.cache.page_size,
                "scheduling_policy": config.asked.scheduling_policy,
                "enable_prefix_caching": config.asked.enable_prefix_caching,
                "overlap": config.asked.overlap,
            }
        )

    def added(self, request_id: str, group: AddGroup) -> None:
        """A request was sent to the engine."""
        if group.beams is not None or group.pooling is not None:
            return
        if self._start is None:
            self._start = group.queueing.arrival_time
        self._groups[request_id] = group
        self._sequences.update((name, _Sequence()) for name in group.sequence_ids)

    def took(self, step: StepOutput, now: float) -> None:
        """The engine has answered, and the server has its tokens `now`."""
        if self._start is None:
            return
        record, sequences = step.step, self._sequences
        for name, first in step.first_steps.items():
            if name in sequences:
                sequences[name].first_step = first.time
                sequences[name].overhead = first.queue_overhead
        for name, token in zip(step.sequence_ids, step.tokens, strict=True):
            one = sequences.get(name)
            if one is None:
                continue
            if one.first_token is None:
                one.first_token = now
                one.delivery = None if record is None else now - record.fetched
            one.last_token = now
            one.tokens.append(token)
        if record is not None:
            values = record._asdict()
            for moment in ("begin", "dispatched", "fetched"):
                values[moment] -= self._start
            self._write({"step": [_short(values[name]) for name in TracedStep._fields]})

    def ended(self, request_id: str) -> None:
        """All sequences of a request have ended; an unknown one is let be."""
        group = self._groups.pop(request_id, None)
        if group is None:
            return
        for name in group.sequence_ids:
            one = self._sequences.pop(name)
            if one.tokens:
                self._write(self._line(group, one))

    def _line(self, group: AddGroup, one: _Sequence) -> dict[str, Any]:
        assert self._start is not None
        turn, tokens = group.queueing, [*group.prompt_token_ids, *one.tokens]
        keys = page_keys(tokens, KEY_PAGE, root_key((self._secret, group.cache_salt or "")))
        arrival = turn.arrival_time
        line = {
            "arrival": _short(max(0.0, arrival - self._start)),
            "prompt_tokens": len(group.prompt_token_ids),
            "output_tokens": len(one.tokens),
            "priority": turn.priority,
            "client": self._name(turn.client),
            "keys": [key.hex()[:KEY_LETTERS] for key in keys],
            "overhead": one.overhead,
            "delivery": one.delivery,
        }
        moments = {"queue": one.first_step, "ttft": one.first_token, "last": one.last_token}
        line |= {name: None if at is None else at - arrival for name, at in moments.items()}
        return {n: _short(v) if isinstance(v, float) else v for n, v in line.items() if v or v == 0}

    def _name(self, client: str) -> str:
        if not client:
            return ""
        return hashlib.blake2b((self._secret + client).encode(), digest_size=4).hexdigest()

    def close(self) -> None:
        """Write what is left; what comes later is left out."""
        if not self._has_ended:
            self._has_ended = True
            self._file.close()

    def _write(self, line: dict[str, Any]) -> None:
        if self._has_ended:
            return
        try:
            self._file.write(json.dumps(line, separators=(",", ":")) + "\n")
            self._num_lines += 1
            if self._num_lines % FLUSH_LINES == 0:
                self._file.flush()
        except OSError as error:  # a full disk: the server goes on
            logger.error("the recording of load ends here: %s", error)
            self._has_ended = True


def _short(value: float) -> float:
    return round(value, 7)
