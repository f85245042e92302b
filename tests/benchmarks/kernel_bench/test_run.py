"""The cases in order until the time is up; a case that fails is a row and the next one runs."""

from __future__ import annotations

import time

from benchmarks.isolated import WorkerError
from benchmarks.kernel_bench import run
from benchmarks.kernel_bench.cases import DecodeCase, MatmulCase
from benchmarks.kernel_bench.rows import OURS
from benchmarks.kernel_bench.run import failures_of, next_case, run_cases

CASES = [DecodeCase(slots, 128, 32, 8) for slots in (1, 2, 3, 4)]


class Device:
    """Answers with one row a case; fails for some numbers of slots."""

    def __init__(self, failing=(), work=lambda: None):
        self.failing, self.work, self.asked = failing, work, []
        self.limits = []

    def call(self, request, limit_s):
        if request["do"] == "device":
            return {"ceilings": {"copy_gb_s": 1.0, "matmul_tflop_s": 1.0}}
        assert request["ceilings"]["copy_gb_s"] == 1.0  # measured once, not by each process
        slots = request["case"].get("slots") or request["case"]["rows"]
        self.asked.append(slots)
        self.limits.append(limit_s)
        self.work()
        if slots in self.failing:
            raise WorkerError("no answer within 1 s", lost=True)
        return [
            {
                "case": request["case"], "label": str(slots), "candidate": OURS, "us": 1.0,
                "rate": 1.0, "unit": "GB/s", "percent": 1.0, "difference": 0.0, "reason": "",
                "verdicts": ["fast: met"],
            }
        ]  # fmt: skip


def go(device, seconds=3600.0, cases=CASES):
    progress = []
    rows, _, notes = run_cases(
        device,
        cases,
        {"dry_run": True},
        deadline=time.monotonic() + seconds,
        progress=lambda rows, device, notes: progress.append(len(rows)),
    )
    return rows, notes, progress


def test_results_are_handed_on_after_every_case():
    rows, notes, progress = go(Device())
    assert [row.us for row in rows] == [1.0] * 4 and not notes
    assert progress == [1, 2, 3, 4, 4]
    assert rows[0].verdicts == ("fast: met",)


def test_a_case_that_hangs_is_a_failure_and_the_others_run():
    device = Device(failing=(2,))
    rows, _, _ = go(device)
    assert device.asked == [1, 2, 3, 4]
    assert failures_of(rows) == [
        "decode 32/8 heads, 2 x 128: jaxserve: FAILED: no answer within 1 s"
    ]


def test_when_the_time_is_up_the_rest_is_told(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(run.time, "monotonic", lambda: now[0])

    def work():
        now[0] += 5

    _, notes, _ = go(Device(work=work), seconds=4)
    assert notes == ["Not run: 3 of 4 cases (time is up)."]


def test_failures_in_a_row_end_an_operation_not_the_others():
    device = Device(failing=(1, 2, 3, 4))
    _, notes, _ = go(device, cases=[*CASES, MatmulCase("o", 9, 8, 8)])
    assert device.asked == [1, 2, 9]
    assert notes == ["Not run: 2 cases of decode (2 in a row failed)."]


def test_no_case_outlasts_the_budget():
    device = Device()
    go(device, seconds=30)
    assert max(device.limits) <= 30 + run.GRACE_S


def test_a_case_has_the_limit_that_is_asked_for():
    device = Device()
    run_cases(
        device,
        CASES,
        {"dry_run": True},
        deadline=time.monotonic() + 3600,
        progress=lambda *found: None,
        limit_s=7.0,
    )
    assert device.limits == [7.0] * len(CASES)


def test_while_flashinfer_is_compiled_cases_without_it_come_first(monkeypatch):
    class Building:
        left = 2

        @property
        def running(self):
            self.left -= 1
            return self.left >= 0

    monkeypatch.setattr(run.time, "sleep", lambda seconds: None)
    product = MatmulCase("o", 1, 8, 8)
    waiting = [CASES[0], product, CASES[1]]
    building = Building()
    assert next_case(waiting, building) == product
    assert next_case(waiting, building) == CASES[0]
    assert waiting == [CASES[1]]
