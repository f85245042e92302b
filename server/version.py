"""The version of jaxserve, as the package's metadata states it."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version


def _find() -> str:
    try:
        return version("jaxserve")
    except PackageNotFoundError:
        # Run from a checkout that was not installed: there is no metadata to read.
        return "0+checkout"


VERSION = _find()
