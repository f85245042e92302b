"""Python programs in processes of their own, which have as many fake CPU devices as they need."""

from __future__ import annotations

import os

from tests.command_line import ROOT, output_of


def environment(devices: int) -> dict[str, str]:
    """Variables of a process with so many devices."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={devices}"
    return os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags, "PYTHONPATH": str(ROOT)}


def said(devices: int, *words: str, timeout: float = 600) -> list[str]:
    """The lines that Python has written; it must end well within `timeout` seconds.

    Args:
        devices: that it has.
        words: of Python's command line.
    """
    return output_of(*words, env=environment(devices), timeout=timeout).splitlines()
