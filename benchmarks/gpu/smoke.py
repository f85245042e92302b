"""Section: ten short cases of the kernels that the engine chooses, by which to go on or to stop."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.gpu import correctness, large, products
from benchmarks.gpu.correctness import CUT, WHOLE, Posed, Programs, Small
from benchmarks.gpu.large import Shape, ragged
from benchmarks.gpu.setting import Section, Setting
from benchmarks.kernel_bench.bench import compiled

LIMIT_S = 20  # of a case; a kernel that never ends costs no more
PAGED = {"decode": correctness.decode_problem, "prefill": correctness.prefill_problem}


@dataclass(frozen=True, slots=True)
class Probe:
    """One case.

    Attributes:
        run: returns its result.
        programs: the programs that it needs, so that all can be compiled at the same time before.
    """

    run: Callable[[Setting], Section]
    programs: Callable[[Setting], Programs]


def paged(
    operation: str, pool: str, head_dim: int, longest: int = 1500, queries: int | None = None
) -> Probe:
    """Attention on pages of a type, against float64."""
    small = Small(pool, head_dim, 4, 16, longest, {}, queries)

    def run(setting: Setting) -> Section:
        check = correctness.decode if operation == "decode" else correctness.prefill
        return check(setting, json.dumps(small), chosen=True)

    def programs(setting: Setting) -> Programs:
        found = PAGED[operation](setting, small, True)
        return (found if isinstance(found, Posed) else found[0]).programs

    return Probe(run, programs)


def ragged_decode() -> Probe:
    """Very different lengths beside one another, at the heads of a served model."""

    def case(setting: Setting) -> str:
        shape = Shape(64, 2048, 32, 8, 128)
        return json.dumps(setting.pick(shape, json.loads(large.cases(setting)[0])))

    def programs(setting: Setting) -> Programs:
        shape = Shape(*json.loads(case(setting)))
        return large.programs_of(setting, shape, ragged(shape, seed=0), True)

    return Probe(lambda setting: large.decode(setting, case(setting), chosen=True), programs)


def product(name: str) -> Probe:
    """A product with a quantised weight, at every number of rows."""

    def run(setting: Setting) -> Section:
        return products.products(setting, products.case_of(setting, name))

    def programs(setting: Setting) -> Programs:
        return products.programs_of(setting, products.case_of(setting, name))

    return Probe(run, programs)


PROBES: dict[str, Probe] = {
    "decode bfloat16, whole rows": paged("decode", "bfloat16", 128, WHOLE),
    "decode bfloat16, cut rows": paged("decode", "bfloat16", 128, CUT),
    "decode bfloat16, ragged": ragged_decode(),
    "decode bfloat16, 4 queries a row": paged("decode", "bfloat16", 128, CUT, queries=4),
    "decode int8 pages": paged("decode", "int8", 128),
    "prefill head_dim 128": paged("prefill", "bfloat16", 128),
    "prefill head_dim 256": paged("prefill", "bfloat16", 256),
    "int4 product": product("int4 g128"),
    "int8 product": product("int8"),
    "fp8 product": product("fp8"),
}


def cases(setting: Setting) -> list[str]:
    """Their names."""
    return list(PROBES)


def prepare(setting: Setting) -> None:
    """Compiles all of them at the same time into the cache: their limits are for running.

    What does not compile is the failure of its case, which compiles it again.
    """
    found = {
        f"{name}: {backend}": program
        for name, probe in PROBES.items()
        for backend, program in probe.programs(setting).items()
    }
    compiled(found)


def run(setting: Setting, case: str) -> Section:
    """One of them, in one row."""
    found = PROBES[case].run(setting)
    errors = ["; ".join(map(str, row)) for row in found.rows]
    told = "FAILED" if found.failures else "passed"
    section = Section(("case", "result", "what ran"), [(case, told, " / ".join(errors))])
    section.failures = [f"{case}: {failure}" for failure in found.failures]
    return section
