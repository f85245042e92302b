"""The simulator's devices are those of the proofs, and its table is made by one command."""

from __future__ import annotations

from benchmarks.verify.prove.targets import TARGETS
from benchmarks.verify.prove_step import STEPS
from benchmarks.verify.step_figures import PROGRAMS
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


def test_the_table_has_every_program_of_every_device() -> None:
    shapes = {(STEPS[name].num_decode, STEPS[name].num_prefill) for name in PROGRAMS}
    for device in DEVICES.values():
        found = {(one.rows, one.prefill) for one in table() if one.device == device.target}
        assert found == (shapes if device.target else set())
