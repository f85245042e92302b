"""Weights that a program brings from the host's memory, compiled for absent devices."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import jax

from benchmarks.verify.prove.program import COMPUTATION

_BODY = re.compile(r" while\(.*body=%?([\w.\-]+)")
_FETCH = re.compile(r"^\s+%?\S+ = .*S\(5\).* (?:dynamic-slice|fusion|async)-start\(")


def moved_first(run: Callable[..., Any], on_host: Sequence[bool]) -> Callable[..., Any]:
    """A function of leaves, some of them on the host, for a compiler without operands there.

    An absent GPU's has none. What lies there is given on the device, and the program puts it there
    before all else, so that everything behind is compiled as it is for operands of the host.
    """

    def moving(leaves: tuple[jax.Array, ...], *others: Any) -> Any:
        put = (
            jax.device_put(x, jax.memory.Space.Host) if moves else x
            for x, moves in zip(leaves, on_host, strict=True)
        )
        return run(tuple(put), *others)

    return moving


def fetches(hlo: str) -> int:
    """How many asynchronous copies of parts of the host's arrays the loops of a module begin."""
    bodies = set(_BODY.findall(hlo))
    inside, found = "", 0
    for line in hlo.splitlines():
        if begins := COMPUTATION.match(line):
            inside = begins["name"]
        elif inside in bodies and _FETCH.match(line):
            found += 1
    return found
