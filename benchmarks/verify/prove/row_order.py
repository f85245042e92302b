"""Whether a program may sum a row in another order beside other rows: read from what was compiled.

A compiled program has one grid and one tiling for each of its kernels, whatever a batch holds. What
could still follow from other rows, or from the time, is looked for: atomics on floats, whose order
is that in which thread blocks come (sums of integers have none), kernels of libraries, which divide
their work as they choose, and products that are not tiled as they were told.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable

from benchmarks.verify.prove.proof import KernelUse

# of PTX; fences and barriers are none
ATOMIC = re.compile(r"\b(?:atom|red)\.[\w.:]+")
FUSION = re.compile(r"%([\w.\-]+) = (\(.*?\)|\S+) fusion\(")
FLOAT = re.compile(r"\b(?:f|bf)\d")
LIBRARIES = ("__cublas", "__cudnn")
TILING = re.compile(r'"kind":"__triton[^"]*gemm[^"]*".*?"output_tiles":\[\{"sizes":\[([^]]*)\]')


def atomics(ptx: str) -> dict[str, int]:
    """How often each atomic instruction stands in a piece of PTX."""
    return dict(Counter(found.group(0) for found in ATOMIC.finditer(ptx)))


def out_of_order(hlo: str, kernels: Iterable[KernelUse]) -> tuple[str, ...]:
    """What of a program may sum a row in several orders, in words; empty: nothing."""
    written = {re.sub(r"[.-]", "_", name): kind for name, kind in FUSION.findall(hlo)}
    found = [
        f"{kernel.name} has atomics: {', '.join(sorted(kernel.atomics))}"
        for kernel in kernels
        if kernel.atomics and FLOAT.search(written.get(kernel.name, "f32["))
    ]
    targets = set(re.findall(r'custom_call_target="([^"]*)"', hlo))
    libraries = sorted(one for one in targets if one.startswith(LIBRARIES))
    found += [f"{name} is a library's" for name in libraries]
    if len(tilings(hlo)) > 1:
        found.append(f"products have several tilings: {', '.join(sorted(tilings(hlo)))}")
    return tuple(found)


def tilings(hlo: str) -> set[str]:
    """Rows x columns of the tiles of XLA's products on a GPU."""
    sizes = (found.group(1).replace('"', "").split(",") for found in TILING.finditer(hlo))
    return {"x".join(one[-2:]) for one in sizes}
