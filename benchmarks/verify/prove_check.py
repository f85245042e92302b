#!/usr/bin/env python3
"""Proof, without a GPU, that everything that gpu_check and tune_kernels run compiles for one.

    python -m benchmarks.verify.prove_check --device h200
    python -m benchmarks.verify.prove_check --only tuning --every 10

The programs are those of the benchmarks' own lists of cases, on operands that have shapes but no
memory. A kernel that spills, asks for more shared memory than a thread block may have, or does not
compile fails; a shape that a kernel refuses (KernelError) is told. Exit codes: 0 all pass, 1 one
fails, 3 this machine lacks a compiler.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax

from benchmarks.gpu import correctness, decode_step, fused, large, products, smoke
from benchmarks.gpu.engine import compiling_with
from benchmarks.gpu.engine_kinds import KINDS, Kind
from benchmarks.gpu.large import Shape, ragged
from benchmarks.gpu.setting import USABLE_MEMORY, Setting
from benchmarks.kernel_bench import decode, prefill
from benchmarks.kernel_bench.bench import JAX_SHARE, USABLE, Bench
from benchmarks.kernel_bench.cases import all_cases, anchor_cases
from benchmarks.kernel_bench.rows import BF16
from benchmarks.kernel_bench.tuning import CASES as TUNING_CASES
from benchmarks.kernel_bench.tuning import alike, build, choices_of, runs_of
from benchmarks.kernel_bench.worker import entries_of
from benchmarks.verify import prove_step
from benchmarks.verify.prove import (
    EXIT_FAILED,
    EXIT_UNAVAILABLE,
    Proof,
    Requirements,
    absent_mesh,
    attempt,
    device_memory,
    device_name,
    markdown,
    prove,
    write_json,
)
from benchmarks.verify.prove.gpu_targets import GPU_TARGETS, CompilerMissingError
from jaxserve.config.device_defaults import device_defaults
from jaxserve.execution.programs import wanted_shapes
from jaxserve.execution.step_shape import StepShape
from pallas_kernels import choose_backends
from pallas_kernels.devices import candidates, device_family

REFUSED = "KernelError"
TOO_LARGE = "ValueError: Mosaic GPU kernel exceeds available shared memory"  # JAX, lowering it
PAGES = 8192  # a layer: a pool so large that a copy of it stands out among the temporaries
PEERS = (decode.CUDNN, prefill.CUDNN, BF16)  # cuDNN is a library that a host without a GPU may lack
SECTIONS = (
    decode_step.STEPS,
    decode_step.OF_KINDS,
    decode_step.OTHER_STEPS,
    decode_step.MIXES,
    decode_step.OLDER,
)
PREALLOCATED = 0.75  # of the device's memory: JAX's default

Programs = dict[str, tuple[Callable[..., Any], tuple[Any, ...]]]


@dataclass(frozen=True, slots=True)
class Item:
    """One program.

    Attributes:
        name: its case and backend, in words.
        compile: compiles and judges it.
        ours: whether it fails the proof; a peer's program that does not compile is told.
        choice: whether it is one of many that are tried: one that JAX finds too large is refused.
    """

    name: str
    compile: Callable[[], Proof]
    ours: bool = True
    choice: bool = False


def absent_setting(kind: str) -> Setting:
    """The setting of gpu_check's sections on a GPU that is not there."""
    name = device_name(kind)
    family = device_family(name, "gpu")
    return Setting(
        device_kind=name,
        backends=choose_backends(name, "gpu"),
        decode=[(backend, None) for backend in candidates("decode", family)],
        prefill=[(backend, None) for backend in candidates("prefill", family)],
        memory=int(device_memory(kind) * PREALLOCATED * USABLE_MEMORY),
    )


def absent_bench(kind: str) -> Bench:
    """The context of the kernel benchmark on that GPU."""
    name = device_name(kind)
    memory = int(device_memory(kind) * JAX_SHARE * USABLE)
    # one layer of pages or two of weights: the programs are the same but for what they read
    return Bench(name, "gpu", choose_backends(name, "gpu"), memory, cold_bytes=1)


def described(tree: Any) -> Any:
    """The shapes and types of arrays."""
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), tree)


def unbuilt(build_programs: Callable[[], Programs]) -> Programs:
    """Programs with described operands, not made: a pool may be larger than this machine."""
    found: Programs = {}

    def trace() -> None:
        for name, (function, operands) in build_programs().items():
            found[name] = function, described(operands)

    jax.eval_shape(trace)
    return found


def items_of(kind: str, label: str, programs: Programs, choices: bool = False) -> Iterator[Item]:
    """Each program of a case."""
    for name, (function, operands) in programs.items():
        whole = f"{label}: {name}"

        def compilation(
            whole: str = whole, function: Any = function, operands: Any = operands
        ) -> Proof:
            mesh = absent_mesh(kind)
            wanted = Requirements()
            return prove(whole, function, *operands, mesh=mesh, kind=kind, wanted=wanted)

        # the kernel's own choice, an empty one, must fit
        yield Item(whole, compilation, name not in PEERS, choices and name != str({}))


def correctness_items(kind: str) -> Iterator[Item]:
    """Smoke cases, fused kernels, and correctness of attention and of quantised products."""
    setting = absent_setting(kind)
    for name, probe in smoke.PROBES.items():
        found = unbuilt(functools.partial(probe.programs, setting))
        yield from items_of(kind, f"smoke {name}", found)
    for case in fused.KERNELS:
        found = unbuilt(functools.partial(fused.programs_of, setting, case))
        yield from items_of(kind, "fused", found)
    for small in correctness.matrix():
        for chosen in (True, False):
            posed = correctness.decode_problem(setting, small, chosen).programs
            yield from items_of(kind, f"decode {small.label}", unbuilt(lambda p=posed: p))
            posed = correctness.prefill_problem(setting, small, chosen)[0].programs
            yield from items_of(kind, f"prefill {small.label}", unbuilt(lambda p=posed: p))
    for case in large.cases(setting):
        shape = Shape(*large.json.loads(case))

        def programs(shape: Shape = shape) -> Programs:
            problem = ragged(shape, seed=0)
            both = (large.programs_of(setting, shape, problem, chosen) for chosen in (True, False))
            return {name: program for found in both for name, program in found.items()}

        yield from items_of(kind, f"large {shape}", unbuilt(programs))
    for case in [*products.cases(setting, True), *products.cases(setting, False)]:
        found = unbuilt(functools.partial(products.programs_of, setting, case))
        yield from items_of(kind, "product", found)


def kernel_items(kind: str) -> Iterator[Item]:
    """The anchors, which have no peers, and the kernel benchmark."""
    bench = absent_bench(kind)
    tables = ((replace(bench, peers=False), anchor_cases()), (bench, all_cases()))
    for used, case in [(used, case) for used, cases in tables for case in cases]:
        found = unbuilt(lambda used=used, case=case: entries_of(used, case).to_compile())
        yield from items_of(kind, f"{case.operation} {case.label}", found)


def tuning_items(kind: str) -> Iterator[Item]:
    """Every choice of tune_kernels on every case."""
    bench = absent_bench(kind)
    for operation, cases in TUNING_CASES.items():
        offered = choices_of(bench, operation)
        for case in cases:
            first = [group[0] for group in alike(offered["backend"], case, offered["choices"])]

            def programs(case: Any = case, operation: Any = operation, choices: Any = first):
                program, rotations, _, _ = build(bench, case)
                runs = runs_of(bench, operation, program, choices)
                return {str(choices[int(n)]): (run, rotations[0]) for n, run in runs.items()}

            yield from items_of(kind, f"tune {operation} {case.label}", unbuilt(programs), True)


def engine_items(kind: str, layers: int | None) -> Iterator[Item]:
    """The steps of gpu_check's engine sections, with all layers of the model or the first few."""
    found: dict[str, Item] = {}  # sections have programs in common
    for section in SECTIONS:
        every = [decode_step.Case.parsed(case) for case in section]
        for engine in dict.fromkeys(case.engine for case in every):
            cases = [case for case in every if case.engine == engine]
            for item in items_of_engine(kind, layers, cases):
                found.setdefault(item.name, item)
    yield from found.values()


def items_of_engine(kind: str, layers: int | None, cases: list[decode_step.Case]) -> Iterator[Item]:
    """The steps of some cases of one engine."""
    defaults, engine = device_defaults("gpu"), cases[0].of
    slots = max(2, *(case.rows for case in cases))
    if cases[0].kind in KINDS:
        layers = min(layers or decode_step.KIND_LAYERS, decode_step.KIND_LAYERS)
    setting = prove_step.Setting(
        kind,
        1,
        cases[0].shape,
        layers,
        PAGES,
        decode_step.PAGE_SIZE,
        slots=slots,
        max_model_len=decode_step.MAX_MODEL_LEN,
        **engine.settings,
    )
    tokens = max(defaults.max_num_batched_tokens, slots)
    shapes = wanted_shapes(slots, tokens, defaults.smallest_bucket)
    whole = f"{cases[0].engine}, {slots} slots"
    for step in decode_step.measured_shapes(shapes, cases):
        compilation = functools.partial(engine_proof, engine, setting, step)
        yield Item(f"{whole}: {step.name}", compilation)
    for case in cases:
        if case.kind == decode_step.UNGRAPHED:
            program = case.program
            compilation = functools.partial(engine_proof, engine, setting, program, graphs=False)
            yield Item(f"{whole}: {program.name} without graphs", compilation)


def engine_proof(
    engine: Kind, setting: prove_step.Setting, step: StepShape, graphs: bool = True
) -> Proof:
    """One program of an engine of a kind, as it is or launched kernel by kernel."""
    with engine.made(), compiling_with({} if graphs else decode_step.NO_GRAPHS, prove_step):
        return prove_step.prove_step(setting, step).proof


GROUPS = ("correctness", "kernels", "tuning", "engine")


def items(group: str, kind: str, layers: int | None) -> Iterator[Item]:
    """The programs of one of GROUPS."""
    if group == "engine":
        return engine_items(kind, layers)
    made = {"correctness": correctness_items, "kernels": kernel_items, "tuning": tuning_items}
    return made[group](kind)


def verdict(item: Item, proof: Proof) -> str:
    """ "passed", "refused", "FAILED", or "not ours" for a peer that does not compile."""
    if not proof.failures:
        return "passed"
    if not item.ours:
        return "not ours"
    refusals = (REFUSED, TOO_LARGE) if item.choice else (REFUSED,)
    refused = any(f"compile: {refusal}" in proof.failures[0] for refusal in refusals)
    return "refused" if refused else "FAILED"


def main(arguments: list[str] | None = None) -> int:
    """Compiles everything; 0 when all pass, 1 when one fails, 3 when this machine cannot."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=GPU_TARGETS, default="h200")
    parser.add_argument("--only", nargs="+", choices=GROUPS, default=list(GROUPS))
    parser.add_argument("--match", default="", help="only programs whose names contain this")
    parser.add_argument(
        "--every", type=int, default=1, help="each N-th program of a group: a sample"
    )
    parser.add_argument("--first", type=int, default=0, help="the program with which to begin")
    parser.add_argument("--layers", type=int, help="of the engine's models; all if not given")
    parser.add_argument("--json", type=Path, help="also write all that is known to this file")
    options = parser.parse_args(arguments)
    # compilation is on the host; without this JAX would look for a driver
    jax.config.update("jax_platforms", "cpu")
    proofs: list[Proof] = []
    counts: Counter[tuple[str, str]] = Counter()
    seconds: Counter[str] = Counter()
    try:
        for group in options.only:
            every = items(group, options.device, options.layers)
            found = (item for item in every if options.match in item.name)
            for place, item in enumerate(found):
                if place < options.first or (place - options.first) % options.every:
                    continue
                proof = attempt(item.name, options.device, item.compile)
                told = verdict(item, proof)
                counts[group, told] += 1
                seconds[group] += proof.seconds
                if told != "passed":
                    print(f"{told}: {item.name}: {'; '.join(proof.failures)}", flush=True)
                print(f"{group} {place}: {item.name}: {proof.seconds:.1f} s", file=sys.stderr)
                proofs.append(proof)
                if options.json:  # after every program: an interrupted run leaves what it has
                    write_json(options.json, proofs)
    except CompilerMissingError as error:
        print(f"cannot prove anything for {options.device} here: {error}", file=sys.stderr)
        return EXIT_UNAVAILABLE
    print(f"jax {jax.__version__}\n\n{markdown(proofs)}")
    for group in options.only:
        told = {word: number for (of, word), number in counts.items() if of == group}
        print(f"{group}: {told}, {seconds[group]:.0f} s of compilation, one after the other")
    return EXIT_FAILED if any(word == "FAILED" for _, word in counts) else 0


if __name__ == "__main__":
    sys.exit(main())
