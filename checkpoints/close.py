"""A base class of readers that are closed when their `with` block ends."""

from __future__ import annotations

from abc import ABC, abstractmethod
from types import TracebackType
from typing import Self


class Closeable(ABC):
    """A context manager that returns itself and is closed at the end."""

    @abstractmethod
    def close(self) -> None:
        """Free files and memory that the object holds."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
