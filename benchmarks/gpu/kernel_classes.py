"""The kernels of a traced step in classes: how often, how long, and the pauses before them."""

from __future__ import annotations

import re
from dataclasses import dataclass

from benchmarks.device_trace import DeviceTime
from benchmarks.gpu.roofline import ATTENTION, PRODUCTS

# class and what is in the names of its kernels; the first that fits counts
CLASSES = (
    (ATTENTION, "paged_|attention|flash|fmha"),
    ("KV write", "scatter|dynamic.update|write|rope|rotat"),
    (PRODUCTS, "gemm|nvjet|cutlass|xmma|cublas|splitk|dot|matmul|linear"),
    ("sampling", "sort|top_?k|argm(ax|in)|threefry|rng|sampl|filter|thresh|kept"),
    ("copies", "memcpy|memset|copy|transpose|concatenate|pad_|bitcast"),
    ("reductions", "reduce|norm"),
    ("other fusions", "fusion|loop|wrapped"),
)
OTHER = "other"


@dataclass(slots=True)
class KernelClass:
    """Of one step: calls, seconds in which its kernels ran, seconds of the pauses before them."""

    calls: float = 0.0
    seconds: float = 0.0
    pauses: float = 0.0


def class_of(kernel: str) -> str:
    """The class of a kernel by its name."""
    for name, pattern in CLASSES:
        if re.search(pattern, kernel, flags=re.IGNORECASE):
            return name
    return OTHER


def by_class(trace: DeviceTime, steps: int) -> dict[str, KernelClass]:
    """The classes of so many traced steps, the longest first, each as of one step."""
    found: dict[str, KernelClass] = {}
    for name, calls in trace.calls.items():
        entry = found.setdefault(class_of(name), KernelClass())
        entry.calls += calls / steps
        entry.seconds += trace.seconds[name] / steps
        entry.pauses += trace.before.get(name, 0.0) / steps
    return dict(sorted(found.items(), key=lambda pair: -pair[1].seconds))
