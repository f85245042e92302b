"""Makes a function with operands of a case, and proves it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from benchmarks.verify.prove.cases import Attention, Case, Experts, Sampling
from benchmarks.verify.prove.compilation import prove
from benchmarks.verify.prove.cost import COSTS
from benchmarks.verify.prove.grouped_problem import (
    grouped_call,
    grouped_cost,
    weight_elements,
)
from benchmarks.verify.prove.matmul_problem import matmul_call, matmul_cost
from benchmarks.verify.prove.proof import Cost, Proof, Requirements
from benchmarks.verify.prove.targets import absent_mesh, device_name
from pallas_kernels.hopper.registers import REGISTERS, WARPGROUP_THREADS
from pallas_kernels.kept_threshold import kept_threshold
from pallas_kernels.paged_attention import (
    PrefillLanes,
    paged_decode_and_write,
    paged_decode_attention,
    paged_prefill_attention,
)
from pallas_kernels.paged_attention.hopper import decode
from pallas_kernels.pages import scales_shape
from pallas_kernels.rotate_and_write import rotate_and_write
from pallas_kernels.tuning import chip_tuning
from pallas_kernels.write_kv import ScaledPages, write_kv, write_kv_scaled

POOL_BYTES = 2**30
# of a kernel's partial results and of copies around it; a copied pool is eight times as much
MAX_TEMPORARIES = 2**27
# v5p has half the VMEM of the others: what XLA keeps there around a kernel is in memory on v5p
LARGER_TEMPORARIES = {"v5p": 2**28}
THREADS = 2 * WARPGROUP_THREADS  # of a thread block of Hopper's decode
PARTS = 4  # of a projection with a divided contraction
HEADS = PartitionSpec(None, "model")
PAGES = PartitionSpec(None, None, None, "model")
SCALES = PartitionSpec(None, "model")
EVERYWHERE = PartitionSpec()
HEADS_OF_QUERIES = PartitionSpec(None, None, "model")


@dataclass(frozen=True, slots=True)
class Problem:
    """A function, its operands and how each is divided over a mesh.

    Attributes:
        function: takes the operands, returns the results.
        operands: pytrees of ShapeDtypeStructs without shardings.
        specs: a PartitionSpec for each leaf of each operand.
        result: the PartitionSpec of each result.
        in_place: bytes that a result must share with the first operand, which is donated.
    """

    function: Callable[..., Any]
    operands: tuple[Any, ...]
    specs: tuple[Any, ...]
    result: Any
    in_place: int = 0


class Queries(NamedTuple):
    """The rows of queries of a decode problem, how heads are divided, and what is optional."""

    rows: tuple[int, ...]
    heads: PartitionSpec
    options: dict[str, Any]
    specs: dict[str, Any]


def _size(operands: Any) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(operands))


def _pool(p: Attention) -> jax.ShapeDtypeStruct:
    dtype = jnp.dtype(p.pages or p.dtype)
    page = (p.page_size, 2, p.kv_heads * p.head_rows, p.head_dim // p.head_rows)
    pages = POOL_BYTES // (math.prod(page) * dtype.itemsize)
    return jax.ShapeDtypeStruct((pages, *page), dtype)


def _options(p: Attention, pool: jax.ShapeDtypeStruct) -> tuple[dict[str, Any], dict[str, Any]]:
    """Optional operands and their PartitionSpecs, by keyword."""
    operands: dict[str, Any] = {}
    specs: dict[str, Any] = {}
    if p.sinks:
        operands["sinks"] = jax.ShapeDtypeStruct((p.heads,), jnp.float32)
        specs["sinks"] = PartitionSpec("model")
    if pool.dtype.itemsize == 1:
        one = jax.ShapeDtypeStruct((), jnp.float32)
        for name in ("k_scale", "v_scale"):
            operands[name] = _token_scales(pool) if p.scales == "token" else one
            specs[name] = SCALES if p.scales == "token" else EVERYWHERE
    return operands, specs


def _token_scales(pool: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    """As an engine holds them, the heads and tokens of a page in one axis."""
    pages, *of_page = scales_shape(pool.shape)
    return jax.ShapeDtypeStruct((pages, math.prod(of_page)), jnp.bfloat16)


def _by_head(scale: jax.Array, kv_pages: jax.Array) -> jax.Array:
    """Scales as kernels take them: one, or by page, head and token."""
    return scale.reshape(scales_shape(kv_pages.shape)) if scale.ndim else scale


def _scales_by_head(options: dict[str, Any], kv_pages: jax.Array) -> dict[str, Any]:
    """The options of a kernel, their scales as it takes them."""
    scales = {name: options[name] for name in ("k_scale", "v_scale") if name in options}
    return options | {name: _by_head(scale, kv_pages) for name, scale in scales.items()}


def _queries(p: Attention, pool: jax.ShapeDtypeStruct) -> Queries:
    options, specs = _options(p, pool)
    rows: tuple[int, ...] = (p.rows,)
    heads = HEADS
    if p.queries > 1:
        rows, heads = (p.rows, p.queries), HEADS_OF_QUERIES
        options["query_lens"] = jax.ShapeDtypeStruct((p.rows,), jnp.int32)
        specs["query_lens"] = EVERYWHERE
    return Queries(rows, heads, options, specs)


def _static(case: Case, kind: str, operation: str) -> dict[str, Any]:
    """The options of a call of attention that are no arrays."""
    p = case.problem
    assert isinstance(p, Attention)
    static: dict[str, Any] = {"scale": p.head_dim**-0.5, "backend": case.backend}
    static |= {"soft_cap": p.soft_cap, "window": p.window}
    if case.own:
        static["tuning"] = getattr(chip_tuning(device_name(kind)), operation)
    return static


def _attention(case: Case, kind: str) -> Problem:
    p = case.problem
    assert isinstance(p, Attention)
    pool = _pool(p)
    rows, heads, options, option_specs = _queries(p, pool)
    static = _static(case, kind, case.operation)
    shape = jax.ShapeDtypeStruct
    q = shape((*rows, p.heads, p.head_dim), p.dtype)
    length = -(-p.context // p.page_size)
    rest: Any
    if case.operation == "decode":
        if case.own:
            static["splits"] = p.splits
        table, rest = shape((p.rows, length), jnp.int32), shape((p.rows,), jnp.int32)
        call: Any = paged_decode_attention
    else:
        lane: Any = shape((p.lanes,), jnp.int32)
        table, rest = shape((p.lanes, length), jnp.int32), PrefillLanes(lane, lane, lane)
        call = paged_prefill_attention

    def function(q: Any, pool: Any, table: Any, rest: Any, options: dict[str, Any]) -> Any:
        return call(q, pool, table, rest, **static, **_scales_by_head(options, pool))

    everywhere = jax.tree.map(lambda leaf: EVERYWHERE, rest)
    return Problem(
        function,
        (q, pool, table, rest, options),
        (heads, PAGES, EVERYWHERE, everywhere, option_specs),
        heads,
    )


def _decode_and_write(case: Case, kind: str) -> Problem:
    p = case.problem
    assert isinstance(p, Attention)
    pool = _pool(p)
    rows, heads, options, option_specs = _queries(p, pool)
    static = _static(case, kind, "decode")
    shape = jax.ShapeDtypeStruct
    q = shape((*rows, p.heads, p.head_dim), p.dtype)
    token = shape((*rows, p.kv_heads, p.head_dim), p.dtype)
    table = shape((p.rows, -(-p.context // p.page_size)), jnp.int32)
    lengths = shape((p.rows,), jnp.int32)

    def function(
        pool: Any, q: Any, k: Any, v: Any, table: Any, lengths: Any, options: dict[str, Any]
    ) -> Any:
        out, pool = paged_decode_and_write(q, k, v, pool, table, lengths, **static, **options)
        return pool, out

    return Problem(
        function,
        (pool, q, token, token, table, lengths, options),
        (PAGES, heads, heads, heads, EVERYWHERE, EVERYWHERE, option_specs),
        (PAGES, heads),
        in_place=_size(pool) // p.shards,
    )


def _write_scaled(held: ScaledPages, *new: Any, **options: Any) -> ScaledPages:
    scales = (_by_head(scale, held.kv_pages) for scale in held[1:])
    written = write_kv_scaled(ScaledPages(held.kv_pages, *scales), *new, **options)
    rows = (scale.reshape(scale.shape[0], -1) for scale in written[1:])
    return ScaledPages(written.kv_pages, *rows)


def _write(case: Case, kind: str) -> Problem:
    p = case.problem
    assert isinstance(p, Attention)
    pool = _pool(p)
    token = jax.ShapeDtypeStruct((p.rows, *pool.shape[3:]), p.dtype)
    index = jax.ShapeDtypeStruct((p.rows,), jnp.int32)
    written: Any = pool
    specs: Any = PAGES
    options, option_specs = _options(p, pool)
    call: Any = write_kv
    if case.operation == "write_kv_scaled":
        by_token = _token_scales(pool)
        scaled: Any = ScaledPages  # of descriptions of arrays, not of arrays
        written, specs = scaled(pool, by_token, by_token), scaled(PAGES, SCALES, SCALES)
        options, option_specs, call = {}, {}, _write_scaled

    def function(written: Any, k: Any, v: Any, page_ids: Any, offsets: Any, options: Any) -> Any:
        return call(written, k, v, page_ids, offsets, backend=case.backend, **options)

    return Problem(
        function,
        (written, token, token, index, index, options),
        (specs, HEADS, HEADS, EVERYWHERE, EVERYWHERE, option_specs),
        specs,
        in_place=_size(pool) // p.shards,
    )


def _rotate_and_write(case: Case, kind: str) -> Problem:
    p = case.problem
    assert isinstance(p, Attention)
    pool = _pool(p)
    shape = jax.ShapeDtypeStruct
    group = p.heads // p.kv_heads
    qkv = shape((PARTS, p.rows, p.kv_heads, group + 2, p.head_dim), jnp.float32)
    table = shape((p.rows, p.head_dim // 2), jnp.float32)
    index = shape((p.rows,), jnp.int32)

    def function(pool: Any, qkv: Any, cos: Any, sin: Any, page_ids: Any, offsets: Any) -> Any:
        q, pool = rotate_and_write(
            qkv, cos, sin, pool, page_ids, offsets, dtype=p.dtype, backend=case.backend
        )
        return pool, q

    return Problem(
        function,
        (pool, qkv, table, table, index, index),
        (PAGES, PartitionSpec(None, None, "model"), *(EVERYWHERE,) * 4),
        (PAGES, HEADS),
        in_place=_size(pool) // p.shards,
    )


def _matmul(case: Case, kind: str) -> Problem:
    function, operands = matmul_call(case, kind)
    specs = jax.tree.map(lambda leaf: EVERYWHERE, operands)
    return Problem(function, operands, specs, EVERYWHERE)


def _grouped(case: Case, kind: str) -> Problem:
    function, operands = grouped_call(case)
    specs = jax.tree.map(lambda leaf: EVERYWHERE, operands)
    return Problem(function, operands, specs, EVERYWHERE)


def _threshold(case: Case, kind: str) -> Problem:
    p = case.problem
    assert isinstance(p, Sampling)
    shape = jax.ShapeDtypeStruct
    number = shape((p.rows,), jnp.float32)
    return Problem(
        partial(kept_threshold, backend=case.backend),
        (shape((p.rows, p.vocab), p.dtype), shape((p.rows,), jnp.int32), number, number),
        (EVERYWHERE,) * 4,
        EVERYWHERE,
    )


BUILDERS = {
    "grouped_linear": _grouped,
    "kept_threshold": _threshold,
    "linear_layer": _matmul,
    "quantized_matmul": _matmul,
    "rotate_and_write": _rotate_and_write,
    "decode": _attention,
    "decode_and_write": _decode_and_write,
    "prefill": _attention,
    "write_kv": _write,
    "write_kv_scaled": _write,
}
COST: dict[str, Callable[[Any], Cost]] = {
    "grouped_linear": grouped_cost,
    "linear_layer": matmul_cost,
    "quantized_matmul": matmul_cost,
    **COSTS,
}


def _over(mesh: Mesh, problem: Problem) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """The function divided over the heads, and its operands placed on the mesh."""

    def placed(leaf: jax.ShapeDtypeStruct, spec: PartitionSpec) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec))

    function = jax.shard_map(
        problem.function,
        mesh=mesh,
        in_specs=problem.specs,
        out_specs=problem.result,
        check_vma=False,  # warp-specialised Mosaic GPU kernels cannot be checked
    )
    return function, jax.tree.map(placed, problem.operands, problem.specs)


def _most_registers(case: Case, kind: str) -> int | None:
    """Of a thread of a kernel that counts on two thread blocks a multiprocessor."""
    p = case.problem
    if (case.operation, case.backend) != ("decode", "mosaic_gpu"):
        return None
    assert isinstance(p, Attention)
    pool = jnp.dtype(p.pages or p.dtype)
    _, group = decode.tiles_of(p.queries, p.heads // p.kv_heads, p.head_dim)
    tuning = chip_tuning(device_name(kind)).decode
    tuning = tuning or decode.default_tuning(p.head_dim, group, pool)
    twice = decode.fits_twice(p.head_dim, group, pool, tuning)
    return REGISTERS // (2 * THREADS) if twice else None


def prove_case(case: Case, kind: str) -> Proof:
    """Compiles a case for one kind of absent device and judges it.

    Raises:
        CompilerMissingError: what compiles for this kind is not installed.
    """
    shards = case.problem.shards
    mesh = absent_mesh(kind, shards)
    problem = BUILDERS[case.operation](case, kind)
    function, operands = problem.function, problem.operands
    if shards > 1:
        function, operands = _over(mesh, problem)
    own, experts = case.own, case.problem
    quantized = (
        weight_elements(experts, case.backend) if isinstance(experts, Experts) else frozenset()
    )
    limit = LARGER_TEMPORARIES.get(kind, MAX_TEMPORARIES)
    return prove(
        case.name,
        function,
        *operands,
        mesh=mesh,
        kind=kind,
        wanted=Requirements(
            instructions={"": case.requires} if case.requires else {},
            own_kernel=own,
            in_place=problem.in_place,
            max_temporaries=limit if own or problem.in_place else None,
            registers=_most_registers(case, kind),
            quantized=quantized,
        ),
        cost=COST[case.operation](case.problem),
        donate_argnums=(0,) if problem.in_place else (),
    )
