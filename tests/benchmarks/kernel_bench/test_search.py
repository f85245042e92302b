"""The search over static choices: order, failures, the final round and what is chosen."""

from __future__ import annotations

import dataclasses
import time

import jax

from benchmarks.isolated import WorkerError
from benchmarks.kernel_bench import search, tuning
from benchmarks.kernel_bench.bench import make_bench
from benchmarks.kernel_bench.cases import MatmulCase
from pallas_kernels import choose_backends
from pallas_kernels.backends.mosaic_gpu import HopperDecodeTuning
from pallas_kernels.devices import OPERATIONS


def test_neighbours_begin_with_the_start_and_change_a_few_fields():
    start = HopperDecodeTuning()
    tried = {name: tuning.DECODE[name] for name in ("block_tokens", "stages", "waves")}
    found = tuning.neighbours(start, tried)
    assert found[0] == start and len(set(found)) == len(found)

    def changed(choice):
        return {
            field.name
            for field in dataclasses.fields(choice)
            if getattr(choice, field.name) != getattr(start, field.name)
        }

    counts = [len(changed(choice)) for choice in found]
    assert counts == sorted(counts) and max(counts) == tuning.MOST_CHANGES == 3


def test_only_fields_that_the_tuning_has_are_varied():
    values = {"decode": tuning.DECODE, "prefill": tuning.PREFILL, "matmul": tuning.MATMUL}
    for operation in values:
        kinds = [backend.tuning for backend in OPERATIONS[operation].values() if backend.tuning]
        had = [{field.name for field in dataclasses.fields(kind)} for kind in kinds]
        assert set(values[operation]) <= set().union(*had)
        assert len({frozenset(names) for names in had}) == len(had), "the fields tell the type"


class Device:
    """Microseconds by block_tokens and stages; 3 stages kill a batch, 128 tokens are wrong."""

    def __init__(self):
        self.requests = []

    def call(self, request, limit_s):
        if request["do"] == "device":
            return {"device_kind": "NVIDIA H200", "ceilings": {}}
        if request["do"] == "choices":
            choices = [{"block_tokens": b, "stages": s} for s in (4, 3, 2) for b in (64, 128, 256)]
            return {"backend": "mosaic_gpu", "choices": choices}
        self.requests.append(request["choices"])
        if any(choice["stages"] == 3 for choice in request["choices"]):
            raise WorkerError("no answer within 60 s")
        return [self.entry(choice) for choice in request["choices"]]

    @staticmethod
    def entry(choice):
        if choice["block_tokens"] == 128:
            return {"tuning": choice, "us": None, "reason": "WRONG: differs"}
        return {"tuning": choice, "us": choice["block_tokens"] / choice["stages"], "reason": ""}


def test_a_batch_that_hangs_is_tried_one_by_one_and_the_best_meet_again(monkeypatch):
    monkeypatch.setattr(search, "BATCH", 4)
    device = Device()
    progress = []
    found = search.search(
        device,
        ["decode"],
        {"dry_run": True},
        deadline=time.monotonic() + 60,
        progress=lambda found: progress.append(found["operations"]["decode"]["best"]),
    )
    entry = found["operations"]["decode"]
    (results,) = entry["cases"].values()
    assert len(results) == 9
    reasons = {(e["tuning"]["stages"], e["tuning"]["block_tokens"]): e["reason"] for e in results}
    assert reasons[3, 64] == "FAILED: no answer within 60 s"
    assert reasons[4, 128] == reasons[2, 128] == "WRONG: differs"
    assert entry["best"] == {"block_tokens": 64, "stages": 4} == progress[-1]
    assert [e["us"] for e in results[:4]] == [16, 32, 64, 128]
    assert device.requests[-1] == [e["tuning"] for e in results[:4]]


def test_when_everything_hangs_the_search_ends_with_its_time(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(search.time, "monotonic", lambda: clock[0])

    class Hanging(Device):
        def call(self, request, limit_s):
            if request["do"] != "tune":
                return super().call(request, limit_s)
            clock[0] += limit_s
            raise WorkerError("no answer")

    search.search(
        Hanging(),
        ["decode"],
        {"dry_run": False},
        deadline=250,
        progress=lambda found: None,
    )
    assert clock[0] <= 250 + search.GRACE_S


def test_the_best_choice_is_that_of_all_cases_together():
    def entry(name, us):
        return {"tuning": {"stages": name}, "us": us, "reason": ""}

    cases = {
        "a": [entry(1, 10.0), entry(2, 11.0), entry(3, 9.0)],
        "b": [entry(1, 40.0), entry(2, 20.0), entry(3, None)],
    }
    assert tuning.best_of(cases) == {"stages": 2}  # 3 is fastest in one, and does not run in both
    assert tuning.best_of({"a": [entry(1, None)]}) is None


def test_tiles_of_more_rows_than_there_are_are_tried_once_and_all_have_the_result(monkeypatch):
    choices = [{}, *({"tile_m": rows, "stages": 4} for rows in (16, 32, 64))]
    cases = {"matmul": (MatmulCase("few", 16, 8, 8), MatmulCase("many", 64, 8, 8))}
    monkeypatch.setattr(search, "CASES", cases)
    asked = []

    class Products(Device):
        def call(self, request, limit_s):
            if request["do"] == "choices":
                return {"backend": "mosaic_gpu", "choices": choices}
            if request["do"] == "device":
                return super().call(request, limit_s)
            asked.append(request["choices"])
            rows = request["case"]["rows"]
            return [
                {"tuning": choice, "us": 1.0 + abs(choice.get("tile_m", 8) - rows), "reason": ""}
                for choice in request["choices"]
            ]

    found = search.search(
        Products(),
        ["matmul"],
        {"dry_run": False},
        deadline=time.monotonic() + 60,
        progress=lambda found: None,
    )
    entry = found["operations"]["matmul"]
    assert asked[0] == choices[:2] and choices in asked
    few, many = entry["cases"].values()
    assert {tuple(e["tuning"].items()): e["us"] for e in few} == {
        (): 9.0, **{tuple(choice.items()): 1.0 for choice in choices[1:]}
    }  # fmt: skip
    assert len(many) == 4
    assert entry["best"] == choices[3]


def test_the_line_for_the_table_names_what_is_not_the_default():
    best = {
        "decode": dataclasses.asdict(HopperDecodeTuning(stages=3, waves=4)),
        "prefill": None,
        "matmul": None,
    }
    line = tuning.table_row("NVIDIA H200", best)
    assert line == '"H200": ChipTuning(decode=HopperDecodeTuning(stages=3, waves=4)),'
    of_no_row = {"decode": {}, "parts": {"parts": 4}}
    assert tuning.table_row("NVIDIA A100-SXM4-80GB", of_no_row) == '"A100": ChipTuning(),'


def test_parts_of_products_are_varied_where_linear_layers_leave_them():
    device = make_bench(dry_run=True, peers=False, peer=None, no_peer="", rounds=1)
    here = dataclasses.replace(device, dry_run=False)
    hopper = dataclasses.replace(here, backends=choose_backends("NVIDIA H200", "gpu"))
    assert tuning.choices_of(here, "parts")["choices"] == []
    offered = tuning.choices_of(hopper, "parts")
    assert offered["choices"] == [{}, *({"parts": parts} for parts in tuning.PARTS)]
    (case,) = tuning.DRY_CASES["parts"]
    text = []

    def trace():
        program, rotations, _, _ = tuning.build(device, case)
        runs = tuning.runs_of(device, "parts", program, [{"parts": 1}, {"parts": 8}])
        text.extend(str(jax.make_jaxpr(run)(*rotations[0])) for run in runs.values())

    jax.eval_shape(trace)
    assert "f32[8,2,256]" not in text[0] and "f32[8,2,256]" in text[1]
