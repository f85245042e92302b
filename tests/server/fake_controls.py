"""A stand-in for what has an engine sleep."""

from __future__ import annotations

from typing import Any


class FakeControls:
    """Notes what `AsyncLLMEngine` is asked for."""

    def __init__(self) -> None:
        self.asked: list[tuple[Any, ...]] = []

    async def sleep(self, level: int, mode: str) -> None:
        self.asked.append((level, mode))

    async def wake_up(self, tags: list[str] | None) -> bool:
        self.asked.append(("wake_up", tags))
        return tags is None

    async def reset_mm_cache(self) -> None:
        self.asked.append(("reset_mm_cache",))

    async def release_kv_cache_memory(self) -> None:
        self.asked.append(("release_kv_cache_memory",))

    async def start_profile(self, **asked: Any) -> None:
        self.asked.append(("start_profile", asked["profile_prefix"]))

    async def stop_profile(self) -> str:
        return "trace.gz"

    async def is_sleeping(self) -> bool:
        return bool(self.asked) and self.asked[-1][0] != "wake_up"
