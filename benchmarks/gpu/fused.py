"""Section: the small fused kernels that the engine chooses, beside what they replace.

The engine's tokens need not show a wrong one of them: both of its sides may run it.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.gpu.correctness import Programs
from benchmarks.gpu.setting import Section, Setting
from benchmarks.kernel_bench.bench import compiled
from pallas_kernels import kept_threshold
from pallas_kernels.finish_rows import finish_rows
from pallas_kernels.linear import Norm
from pallas_kernels.quantized_matmul import RoundedRows, Rounding, Rows
from pallas_kernels.residual_norm import residual_norm
from pallas_kernels.rotate_and_write import rotate_and_write
from tests.pallas_kernels.kept_threshold.checks import check, row
from tests.pallas_kernels.oracle import row_errors

LIMIT_S = 30  # of a case
COLUMNS = ("case", "backend", "beside", "error", "tolerance")
MINE, THEIRS = "chosen", "plain"  # sides of a problem
# of a head's or a row's largest number: XLA may leave out a rounding to bfloat16 between two others
TOLERANCE = 3e-2
EPS = 1e-1  # so large that a kernel that forgets it is far off
ROW_KINDS = ("flat", "peaked", "ties", "mostly_zero")
# top_k, top_p, min_p
FILTERS = ((0, 0.9, 0.0), (50, 0.95, 0.0), (0, 1.0, 0.05), (7, 0.5, 0.01), (1000, 0.99, 0.0))


class Moved(NamedTuple):
    """One problem of rotate_and_write."""

    parts: int
    norms: bool
    tokens: int
    pages: int
    first_page: int

    @property
    def label(self) -> str:
        """For a table."""
        norms = "with" if self.norms else "without"
        pool = f"pages {self.first_page} to {self.pages}"
        return f"rotate_and_write: {self.parts} parts {norms} norms, {self.tokens} tokens, {pool}"


class Heads(NamedTuple):
    """Sizes of the heads and of a page."""

    page_size: int
    kv_heads: int
    group: int
    head_dim: int


def heads_of(setting: Setting) -> Heads:
    """The heads of a served model."""
    return setting.pick(Heads(16, 8, 4, 128), Heads(8, 2, 2, 32))


def moves(setting: Setting) -> list[Moved]:
    """Every number of tokens with parts and norms; the last in a pool of more than 4 GiB."""
    pages, first = setting.pick((1024, 700), (12, 7))
    forms = [(1, False, 1), (3, True, 1), (1, True, 17), (3, False, 17)]
    forms += [(1, False, 256), (3, True, 256), (1, True, 2048), (3, False, 2048)]
    found = [Moved(*form, pages, first) for form in setting.pick(forms, forms[2:4])]
    heads = heads_of(setting)
    page_bytes = 2 * heads.page_size * 2 * heads.kv_heads * heads.head_dim
    large = setting.pick(2**32 // page_bytes + 4096, 24)
    # one pool, its pattern, and a copy should XLA make one
    if setting.memory > 3 * large * page_bytes:
        found.append(Moved(3, True, 17, large, large - setting.pick(300, 4)))
    return found


def backend_of(setting: Setting, kernel: str) -> tuple[str | None, Any]:
    """The engine's backend, None where it calls the two operations; in a dry run interpreted."""
    if setting.dry_run:
        return "triton", True
    backends = setting.backends
    return {
        "rotate_and_write": backends.rotate_and_write,
        "residual_norm": backends.residual_norm,
        "finish_rows": backends.residual_norm,
        "kept_threshold": backends.threshold,
    }[kernel], None


def pattern(pages: int, heads: Heads) -> jax.Array:  # bfloat16[pages, page_size, 2, KVH, D]
    """A pool of finite numbers that differ from place to place."""
    shape = (pages, heads.page_size, 2, heads.kv_heads, heads.head_dim)
    mixed = jnp.zeros(shape, jnp.uint32)
    for axis, factor in enumerate((2654435761, 2246822519, 3266489917, 668265263, 374761393)):
        mixed += jax.lax.broadcasted_iota(jnp.uint32, shape, axis) * jnp.uint32(factor)
    bits = ((mixed >> 15) & 0x1FFF) | 0x2000
    return jax.lax.bitcast_convert_type(bits.astype(jnp.uint16), jnp.bfloat16)


def bits_of(values: jax.Array) -> jax.Array:
    """Of bfloat16 numbers."""
    return jax.lax.bitcast_convert_type(values, jnp.uint16)


def moved(
    qkv: jax.Array,  # [S, T, KVH, G + 2, D]
    cos: jax.Array,  # float32[T, D / 2]
    sin: jax.Array,  # float32[T, D / 2]
    weights: tuple[jax.Array, jax.Array] | None,  # bfloat16[D] of the norms
    page_ids: jax.Array,  # int32[T]
    offsets: jax.Array,  # int32[T]
    *,
    pages: int,
    first_page: int,
    heads: Heads,
    backend: str,
    interpret: Any,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Queries, what is held in the tokens' places, and which pages changed in other places."""
    norms = [None, None] if weights is None else [Norm(weight, EPS) for weight in weights]
    q, pool = rotate_and_write(
        qkv, cos, sin, pattern(pages, heads), page_ids, offsets, dtype=jnp.bfloat16,
        q_norm=norms[0], k_norm=norms[1], first_page=first_page, backend=backend,
        interpret=interpret,
    )  # fmt: skip
    where = (page_ids + first_page, offsets)
    written = jnp.zeros(pool.shape[:2], bool).at[where].set(True)
    other = bits_of(pool) != bits_of(pattern(pages, heads))
    other &= ~written[:, :, None, None, None]
    return q, pool[where], other.any(axis=(1, 2, 3, 4))


def move_programs(setting: Setting) -> dict[str, Programs]:
    """By problem the chosen kernel's program and plain XLA's, which has the last pages alone."""
    backend, interpret = backend_of(setting, "rotate_and_write")
    assert backend is not None
    heads = heads_of(setting)
    found = {}
    for problem in moves(setting):
        rng = np.random.default_rng(problem.tokens)
        room = problem.pages - problem.first_page
        shape = (problem.parts, problem.tokens, heads.kv_heads, heads.group + 2, heads.head_dim)
        # in steps of 1 / 256, so that no order of the sum rounds and values are equal bit by bit
        qkv = rng.integers(-1024, 1025, shape, np.int16).astype(np.float32) / 256
        angles = rng.uniform(0, 100, (problem.tokens, heads.head_dim // 2))
        places = rng.permutation(room * heads.page_size)[: problem.tokens]
        weights = jnp.asarray(rng.uniform(0.5, 2, (2, heads.head_dim)), jnp.bfloat16)
        operands = (
            jnp.asarray(qkv, jnp.float32 if problem.parts > 1 else jnp.bfloat16),
            *(jnp.asarray(part(angles), jnp.float32) for part in (np.cos, np.sin)),
            tuple(weights) if problem.norms else None,
            *(jnp.asarray(part, jnp.int32) for part in np.divmod(places, heads.page_size)),
        )
        sides = {
            MINE: (problem.pages, problem.first_page, backend, interpret),
            THEIRS: (room, 0, "xla", None),
        }
        names = ("pages", "first_page", "backend", "interpret")
        found[problem.label] = {
            side: (functools.partial(moved, heads=heads, **dict(zip(names, told))), operands)
            for side, told in sides.items()
        }
    return found


def judge_move(got: Any, want: Any, operands: Any) -> tuple[float, list[str]]:
    """Queries and keys but for rounding, values bit by bit, and the rest of the pool as it was."""
    (q, rows, changed), (want_q, want_rows, _) = got, want
    error = largest_error(q, want_q)
    error = max(error, largest_error(rows[:, 0], want_rows[:, 0]))
    wrong = []
    if not np.array_equal(rows[:, 1].view(np.uint16), want_rows[:, 1].view(np.uint16)):
        wrong.append("values are not written bit for bit")
    if changed.any():
        first = int(changed.argmax())
        wrong.append(f"{changed.sum()} pages changed where nothing is written, the first {first}")
    return error, wrong


def largest_error(got: np.ndarray, want: np.ndarray) -> float:
    """Of a row of the last axis, over its largest magnitude."""
    sides = (side.astype(np.float64).reshape(-1, 1, side.shape[-1]) for side in (got, want))
    return float(row_errors(*sides).max())


def norm_programs(setting: Setting) -> dict[str, Programs]:
    """By problem the chosen kernel's program and plain XLA's."""
    backend, interpret = backend_of(setting, "residual_norm")
    columns = setting.pick(4096, 64)

    def normed(side: tuple[str, Any], residual: Any, product: Any, weight: Any) -> Any:
        is_gemma = product.shape[0] == 1  # with norms on both sides, by 1 + weight
        norm = Norm(weight, EPS, is_gemma)
        options: dict[str, Any] = {"behind": norm} if is_gemma else {"rounding": Rounding("int8")}
        options |= {"backend": side[0], "interpret": side[1]}
        rows, stream = residual_norm(residual, product, norm, **options)
        return widened(rows), stream

    found = {}
    for rows in setting.pick((1, 16, 256), (3,)):
        for parts in (1, 4):
            rng = np.random.default_rng(rows)
            operands = (
                jnp.asarray(rng.standard_normal((rows, columns)) * 3, jnp.bfloat16),
                jnp.asarray(
                    rng.standard_normal((parts, rows, columns)),
                    jnp.float32 if parts > 1 else jnp.bfloat16,
                ),
                jnp.asarray(rng.uniform(0.5, 2, columns), jnp.bfloat16),
            )
            sides = {MINE: (backend, interpret), THEIRS: ("xla", None)}
            kind = ", int8" if parts > 1 else ", Gemma's"
            label = f"residual_norm: {rows} x {columns}, {parts} parts{kind}"
            found[label] = {
                side: (functools.partial(normed, told), operands) for side, told in sides.items()
            }
    return found


def judge_norm(got: Any, want: Any, operands: Any) -> tuple[float, list[str]]:
    """Norm and stream but for rounding."""
    return max(largest_error(mine, plain) for mine, plain in zip(got, want, strict=True)), []


def finish_programs(setting: Setting) -> dict[str, Programs]:
    """By problem the chosen kernel's program and plain XLA's."""
    backend, interpret = backend_of(setting, "finish_rows")
    columns = setting.pick(28672, 64)

    def finished(side: tuple[str, Any], kind: str, gate: str | None, product: Any) -> Any:
        options = {"rounding": Rounding(kind), "backend": side[0], "interpret": side[1]}
        return (widened(finish_rows(product, dtype=jnp.bfloat16, gate=gate, **options)),)

    # Ampere has no e4m3
    kinds = ("int8", "fp8") if "mosaic_gpu" in setting.backends.matmul else ("int8",)
    found = {}
    for rows in setting.pick((1, 16, 256), (3,)):
        for kind in kinds:
            for parts, gate in ((1, None), (4, "silu"), (1, "gelu_tanh")):
                shape = (parts, rows, columns)
                product = np.random.default_rng(rows).standard_normal(shape)
                operand = jnp.asarray(product, jnp.float32 if parts > 1 else jnp.bfloat16)
                sides = {MINE: (backend, interpret), THEIRS: ("xla", None)}
                label = f"finish_rows: {rows} x {columns}, {parts} parts, {kind}"
                found[f"{label}, {gate}" if gate else label] = {
                    side: (functools.partial(finished, told, kind, gate), (operand,))
                    for side, told in sides.items()
                }
    return found


def widened(rows: Rows) -> jax.Array:
    """Rows as float32 numbers, whether they are rounded to 8 bits or not."""
    if isinstance(rows, RoundedRows):
        return rows.values.astype(jnp.float32) * rows.column
    return rows.astype(jnp.float32)


def threshold_programs(setting: Setting) -> dict[str, Programs]:
    """Each kind of row alone, and many rows of all kinds."""
    backend, interpret = backend_of(setting, "kept_threshold")
    assert backend is not None
    rows, vocab = setting.pick((64, 128256), (8, 640))
    rng = np.random.default_rng(0)
    kinds = [ROW_KINDS[index % len(ROW_KINDS)] for index in range(rows)]
    weights = np.stack([row(kind, vocab, rng) for kind in kinds])
    filters = [FILTERS[index % len(FILTERS)] for index in range(rows)]
    single = ROW_KINDS[: setting.pick(None, 1)]
    alone = {f"1 x {vocab} {kind}": slice(at, at + 1) for at, kind in enumerate(single)}
    found = {}
    for label, which in (alone | {f"{rows} x {vocab}": slice(rows)}).items():
        top_k, top_p, min_p = zip(*filters[which])
        operands = (
            jnp.asarray(weights[which]),
            jnp.asarray(top_k, jnp.int32),
            jnp.asarray(top_p, jnp.float32),
            jnp.asarray(min_p, jnp.float32),
        )
        mine = {"backend": backend, "interpret": interpret}
        found[f"kept_threshold: {label}"] = {
            MINE: (functools.partial(kept_threshold, **mine), operands),
            THEIRS: (functools.partial(kept_threshold, backend="reference"), operands),
        }
    return found


def judge_threshold(got: Any, want: Any, operands: Any) -> tuple[float, list[str]]:
    """The share of rows with other tokens than the reference's; float64 sums say which is right."""
    (bounds,), (wanted,) = got, want
    weights, *filters = (np.asarray(operand) for operand in operands)
    wrong, unlike = [], 0
    for index, (weight, bound, other, *told) in enumerate(zip(weights, bounds, wanted, *filters)):
        kept = [(weight >= one) & (weight > 0) for one in (bound, other)]
        unlike += not np.array_equal(*kept)
        try:
            check(weight, bound, *(one.item() for one in told))
        except AssertionError as error:
            counts = " and ".join(str(one.sum()) for one in kept)
            reason = str(error).strip().splitlines()[0]
            wrong.append(f"row {index}: {reason}: {counts} tokens kept by it and the reference")
    return unlike / len(weights), wrong


class Fused(NamedTuple):
    """One case: its programs, its judge, what it is beside, and the error that it may have.

    The judge is given both sides' outputs and the operands; it finds an error and what is wrong.
    """

    programs: Callable[[Setting], dict[str, Programs]]
    judge: Callable[[Any, Any, Any], tuple[float, list[str]]]
    beside: str
    tolerance: float


KERNELS = {
    "rotate_and_write": Fused(move_programs, judge_move, "xla", TOLERANCE),
    "residual_norm": Fused(norm_programs, judge_norm, "xla", TOLERANCE),
    # a number between two steps may fall to either: of e4m3 they are a fourteenth of the largest
    "finish_rows": Fused(finish_programs, judge_norm, "xla", 8e-2),
    # a share of rows: where the mass at a border is within 1e-6 of top_p both are right
    "kept_threshold": Fused(threshold_programs, judge_threshold, "reference", 1.0),
}


def cases(setting: Setting) -> list[str]:
    """Their names."""
    return list(KERNELS)


def programs_of(setting: Setting, case: str) -> Programs:
    """All that a case compiles, none where the engine does not choose the kernel."""
    if backend_of(setting, case)[0] is None:
        return {}
    every = KERNELS[case].programs(setting).items()
    return {f"{label} ({side})": one for label, two in every for side, one in two.items()}


def prepare(setting: Setting) -> None:
    """Compiles all of them at the same time into the cache: the limits are for running."""
    found: Programs = {}
    for case in KERNELS:
        found |= programs_of(setting, case)
    compiled(found)


def run(setting: Setting, case: str) -> Section:
    """One kernel's problems, a row each."""
    section = Section(COLUMNS)
    kernel = KERNELS[case]
    backend, interpret = backend_of(setting, case)
    if backend is None:
        section.rows.append((case, "not chosen: nothing to compare", "", "", ""))
        return section
    told = f"{backend}, interpreted" if interpret else backend
    programs = programs_of(setting, case)
    executables, refused = compiled(programs)
    section.failures += [f"{name}: {reason}" for name, reason in refused.items()]
    for label in labels_of(programs):
        names = [f"{label} ({side})" for side in (MINE, THEIRS)]
        if not all(name in executables for name in names):
            continue
        # the last output of this process, should the kernel hang
        print(f"{label} ...", file=sys.stderr, flush=True)
        operands = programs[names[0]][1]
        got, want = (
            [np.asarray(leaf) for leaf in jax.tree.leaves(executables[name](*operands))]
            for name in names
        )
        error, wrong = kernel.judge(got, want, operands)
        section.rows.append((label, told, kernel.beside, f"{error:.1e}", kernel.tolerance))
        if not error <= kernel.tolerance:
            wrong.append(f"error {error:.2g} > {kernel.tolerance}")
        section.failures += [f"{label}: {reason}" for reason in wrong]
    return section


def labels_of(programs: Programs) -> Iterator[str]:
    """The problems of a case, each once."""
    ending = f" ({MINE})"
    return (name.removesuffix(ending) for name in programs if name.endswith(ending))
