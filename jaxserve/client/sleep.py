"""Sleep mode: an engine frees its device memory for a while and keeps its compiled programs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from jaxserve.boundary.messages import WOKEN_BY, Action
from jaxserve.config.settings import OneOf
from jaxserve.errors import ValidationError

WEIGHTS, KV_CACHE = "weights", "kv_cache"
TAGS = {WEIGHTS: Action.WAKE_WEIGHTS, KV_CACHE: Action.WAKE_KV_CACHE}
SCHEDULING = "scheduling"  # a tag of `wake_up` beside those of memory

ABORT, WAIT, KEEP = "abort", "wait", "keep"
MODES = OneOf((ABORT, WAIT, KEEP))


def check_mode(mode: str) -> None:
    """Raises ValidationError for a mode in which memory cannot be freed."""
    if mode == KEEP:
        raise ValidationError("mode", mode, f"{ABORT} or {WAIT}: pages are freed")
    MODES.checked("mode", mode)


def memory_tags(tags: Sequence[str] | None) -> list[str] | None:
    """Those of `wake_up` that are of memory; None: all."""
    return None if tags is None else [tag for tag in tags if tag != SCHEDULING]


def check_tags(tags: Sequence[str] | None) -> None:
    """Raises ValidationError for one that names no part of the memory; None: all of it."""
    for tag in tags or ():
        if tag not in TAGS:
            raise ValidationError("tags", tag, f"some of {', '.join(TAGS)}")


class Sleeper(Protocol):
    """What a client can do for its engines to sleep; see `EngineClient`."""

    @property
    def asleep(self) -> list[Action]: ...
    @property
    def has_work(self) -> bool: ...
    def check_alive(self) -> None: ...
    def control(self, action: Action) -> None: ...


class Sleep:
    """Sleep mode of one client's engines."""

    def __init__(self, client: Sleeper):
        self._client = client

    @property
    def _away(self) -> set[str]:
        """Those of TAGS whose memory is freed."""
        asleep = self._client.asleep
        left = WOKEN_BY[asleep[0]].difference(asleep) if asleep else ()
        return {tag for tag, action in TAGS.items() if action in left}

    @property
    def is_sleeping(self) -> bool:
        """Whether any of the engine's memory is freed."""
        return bool(self._away)

    def check_awake(self) -> None:
        """Raises ValidationError while the engine sleeps."""
        if self._away:
            raise ValidationError("engine", "asleep", "an engine that is awake: call wake_up first")

    def sleep(self, level: int) -> None:
        """Free the KV cache, prefix cache included, and the weights.

        Args:
            level: 1 keeps the weights in host memory, 2 reads them again from the checkpoint.

        Raises:
            ValidationError: another level, or requests run.
        """
        if level not in (1, 2) or isinstance(level, bool):
            raise ValidationError("level", level, "1 (weights go to host memory) or 2 (they go)")
        self._client.check_alive()
        if self._client.has_work:
            raise ValidationError("level", level, "no sleep while requests run")
        if self._client.asleep[:1] == [Action.RELEASE_KV_CACHE]:
            raise ValidationError("level", level, "wake_up first: the KV cache is released")
        if self._away:
            return
        self._client.control(Action.SLEEP if level == 1 else Action.DEEP_SLEEP)

    def release_kv_cache(self) -> None:
        """Free the KV cache, prefix cache included, of an engine that begins no step.

        Raises:
            ValidationError: requests are unfinished, or memory is freed already.
        """
        self._client.check_alive()
        self.check_awake()
        if self._client.has_work:
            raise ValidationError("engine", "busy", "one without unfinished requests")
        self._client.control(Action.RELEASE_KV_CACHE)

    def wake_up(self, tags: Sequence[str] | None) -> None:
        """Restore the freed memory.

        Args:
            tags: some of "weights" and "kv_cache"; both when None.

        Raises:
            ValidationError: another tag.
        """
        check_tags(tags)
        self._client.check_alive()
        away = self._away
        for tag, action in TAGS.items():
            if tag in away and (tags is None or tag in tags):
                self._client.control(action)
