"""The candidates of one case: compiled, compared with ours, timed in turns, judged."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from benchmarks.isolated import WorkerError, describe
from benchmarks.kernel_bench.bench import Bench, compiled
from benchmarks.kernel_bench.cases import Case, DecodeCase, MatmulCase, as_request
from benchmarks.kernel_bench.rows import FLASHINFER, OURS, SDPA, Row, measured_rows, missing
from benchmarks.kernel_bench.timing import (
    Candidate,
    interleaved,
    jax_candidate,
    poisons,
    relative_difference,
)

# norm of the difference of two bf16 chains of attention, over the norm of one; more is a bug
AGREEMENT = 0.05
PREPARE_LIMIT_S = 60
SAMPLE_LIMIT_S = 20

Rotations = list[tuple[Any, ...]]  # operands that name different data each
Program = tuple[Callable[..., Any], Rotations, str]  # with a remark


@dataclass(frozen=True, slots=True)
class Entries:
    """The candidates compared in one case; nothing is compiled yet.

    Attributes:
        programs: the first one is what the others' results are compared with. "name, setting" are
            settings of one candidate: the fastest of them is kept.
        operations: operations in one call of a program.
        missing: rows of what could not be built.
        bits: of a weight's element, by candidate, where the case is a matrix product.
        tolerances: by candidate, where its result is not to be as near as AGREEMENT.
    """

    programs: dict[str, Program] = field(default_factory=dict)
    operations: int = 1
    missing: list[Row] = field(default_factory=list)
    bits: dict[str, float] = field(default_factory=dict)
    tolerances: dict[str, float] = field(default_factory=dict)

    def to_compile(self) -> dict[str, tuple[Callable[..., Any], tuple[Any, ...]]]:
        """Function and operands of each program."""
        return {name: (program, turns[0]) for name, (program, turns, _) in self.programs.items()}


def contest(bench: Bench, case: Case, entries: Entries) -> list[Row]:
    """The rows of a case; a candidate that fails is a row with its reason."""
    if not entries.programs:
        return entries.missing
    executables, refused = compiled(entries.to_compile())
    candidates: list[Candidate] = []
    differences: dict[str, float] = {}
    notes: dict[str, str] = {}
    wanted = None
    for name, executable in executables.items():
        _, rotations, note = entries.programs[name]
        try:
            candidate = jax_candidate(
                name, executable, rotations, entries.operations, short_series=bench.dry_run
            )
            assert candidate.result is not None
            found = candidate.result()
        except Exception as error:  # it compiles but does not run
            if name == OURS or poisons(error):
                raise
            refused[name] = describe(error)
            continue
        wanted = found if wanted is None else wanted
        differences[name] = relative_difference(found, wanted)
        limit = entries.tolerances.get(name, AGREEMENT)
        wrong = "" if differences[name] <= limit else "ITS RESULT DIFFERS"
        notes[name] = "; ".join(filter(None, [wrong, note]))
        candidates.append(candidate)
    there, reasons = torch_candidates(bench, case)
    refused |= reasons
    seconds, failed = interleaved([*candidates, *there], bench.rounds)
    refused |= failed
    if there:
        assert bench.peer is not None
        bench.peer.call({"do": "drop"}, SAMPLE_LIMIT_S)
    chosen = fastest_of_each(seconds)
    rows = measured_rows(
        case,
        {plain: seconds[name] for plain, name in chosen.items()},
        bench.measured_ceilings(),
        bits=entries.bits,
        differences={p: differences[n] for p, n in chosen.items() if n in differences},
        notes={plain: notes.get(name, "") for plain, name in chosen.items()},
    )
    rows += [missing(case, name, reason) for name, reason in refused.items()]
    return rows + entries.missing


def fastest_of_each(seconds: dict[str, float]) -> dict[str, str]:
    """The name of each candidate without its setting, and with the setting that is fastest."""
    chosen: dict[str, str] = {}
    for name, value in seconds.items():
        plain = name.partition(", ")[0]
        if plain not in chosen or not value >= seconds[chosen[plain]]:
            chosen[plain] = name
    return chosen


def torch_candidates(bench: Bench, case: Case) -> tuple[list[Candidate], dict[str, str]]:
    """The parts of a case that the torch process can measure, and why it cannot the rest."""
    if isinstance(case, MatmulCase) or case.dtype != "bfloat16" or not bench.peers:
        return [], {}
    if isinstance(case, DecodeCase) and case.ragged:
        return [], {}
    peer = bench.peer
    if peer is None:
        return [], dict.fromkeys((FLASHINFER, SDPA), bench.no_peer)
    try:
        answer = peer.call({"do": "prepare", "case": as_request(case)}, PREPARE_LIMIT_S)
    except WorkerError as error:
        return [], dict.fromkeys((FLASHINFER, SDPA), str(error))

    def candidate(name: str) -> Candidate:
        def sample() -> float:
            value = peer.call({"do": "sample", "name": name}, SAMPLE_LIMIT_S)
            return math.nan if value is None else value

        return Candidate(name, sample)

    return [candidate(name) for name in answer["ready"]], answer["refused"]
