"""The proof of whole steps: its options, what it asks of the compiler, its document."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from benchmarks.launch_table import launch_table
from benchmarks.memory_table import memory_document
from benchmarks.verify import prove_step
from benchmarks.verify.prove import (
    EXIT_FAILED,
    EXIT_UNAVAILABLE,
    Cost,
    Counts,
    Memory,
    Proof,
    Requirements,
    device_name,
)
from benchmarks.verify.prove.gpu_targets import CompilerMissingError
from jaxserve.models.linear import PLAIN_LINEAR
from tests.absent_devices import needs_gpu_compiler

SETTING = prove_step.Setting("h200", 1, "llama-1b", 2, num_pages=64, page_size=16)
DECODE, MIXED = prove_step.STEPS["decode[16]"], prove_step.STEPS["mixed[256,2048]"]
WEIGHTS, POOL = 2**30, 2**28


def local_mesh() -> Mesh:
    return Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("data", "model"))


def proved(setting, step, **changes) -> prove_step.StepProof:
    memory = Memory(WEIGHTS + POOL, POOL, 2**20, POOL)
    proof = Proof("step", setting.kind, 1.0, memory, (Cost(1, 1, "shapes"),), (), ())
    made = prove_step.StepProof(
        shape=setting.shape,
        layers=setting.config().num_layers,
        devices=setting.devices,
        step=step.name,
        backends=("mosaic_gpu", None),
        pool_tokens=1024,
        weights=WEIGHTS,
        pool=POOL,
        proof=proof,
        cpu_seconds=12.6,
        blob=384,
    )
    return replace(made, proof=replace(proof, **changes))


def test_the_defaults_are_the_whole_model_on_one_h200() -> None:
    options = prove_step.parse([])
    assert (options.device, options.shape) == (["h200"], ["llama-3-8b"])
    assert options.layers is None
    assert options.tensor_parallel == 1
    assert options.step == list(prove_step.STEPS)
    asked = prove_step.settings(prove_step.parse(["--device", "h100", "a100", "v6e"]))
    assert [setting.page_size for setting in asked] == [64, 16, 128]
    whole = replace(SETTING, shape="llama-3-70b", layers=options.layers)
    assert whole.config().num_layers == 80
    assert SETTING.config().num_layers == 2


@pytest.mark.parametrize(
    "arguments",
    [
        ["--device", "rtx"],
        ["--shape", "llama-9b"],
        ["--step", "decode[3]"],
        ["--layers", "0"],
        ["--num-pages", "-1"],
        ["--tensor-parallel", "0"],
        ["--streamed", "4"],
        ["--streamed", "8", "--layers", "7"],
    ],
    ids=lambda arguments: " ".join(arguments),
)
def test_wrong_options_are_refused(arguments, capsys) -> None:
    with pytest.raises(SystemExit) as stop:
        prove_step.parse(arguments)
    assert stop.value.code == 2
    assert arguments[0] in capsys.readouterr().err


def test_every_combination_is_compiled_with_what_was_asked(monkeypatch, tmp_path) -> None:
    asked = []

    def prove(setting, step):
        asked.append((setting, step))
        return proved(setting, step)

    monkeypatch.setattr(prove_step, "prove_step", prove)
    document = tmp_path / "memory.md"
    arguments = ["--device", "h200", "v5e", "--shape", "llama-3-8b", "llama-3-70b"]
    arguments += ["--step", "decode[16]", "--layers", "3", "--tensor-parallel", "8"]
    assert prove_step.main([*arguments, "--markdown", str(document)]) == 0
    assert [(setting.kind, setting.shape) for setting, _ in asked] == [
        ("h200", "llama-3-8b"),
        ("v5e", "llama-3-8b"),
        ("h200", "llama-3-70b"),
        ("v5e", "llama-3-70b"),
    ]
    assert {(setting.layers, setting.devices) for setting, _ in asked} == {(3, 8)}
    assert {step.name for _, step in asked} == {"decode[16] fast"}
    text = document.read_text()
    assert "## llama-3-70b, 3 layers, tensor parallel over 8" in text
    assert "8 x TPU v5 lite" in text


def test_the_full_run_is_that_of_the_document() -> None:
    options = prove_step.parse(["--full"])
    assert options.step == list(prove_step.FULL_STEPS)
    asked = prove_step.settings(options)
    assert {setting.layers for setting in asked} == {None}
    assert {setting.config().num_layers for setting in asked} == {32, 80}
    assert ("h200", 8, "llama-3-70b") in {(s.kind, s.devices, s.shape) for s in asked}
    document = (Path(prove_step.__file__).parents[2] / "docs/memory.md").read_text()
    for setting in asked:
        assert f"{setting.devices} x {device_name(setting.kind)} |" in document, setting


def test_quantised_weights_need_a_kernel_of_their_own() -> None:
    (setting,) = prove_step.settings(prove_step.parse(["--quantization", "int4"]))
    assert setting.quantization == "int4"
    wanted = requirements_of(setting, setting.backends(), DECODE, POOL)
    assert wanted.instructions["quantized_matmul"] == "wgmma"


def test_a_failed_step_and_a_missing_compiler_have_their_exit_codes(monkeypatch, capsys) -> None:
    def failed(setting, step):
        return proved(setting, step, failures=("only 1 of 2 bytes are in place",))

    monkeypatch.setattr(prove_step, "prove_step", failed)
    assert prove_step.main(["--layers", "2"]) == EXIT_FAILED
    assert "FAILED: step on h200: only 1 of 2" in capsys.readouterr().err

    def impossible(setting, step):
        raise CompilerMissingError("no ptxas")

    monkeypatch.setattr(prove_step, "prove_step", impossible)
    assert prove_step.main(["--layers", "2"]) == EXIT_UNAVAILABLE
    assert "for h200 here: no ptxas" in capsys.readouterr().err


def test_weights_and_pool_are_those_of_one_device() -> None:
    config = SETTING.config()
    _, leaves = prove_step.abstract_leaves(config, local_mesh(), "bfloat16", PLAIN_LINEAR)
    weights = prove_step.device_bytes(leaves)
    heads = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    layer = config.hidden_size * (heads + config.num_heads * config.head_dim)
    layer += 3 * config.hidden_size * config.intermediate_size + 2 * config.hidden_size
    table = config.vocab_size * config.hidden_size
    assert weights == 2 * (2 * layer + 2 * table + config.hidden_size)

    state = prove_step.abstract_state(SETTING, local_mesh())
    token = 2 * config.num_kv_heads * config.head_dim * 2
    assert prove_step.device_bytes(state.kv) == 2 * 64 * 16 * token

    cost = prove_step.step_cost(SETTING, config, DECODE, weights, weights // 2)
    dense, row = 2 * layer + config.hidden_size, 4 * 2 * config.num_heads * config.head_dim
    assert cost.flops == 2 * 16 * (dense + table) + row * 64 * 16
    assert cost.bytes == weights - 2 * table + 2 * 64 * 16 * token
    mixed = prove_step.step_cost(SETTING, config, MIXED, weights, weights // 2)
    chunk = 2048 // MIXED.num_lanes
    seen = 64 * 16 + MIXED.num_lanes * sum(range(1, chunk + 1))
    products = (256 + 2048) * dense + (256 + MIXED.num_lanes) * table
    assert mixed.flops == 2 * products + row * seen


def requirements_of(setting: prove_step.Setting, *rest: Any) -> Requirements:
    return prove_step.requirements(setting, setting.config(), *rest)


def test_the_pool_is_what_the_engine_would_plan() -> None:
    open_setting = replace(SETTING, num_pages=None, shape="llama-3-8b", layers=32)
    weights = 15 * 2**30
    pages = prove_step.with_pages(open_setting, weights).num_pages
    page = 32 * 16 * 2 * 8 * 128 * 2
    tables = 257 * (8192 // 16 + 8192 + 1) * 4  # page table and history
    assert 0 <= 0.9 * 151_397_597_184 - weights - tables - 2**30 - pages * page < page
    small = replace(open_setting, layers=2)
    assert prove_step.with_pages(small, 0).num_pages == 256 * 8192 // 16 + 1
    shared = replace(open_setting, kind="a100", devices=8)
    alone = prove_step.with_pages(replace(shared, devices=1), weights).num_pages
    assert prove_step.with_pages(shared, weights).num_pages == min(
        8 * alone + 7, 256 * 8192 // 16 + 1
    )
    assert prove_step.with_pages(SETTING, weights) is SETTING


def test_matrix_instructions_are_asked_of_the_kernels_that_the_step_holds() -> None:
    backends = SETTING.backends()
    assert backends.decode == "mosaic_gpu"
    wanted = requirements_of(SETTING, backends, DECODE, POOL)
    assert wanted.instructions == {"paged_decode": "wgmma"}
    assert wanted.recomputed == 0
    tpu = replace(SETTING, kind="v5e")
    assert requirements_of(tpu, backends, DECODE, POOL).recomputed is None
    assert wanted.in_place == POOL
    assert wanted.max_temporaries == POOL // 2
    assert wanted.own_kernel
    assert wanted.a_layer == 9
    assert requirements_of(SETTING, backends, MIXED, POOL).a_layer == 10
    assert requirements_of(tpu, tpu.backends(), DECODE, POOL).a_layer is None
    triton = replace(backends, decode="triton", prefill="triton")
    assert requirements_of(SETTING, triton, DECODE, POOL).a_layer == 10
    assert requirements_of(SETTING, triton, MIXED, POOL).a_layer == 14

    both = replace(backends, decode="triton", prefill="mosaic_tpu")
    wanted = requirements_of(SETTING, both, MIXED, POOL)
    assert wanted.instructions == {"paged_decode": "mma", "paged_prefill": "matmul"}
    plain = replace(backends, decode="xla", prefill="xla")
    assert not requirements_of(SETTING, plain, MIXED, POOL).own_kernel


def test_a_sparse_layer_may_launch_14_kernels_where_no_sort_is_needed() -> None:
    sparse = replace(SETTING, shape="qwen3-30b-a3b")
    backends = sparse.backends()
    assert (backends.experts, backends.route) == ("triton", ("triton", "xla"))
    assert requirements_of(sparse, backends, DECODE, POOL).a_layer == 14
    assert requirements_of(sparse, backends, MIXED, POOL).a_layer == 31
    tpu = replace(sparse, kind="v5e", layers=3)
    backends = tpu.backends()
    assert (backends.experts, backends.route) == ("mosaic_tpu", ("mosaic_tpu", "xla"))
    assert requirements_of(tpu, backends, DECODE, POOL).a_layer == 14
    assert requirements_of(replace(tpu, quantization="int4"), backends, DECODE, POOL).a_layer == 14
    dense = replace(tpu, shape="llama-3-8b", quantization="int8")
    assert requirements_of(dense, dense.backends(), DECODE, POOL).a_layer == 8
    assert requirements_of(tpu, backends, MIXED, POOL).a_layer == 73


def test_a_dense_layer_on_a_tpu_may_launch_12_kernels_and_16_with_norms_behind() -> None:
    def limit(shape: str, **changes: Any) -> int | None:
        one = replace(SETTING, kind="v6e", shape=shape, **{"layers": 3} | changes)
        return requirements_of(one, one.backends(), DECODE, POOL).a_layer

    assert limit("llama-3-8b") == 12 and limit("gemma-3-12b") == 16
    # heads of 64, and what is counted with the layers where there are two
    assert limit("llama-125m") is None and limit("llama-3-8b", layers=2) is None


def test_sums_over_devices_are_kernels_of_a_quantised_layer() -> None:
    """Two, and what adds before or behind them."""

    def limit(kind: str, quantization: str | None, step: Any = DECODE) -> int | None:
        spread = replace(
            SETTING, kind=kind, shape="llama-3-70b", devices=8, quantization=quantization, layers=2
        )
        return requirements_of(spread, spread.backends(), step, POOL).a_layer

    assert (limit("h200", "int4"), limit("h200", "fp8"), limit("h200", "int8")) == (13, 14, 14)
    assert [limit("v6e", one) for one in ("int4", "fp8", "int8")] == [12, 12, 12]
    assert limit("h200", None) is None and limit("h200", "int8", MIXED) is None


def test_a_step_runs_in_a_program_of_the_device() -> None:
    one = prove_step.STEPS["decode[1]"]
    assert prove_step.program_of("h200", one) == one
    assert prove_step.program_of("v5e", one) == replace(one, num_decode=8)


def test_norms_behind_attention_and_mlp_are_no_kernels_of_their_own() -> None:
    gemma = replace(SETTING, shape="gemma-3-12b")
    assert requirements_of(gemma, gemma.backends(), DECODE, POOL).a_layer == 9


def test_the_document_says_what_did_not_compile() -> None:
    good = proved(SETTING, DECODE)
    bad = proved(SETTING, MIXED, memory=None, failures=("does not compile: x | y",))
    text = memory_document([good, bad])
    assert text.count("## llama-1b, 2 layers") == 1
    first, second = [line for line in text.splitlines() if "NVIDIA H200" in line]
    assert "1.00 GiB | 0.25 GiB (1,024) | 1.0 MiB | 0.25 GiB | 1.25 GiB | 1%" in first
    assert first.endswith("| 13 | ok |")
    assert "does not compile: x / y" in second
    assert first.count("|") == second.count("|")


def test_what_a_step_launches_is_a_line_of_the_table() -> None:
    counts = Counts(
        kernels={"product": 9, "residual_norm": 4, "fusion": 17},
        a_layer={"product": 4, "residual_norm": 2, "fusion": 2},
        in_parts=6,
        graphs=1,
        outside=0,
    )
    text = launch_table([proved(SETTING, DECODE, counts=counts), proved(SETTING, MIXED)])
    first, second = [line for line in text.splitlines() if "NVIDIA H200" in line]
    assert first.endswith(
        "| 8 | fusion 2, product 4, residual_norm 2 | 30 | 0 | 0 | 0 | 6 | 1 (0) | 384 |"
    )
    assert second.endswith("| - | - | - | - | - | - | - | - | 384 |"), "it did not compile"
    assert len({line.count("|") for line in text.splitlines() if line.startswith("|")}) == 1


@pytest.mark.slow
@needs_gpu_compiler
def test_a_greedy_step_of_an_absent_gpu_is_one_graph_of_few_kernels() -> None:
    """On an A100, whose attention is Triton's in every version of JAX."""
    step = prove_step.prove_step(replace(SETTING, kind="a100", num_pages=1024), DECODE)
    assert step.proof.failures == ()
    found = step.proof.counts
    assert (found.graphs, found.outside) == (1, 0)
    assert (found.loops, found.copies, found.rounded_elsewhere) == (0, 0, 0)
    # four products, residual and norm twice, rotation with the write, attention with its merge,
    # the gated activation
    assert sum(found.a_layer.values()) == 10
    assert found.a_layer["fusion"] == 1


@pytest.mark.slow
@needs_gpu_compiler
def test_a_hopper_layer_launches_nine_kernels_and_a_mixed_one_prefill_besides() -> None:
    """With more layers than one, so that what is cleared for each of them is seen to be shared."""
    names = {"product": 4, "residual_norm": 2, "rotate_and_write": 1, "fusion": 1}
    setting = replace(SETTING, layers=5, num_pages=8192)
    for shape, names_too in (
        (DECODE, {"paged_decode": 1}),
        (MIXED, {"paged_decode": 1, "paged_prefill": 1}),
    ):
        step = prove_step.prove_step(setting, shape)
        assert step.proof.failures == ()
        assert step.proof.counts.a_layer == names | names_too
        assert step.proof.counts.kernels["paged_decode"] == 5
        assert (step.proof.counts.loops, step.proof.counts.outside) == (0, 0)


@pytest.mark.slow
@needs_gpu_compiler
def test_devices_gather_logits_and_not_the_weight_that_makes_them() -> None:
    """A table of 128k x 8k numbers would cross the links at every step of few rows."""
    setting = replace(SETTING, kind="a100", devices=8, shape="llama-3-70b", num_pages=4096)
    step = prove_step.prove_step(setting, DECODE)
    table = setting.config().vocab_size * setting.config().hidden_size * 2
    assert step.proof.memory.temporaries < table / 16
