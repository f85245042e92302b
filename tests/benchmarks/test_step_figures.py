"""The simulator's devices are those of the proofs, and its table is made by one command."""

from __future__ import annotations

from benchmarks.memory_table import StepProof
from benchmarks.verify.prove import Cost, Counts, Proof
from benchmarks.verify.prove.proof import Memory
from benchmarks.verify.prove.targets import TARGETS
from benchmarks.verify.prove_step import STEPS
from benchmarks.verify.step_figures import PROGRAMS, figures_of
from jaxserve.simulation.devices import DEVICES
from jaxserve.simulation.step_figures import table


def test_data_sheets_are_those_of_the_proofs() -> None:
    for device in DEVICES.values():
        if device.target is None:
            continue
        target = TARGETS[device.target]
        assert device.name == target.name and device.memory == target.memory
        assert device.bandwidth == target.bandwidth
        assert (device.bf16_rate, device.int8_rate) == (target.bf16_rate, target.int8_rate)


def test_the_table_has_programs_of_every_device_and_no_others() -> None:
    shapes = {(STEPS[name].num_decode, STEPS[name].num_prefill) for name in PROGRAMS}
    for device in DEVICES.values():
        found = {(one.rows, one.prefill) for one in table() if one.device == device.target}
        assert found <= shapes and bool(found) == (device.target is not None)


def test_a_program_with_a_region_is_a_line_of_the_table() -> None:
    counts = Counts({"product": 20, "fusion": 5}, a_layer={"product": 8, "fusion": 2})
    memory = Memory(0, 0, 77, 0)
    costs = (Cost(5, 6, "shapes"), Cost(1, 1, "XLA"))
    proof = Proof("name", "h200", 1.0, memory, costs, (), (), counts=counts)
    shape = STEPS["mixed[256,2048]"]
    step = StepProof("llama-3-8b", 2, 1, shape.name, ("a", "b"), 100, 9, 8, proof, 1.0, 4)
    line = figures_of(step, shape)
    assert (line["rows"], line["prefill"], line["flops"], line["bytes"]) == (256, 2048, 5, 6)
    assert (line["kernels_a_layer"], line["kernels_once"], line["temporaries"]) == (10, 5, 77)
