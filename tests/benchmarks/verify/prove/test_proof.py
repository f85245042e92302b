"""The verdict: what it must catch, and what it must let pass."""

from __future__ import annotations

import json
from dataclasses import replace

from benchmarks.verify.prove import (
    Cost,
    Counts,
    KernelUse,
    Memory,
    Proof,
    Requirements,
    markdown,
    write_json,
)
from benchmarks.verify.prove.proof import judge

KERNEL = KernelUse("paged_decode", "mosaic_gpu", 182, 0, 191489, instructions={"wgmma": 12})
MEMORY = Memory(arguments=1000, results=600, temporaries=50, aliased=500)
WANTED = Requirements(
    instructions={"paged_decode": "wgmma"},
    own_kernel=True,
    in_place=500,
    max_temporaries=50,
    capacity=1150,
)


def test_a_function_that_fulfils_everything_passes() -> None:
    assert judge((KERNEL,), MEMORY, WANTED) == ()


def test_a_spill_of_our_kernel_fails_and_one_of_xla_does_not() -> None:
    ours = replace(KERNEL, spilled=64)
    assert judge((ours,), MEMORY, WANTED) == ("paged_decode spills 64 bytes",)
    theirs = replace(KERNEL, name="loop_fusion", source="xla", spilled=64)
    assert judge((KERNEL, theirs), MEMORY, WANTED) == ()


def test_a_remark_of_the_assembler_on_our_kernel_fails() -> None:
    slowed = replace(KERNEL, remarks=("(C7510) wgmma.mma_async instructions are serialized",))
    assert judge((slowed,), MEMORY, WANTED) == (
        "paged_decode: (C7510) wgmma.mma_async instructions are serialized",
    )


def test_more_shared_memory_than_a_thread_block_may_have_fails() -> None:
    wanted = replace(WANTED, shared=191488)
    assert judge((KERNEL,), MEMORY, wanted) == (
        "paged_decode asks for 191489 bytes of shared memory",
    )
    assert judge((KERNEL,), MEMORY, replace(WANTED, shared=191489)) == ()


def test_more_registers_than_two_thread_blocks_have_fail() -> None:
    assert judge((KERNEL,), MEMORY, replace(WANTED, registers=128)) == (
        "paged_decode has 182 registers, not 128",
    )
    assert judge((KERNEL,), MEMORY, replace(WANTED, registers=182)) == ()


def test_a_copied_weight_fails() -> None:
    assert judge((KERNEL,), MEMORY, WANTED, copies=("bf16[8,4] by fusion.3",)) == (
        "1 quantised weights are copied: bf16[8,4] by fusion.3",
    )


def test_one_kernel_a_layer_too_many_fails() -> None:
    found = Counts(a_layer={"product": 4, "fusion": 2})
    assert judge((KERNEL,), MEMORY, replace(WANTED, a_layer=6), launches=found) == ()
    assert judge((KERNEL,), MEMORY, replace(WANTED, a_layer=5), launches=found) == (
        "a layer launches more than 5 kernels: fusion 2, product 4",
    )
    assert judge((KERNEL,), MEMORY, WANTED, launches=found) == ()


def test_a_lost_instruction_fails() -> None:
    for mix in ({}, {"mma": 3}, {"wgmma": 0}):
        (failure,) = judge((replace(KERNEL, instructions=mix),), MEMORY, WANTED)
        assert failure == "no kernel named paged_decode uses wgmma"


def test_a_kernel_that_an_earlier_program_was_judged_with_passes() -> None:
    wanted = Requirements(instructions={"paged_decode": "wgmma"}, own_kernel=True)
    assert judge((KernelUse("paged_decode", "mosaic_gpu", reused=True),), MEMORY, wanted) == ()
    assert judge((KernelUse("paged_decode", "mosaic_gpu"),), MEMORY, wanted) != ()


def test_the_instruction_of_another_kernel_does_not_count() -> None:
    lost = replace(KERNEL, instructions={})
    for other in (replace(KERNEL, name="paged_prefill"), replace(KERNEL, source="xla")):
        (failure,) = judge((lost, other), MEMORY, WANTED)
        assert "paged_decode uses wgmma" in failure


def test_a_newer_tensor_core_does_for_an_older_one() -> None:
    wanted = replace(WANTED, instructions={"": "mma"})
    assert judge((KERNEL,), MEMORY, wanted) == ()


def test_no_kernel_of_ours_fails() -> None:
    wanted = replace(WANTED, instructions={})
    (failure,) = judge((replace(KERNEL, source="xla"),), MEMORY, wanted)
    assert "no kernel of pallas_kernels" in failure


def test_a_copied_pool_and_too_much_memory_fail() -> None:
    memory = replace(MEMORY, aliased=499, temporaries=51)
    failures = judge((KERNEL,), memory, WANTED)
    assert len(failures) == 3
    assert "499 of 500 bytes are in place" in failures[0]
    assert "51 bytes of temporaries" in failures[1]
    assert f"needs {1000 + 600 - 499 + 51} of 1150" in failures[2]


def test_repeated_instructions_fail_where_they_are_forbidden() -> None:
    wanted = replace(WANTED, recomputed=2)
    assert judge((KERNEL,), MEMORY, wanted, recomputed=2) == ()
    (failure,) = judge((KERNEL,), MEMORY, wanted, recomputed=3)
    assert "3 instructions are computed again" in failure
    assert judge((KERNEL,), MEMORY, WANTED, recomputed=3) == ()


def test_the_report_shows_our_kernels_and_both_costs(tmp_path) -> None:
    kernels = (KERNEL, KernelUse("gemm", "xla", shared=9**9, instructions={"mma": 77}))
    costs = (Cost(2_000_000_000, 3_000_000, "shapes"), Cost(4_000_000_000, 5_000_000, "XLA"))
    passed = Proof("decode", "h200", 1.0, MEMORY, costs, kernels, ())
    failed = Proof("prefill", "a100", 1.0, None, (), (), ("does not compile: a | b",))
    _, _, first, second = markdown([passed, failed]).splitlines()
    cells = [cell.strip() for cell in first.strip("|").split("|")]
    assert cells[:6] == ["decode", "h200", "1.0", "2", "182", "0"]
    assert cells[6:9] == ["191489", "wgmma 12", "50"]
    assert cells[9:] == ["2.0", "3.0", "2.0 (FLOP)", "4.0", "5.0", "ok"]
    assert second.count("|") == first.count("|")
    assert "does not compile: a / b" in second

    write_json(tmp_path / "proofs.json", [passed, failed])
    read = json.loads((tmp_path / "proofs.json").read_text())
    assert read["versions"]["jax"]
    assert read["proofs"][0]["kernels"][0]["instructions"] == {"wgmma": 12}
    assert read["proofs"][0]["estimated_least"]["by"] == "FLOP"
    assert read["proofs"][1]["memory"] is read["proofs"][1]["estimated_least"] is None
