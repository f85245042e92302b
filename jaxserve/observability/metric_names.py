"""What every metric of an engine has in common: the prefix of its name, and its labels."""

from __future__ import annotations

from typing import NamedTuple

LABELS = ("model_name", "engine")


class MetricNames(NamedTuple):
    """Names and labels of one engine's metrics.

    Attributes:
        model_name: value of the label `model_name`.
        prefix: what the names begin with, before a colon.
        engine: value of the label `engine`: its number, "0" where there is one.
    """

    model_name: str
    prefix: str = "jaxserve"
    engine: str = "0"

    def full(self, name: str) -> str:
        """The name as it is scraped."""
        return f"{self.prefix}:{name}"

    @property
    def values(self) -> list[str]:
        """Of LABELS."""
        return [self.model_name, self.engine]
