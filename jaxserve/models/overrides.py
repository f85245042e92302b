"""Values of a user in place of those in config.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxserve.errors import ValidationError


class OverriddenConfig(dict[str, Any]):
    """A parsed config.json with values that replace its own, which notes what is read of it.

    A value is replaced whole, a dictionary too.
    """

    def __init__(self, config: Mapping[str, Any], overrides: Mapping[str, Any]):
        super().__init__({**config, **overrides})
        self._unread = set(overrides)

    def __getitem__(self, key: str) -> Any:
        self._unread.discard(key)
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self._unread.discard(key)
        return super().get(key, default)

    def check_all_read(self, architecture: str) -> None:
        """Refuse overrides that had no effect, once the config has been read.

        Raises:
            ValidationError: names the first one.
        """
        for key in sorted(self._unread):
            raise ValidationError(
                f"hf_overrides.{key}", self[key], f"keys of config.json that {architecture} reads"
            )
