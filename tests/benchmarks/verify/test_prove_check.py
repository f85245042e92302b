"""The programs of a GPU run are listed from the benchmarks' own cases, compiled and judged."""

from __future__ import annotations

from types import SimpleNamespace

import jax
import pytest

from benchmarks.gpu import decode_step
from benchmarks.gpu.engine_kinds import KINDS, PLAIN
from benchmarks.kernel_bench.cases import DecodeCase, MatmulCase, PrefillCase
from benchmarks.kernel_bench.tuning import choices_of
from benchmarks.kernel_bench.worker import entries_of
from benchmarks.verify import prove_check
from benchmarks.verify.prove import EXIT_FAILED, EXIT_UNAVAILABLE, Proof
from benchmarks.verify.prove.gpu_targets import CompilerMissingError
from jaxserve.execution.features import FAST
from jaxserve.execution.programs import wanted_shapes
from jaxserve.parallel.mesh import is_divided
from pallas_kernels import KernelError
from tests.absent_devices import needs_gpu_compiler


@pytest.mark.parametrize(
    "case",
    [
        DecodeCase(64, 16384, 32, 8),
        PrefillCase(4096, 65536, 32, 8),
        MatmulCase("gate_up", 16, 4096, 28672),
    ],
    ids=lambda case: case.operation,
)
def test_operands_are_described_not_made(case):
    bench = prove_check.absent_bench("h200")
    found = prove_check.unbuilt(lambda: entries_of(bench, case).to_compile())
    assert found
    for _, operands in found.values():
        leaves = jax.tree.leaves(operands)
        assert leaves and all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves)
    assert max(leaf.size * leaf.dtype.itemsize for leaf in leaves) > 2**20


def test_every_choice_of_a_tuned_case_is_a_program(monkeypatch):
    case = DecodeCase(1, 1024, 32, 8)
    monkeypatch.setattr(prove_check, "TUNING_CASES", {"decode": (case,)})
    choices = choices_of(prove_check.absent_bench("h200"), "decode")["choices"]
    names = [item.name for item in prove_check.items("tuning", "h200", None)]
    assert names == [f"tune decode {case.label}: {choice}" for choice in choices]
    assert len(names) > 10


def test_every_case_of_the_engine_has_its_program_and_one_for_prompts():
    names = [item.name for item in prove_check.items("engine", "h200", None)]
    assert len(set(names)) == len(names)
    for section in prove_check.SECTIONS:
        cases = [decode_step.Case.parsed(case) for case in section]
        for case in cases:
            slots = max(other.rows for other in cases if other.engine == case.engine)
            mine = [name for name in names if name.startswith(f"{case.engine}, {slots} slots: ")]
            assert any("mixed" in name for name in mine)
            end = " without graphs" if case.kind == decode_step.UNGRAPHED else ""
            assert any(name.endswith(f": {case.program.name}{end}") for name in mine)


def test_engines_of_other_kinds_are_compiled_as_what_they_are(monkeypatch):
    made = []

    def compiled(setting, step):
        facts = setting.quantization, setting.kv_cache_dtype, setting.backends().reason
        made.append((setting.shape, setting.config().num_layers, *facts, is_divided(1)))
        return SimpleNamespace(proof=None)

    monkeypatch.setattr(prove_check.prove_step, "prove_step", compiled)
    monkeypatch.setattr(prove_check, "SECTIONS", (decode_step.OF_KINDS,))
    for item in prove_check.items("engine", "h200", None):
        item.compile()
    found = {(shape, layers, *facts[:2], facts[3]) for shape, layers, *facts in made}
    llama = "llama-3-8b", decode_step.KIND_LAYERS
    assert found == {
        (*llama, "int4", "auto", False),
        (*llama, "fp8", "auto", False),
        (*llama, None, "fp8", False),
        ("qwen3-moe-3b", decode_step.KIND_LAYERS, None, "auto", False),
        (*llama, None, "auto", True),
    }
    assert len(found) == len(KINDS)


def test_the_programs_that_decode_steps_are_timed_on_are_exact_and_the_first_two_serve_all():
    cases = [decode_step.Case.parsed(case) for case in decode_step.STEPS]
    shapes = wanted_shapes(256, 2048, 1)
    mixed, decode, *rest = decode_step.measured_shapes(shapes, cases)
    assert (mixed.num_decode, mixed.num_prefill, mixed.features) == (256, 2048, FAST)
    assert (decode.num_decode, decode.num_prefill, decode.features) == (256, 0, FAST)
    assert {case.program for case in cases} <= {decode, *rest}
    assert any(shape.num_prefill == 128 for shape in rest)
    assert len(rest) == 4  # the other three sizes, the smallest for prompts


def test_programs_without_graphs_are_compiled_with_the_options_that_say_so(monkeypatch):
    seen = []

    def compiled(setting, step):
        seen.append(prove_check.prove_step.compiler_options("gpu"))
        return SimpleNamespace(proof=None)

    monkeypatch.setattr(prove_check.prove_step, "prove_step", compiled)
    plain = prove_check.prove_step.compiler_options("gpu")
    for graphs in (True, False):
        prove_check.engine_proof(PLAIN, None, None, graphs)
    assert seen == [plain, plain | decode_step.NO_GRAPHS]


def proof(name, *failures):
    return Proof(name, "h200", 1.0, None, (), (), failures)


def refused():
    raise KernelError("stages", 9, "2 to 4")


def test_a_refusal_and_a_peer_pass_but_a_spill_and_an_error_fail(monkeypatch, capsys):
    def go(*items):
        monkeypatch.setattr(prove_check, "items", lambda *arguments: iter(items))
        return prove_check.main(["--only", "tuning"])

    fine = prove_check.Item("fine", lambda: proof("fine"))
    too_much = prove_check.Item("too much", refused)
    peer = prove_check.Item("peer", lambda: 1 / 0, ours=False)
    assert go(fine, too_much, peer) == 0
    out = capsys.readouterr().out
    assert "refused: too much" in out and "not ours: peer" in out
    assert "{'passed': 1, 'refused': 1, 'not ours': 1}" in out
    spills = prove_check.Item("spills", lambda: proof("spills", "k spills 8 bytes"))
    assert go(fine, spills) == EXIT_FAILED
    assert "FAILED: spills: k spills 8 bytes" in capsys.readouterr().out
    assert go(prove_check.Item("broken", lambda: 1 / 0)) == EXIT_FAILED


@pytest.mark.parametrize(
    "case",
    [DecodeCase(1, 1024, 32, 8), PrefillCase(256, 0, 32, 32), MatmulCase("qkv", 4, 4096, 6144)],
    ids=lambda case: case.operation,
)
def test_a_peer_that_is_not_installed_fails_nothing_and_all_else_is_ours(case):
    bench = prove_check.absent_bench("h200")
    programs = prove_check.unbuilt(lambda: entries_of(bench, case).to_compile())
    items = list(prove_check.items_of("h200", case.label, programs))
    assert sum(not item.ours for item in items) == 1
    for item in items:
        assert item.ours == ("cuDNN" not in item.name and not item.name.endswith(": bf16"))


def test_a_choice_that_jax_finds_too_large_is_refused_but_the_default_must_fit():
    failed = proof("any", f"does not compile: {prove_check.TOO_LARGE}: 300000 > 232448")
    choice = prove_check.Item("choice", lambda: failed, choice=True)
    default = prove_check.Item("default", lambda: failed)
    assert prove_check.verdict(choice, failed) == "refused"
    assert prove_check.verdict(default, failed) == "FAILED"


def test_a_machine_without_a_compiler_says_so(monkeypatch, capsys):
    def missing():
        raise CompilerMissingError("no ptxas")

    item = prove_check.Item("any", missing)
    monkeypatch.setattr(prove_check, "items", lambda *arguments: iter([item]))
    assert prove_check.main(["--only", "tuning"]) == EXIT_UNAVAILABLE
    assert "no ptxas" in capsys.readouterr().err


@pytest.mark.slow
@needs_gpu_compiler
@pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="jax 0.10 compiles other kernels")
def test_a_sample_compiles(capsys):
    assert prove_check.main(["--only", "correctness", "tuning", "--every", "150"]) == 0
    assert "FAILED" not in capsys.readouterr().out
