"""A measured figure, and the targets that it is held against."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.kernel_bench.cases import Case, DecodeCase, MatmulCase, PrefillCase, as_request
from jaxserve.bench.device_limits import MARGIN, NARROW_PRODUCTS

OURS = "jaxserve"
JAX_OP = "jax paged_attention"
FLASHINFER = "FlashInfer"
SDPA = "torch SDPA"
UNIFORM = "uniform"  # the same kernel and pages in a batch that is not ragged
BF16 = "bf16"
INT4 = "int4"
TOO_NOISY = "too noisy to measure"
IMPOSSIBLE = f"beyond {MARGIN} times the ceiling"
LARGE_DECODE = 65536  # tokens over all slots from which decode is bound by memory alone
RAGGED_TARGET = 1.2  # times a uniform batch's time


@dataclass(frozen=True, slots=True)
class Row:
    """One candidate of one case.

    Attributes:
        case: the case as JSON.
        label: the case for a table.
        candidate: name of the measured implementation.
        us: microseconds of one operation; None when it was not measured.
        rate: GB/s (decode, matmul of few rows) or TFLOP/s (prefill, matmul of many).
        unit: unit of the rate: "GB/s" or "TFLOP/s".
        percent: of the ceiling that was measured in the same run.
        difference: norm of the difference from our result over its norm.
        reason: why it was not measured, else a remark.
        verdicts: each target with "met", "missed".
    """

    case: dict[str, Any]
    label: str
    candidate: str
    us: float | None
    rate: float | None = None
    unit: str = ""
    percent: float | None = None
    difference: float | None = None
    reason: str = ""
    verdicts: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Ceilings:
    """The ceilings of this device, measured in the same run.

    Attributes:
        copy_gb_s: bytes read and written by a large copy, over its time.
        matmul_tflop_s: a large dense bf16 matrix product.
    """

    copy_gb_s: float
    matmul_tflop_s: float

    def seconds(self, moved: float, flops: float) -> float:
        """The least time of one operation: that of its bytes or that of its FLOPs."""
        return max(moved / (self.copy_gb_s * 1e9), flops / (self.matmul_tflop_s * 1e12))


def missing(case: Case, candidate: str, reason: str) -> Row:
    """The row of a candidate that was not measured."""
    return Row(as_request(case), case.label, candidate, None, reason=reason)


def figures(case: Case, seconds: float, ceilings: Ceilings, bits: float = 16) -> dict[str, Any]:
    """Rate and share of the ceiling that bounds this case."""
    if not math.isfinite(seconds):
        return {"us": None, "reason": TOO_NOISY}
    if isinstance(case, MatmulCase):
        moved = case.weight_bytes(bits) + 2 * case.rows * (case.inputs + case.outputs)
    else:
        moved = case.read_bytes
    least = ceilings.seconds(moved, case.flops)
    common = {"us": seconds * 1e6, "percent": 100 * least / seconds}
    if least > ceilings.seconds(moved, 0):
        return common | {"rate": case.flops / seconds / 1e12, "unit": "TFLOP/s"}
    return common | {"rate": moved / seconds / 1e9, "unit": "GB/s"}


def _verdict(text: str, met: bool) -> str:
    return f"{text}: {'met' if met else 'missed'}"


def verdicts(case: Case, mine: float, percent: float, others: dict[str, float]) -> tuple[str, ...]:
    """The targets that concern a case, each met or missed.

    Args:
        case: the case.
        mine: our seconds; of the int4 weight for a matrix product.
        percent: our share of the ceiling.
        others: seconds of the other candidates that were measured.
    """
    found = []
    if isinstance(case, DecodeCase):
        if UNIFORM in others:
            ratio = mine / others[UNIFORM]
            text = f"<= {RAGGED_TARGET}x {UNIFORM} at equal bytes ({ratio:.2f}x)"
            found.append(_verdict(text, ratio <= RAGGED_TARGET))
        if case.slots * case.context >= LARGE_DECODE:
            found.append(_verdict(f">= 85 % of the roofline ({percent:.0f} %)", percent >= 85))
        elif case.slots == 1 and case.context == 16384:
            found.append(_verdict(f">= 60 % of the roofline ({percent:.0f} %)", percent >= 60))
        if JAX_OP in others:
            ratio = others[JAX_OP] / mine
            found.append(_verdict(f">= 1.5x {JAX_OP} ({ratio:.2f}x)", ratio >= 1.5))
        if FLASHINFER in others:
            ratio = others[FLASHINFER] / mine
            found.append(_verdict(f"within 5 % of {FLASHINFER} ({ratio:.2f}x)", ratio >= 1 / 1.05))
    elif isinstance(case, PrefillCase):
        if case.chunk >= 4096:
            found.append(_verdict(f">= 60 % of the roofline ({percent:.0f} %)", percent >= 60))
    elif case.rows <= 16 and BF16 in others:
        ratio = others[BF16] / mine
        found.append(_verdict(f">= 2.5x bf16 ({ratio:.2f}x)", ratio >= 2.5))
    return tuple(found)


def measured_rows(
    case: Case,
    seconds: dict[str, float],
    ceilings: Ceilings,
    *,
    bits: dict[str, float] | None = None,
    differences: dict[str, float] | None = None,
    notes: dict[str, str] | None = None,
) -> list[Row]:
    """The rows of the candidates that ran, verdicts beside ours (beside int4 for a matmul)."""
    judged = INT4 if isinstance(case, MatmulCase) else OURS
    rows = []
    for name, value in seconds.items():
        shown = figures(case, value, ceilings, (bits or {}).get(name, 16))
        told: tuple[str, ...] = ()
        if name == judged and shown["us"] is not None:
            others = {k: v for k, v in seconds.items() if k != name and math.isfinite(v)}
            told = verdicts(case, value, shown["percent"], others)
        narrow = (bits or {}).get(name, 16) < 16  # its products may be faster than bf16's
        percent = (shown.get("percent") or 0.0) / (NARROW_PRODUCTS if narrow else 1)
        remarks = [shown.pop("reason", ""), (notes or {}).get(name, "")]
        if percent > 100 * MARGIN:
            remarks.append(f"{IMPOSSIBLE}: the data were in a cache, or not all was computed")
        reason = "; ".join(filter(None, remarks))
        rows.append(
            Row(
                as_request(case),
                case.label,
                name,
                **shown,
                difference=(differences or {}).get(name),
                reason=reason,
                verdicts=told,
            )
        )
    return rows


def verdicts_by_target(rows: Sequence[Row]) -> dict[str, tuple[int, list[str]]]:
    """The number of cases that met each target, and labels and figures of those that missed it."""
    found: dict[str, tuple[int, list[str]]] = {}
    for row in rows:
        for verdict in row.verdicts:
            target, _, figure = verdict.partition(" (")
            name = f"{row.case['operation']} {target}"
            met, missed = found.get(name, (0, []))
            if verdict.endswith(": met"):
                met += 1
            else:
                missed = [*missed, f"{row.label} ({figure.partition(')')[0]})"]
            found[name] = met, missed
    return found


def count_verdicts(rows: Sequence[Row]) -> tuple[int, int]:
    """The number of targets that were met, and of all targets."""
    told = [verdict for row in rows for verdict in row.verdicts]
    return sum(verdict.endswith(": met") for verdict in told), len(told)
