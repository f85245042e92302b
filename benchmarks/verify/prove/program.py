"""The launches of a compiled program: kernels by class, loops, copies and CUDA graphs.

Read from the text of an optimised module: its entry computation holds one instruction a kernel
in the order in which they run, and from XLA's list of what it launches on a GPU (thunks), where a
graph is one entry with its kernels under it. Autotuning needs the device, so here every product of
a GPU is a kernel that XLA generates; on a device some become calls of cuBLAS, one for one.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field
from itertools import pairwise

PRODUCT, FUSION, COPY, FETCH = "product", "fusion", "copy", "fetch"
JOINED = "ConcatBitcast"  # parts that were fetched, seen as one array
OWN_TARGETS = ("__gpu$xla.gpu.triton", "mosaic_gpu", "tpu_custom_call")
PRODUCT_TARGETS = ("__cublas", "__triton_gemm")
MATRIX = ("dot", "convolution")  # a TPU has the second alone
# nothing is launched for these; the end of an asynchronous pair belongs to its begin
FREE = (
    "parameter", "constant", "bitcast", "tuple", "get-tuple-element", "after-all", "partition-id",
    "replica-id", "opt-barrier", "copy-done", "async-done", "all-reduce-done", "all-gather-done",
    "slice-done", "custom-call-done", "add-dependency", "domain", "token",
)  # fmt: skip
SAME = ("bitcast", "get-tuple-element", "tuple")  # other names of what they read
ITEMSIZE = {
    "pred": 1,
    "s8": 1,
    "u8": 1,
    "bf16": 2,
    "f16": 2,
    "s16": 2,
    "u16": 2,
    "s64": 8,
    "u64": 8,
}
LEAST_HELD = 2**20  # bytes of an operand that is changed in place and of which a step uses a part
HALF = ("bf16", "f16")
EXCHANGE = re.compile(
    r"(all-reduce|all-gather|reduce-scatter|all-to-all|ragged-all-to-all|collective-[a-z]+?)"
    r"(-start)?"
)
INTEGERS = ("pred[", "s32[", "u32[", "s64[", "u64[")  # no numbers of a model: those have 8 bits
INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?(?P<name>\S+) = (?P<type>\(.*?\)|\S+) (?P<op>[\w-]+)\(")
COMPUTATION = re.compile(r"^(?P<entry>ENTRY )?%?(?P<name>[\w.\-]+) \(.*\{$")


@dataclass(frozen=True, slots=True)
class Counts:
    """The launches of a program.

    Attributes:
        kernels: how many of each class: "product", a kernel's own name, "fusion", "copy", or what
            XLA calls another operation.
        a_layer: the same for one layer; empty where there are fewer than two layers.
        loops: `while` instructions, wherever they are.
        in_parts: products of 16-bit numbers that leave float32 parts for another kernel to add.
        rounded_elsewhere: products of 16-bit numbers with a float32 result that another kernel
            rounds.
        graphs: CUDA graphs; None where that is not known.
        outside: what is launched outside of any.
        fetches: copies beside the kernels, of what later ones read, into a TPU's own memory.
        moved: bytes of arrays between kernels, each counted where it is written and at every
            reader as a whole. Operands of the program are left out, and what it changes in place.
            Bodies of loops are not looked into.
        moved_a_layer: the same for one layer.
    """

    kernels: dict[str, int] = field(default_factory=dict)
    a_layer: dict[str, int] = field(default_factory=dict)
    loops: int = 0
    in_parts: int = 0
    rounded_elsewhere: int = 0
    graphs: int | None = None
    outside: int | None = None
    fetches: int = 0
    moved: int = 0
    moved_a_layer: int = 0

    @property
    def copies(self) -> int:
        return self.kernels.get(COPY, 0)


@dataclass(frozen=True, slots=True)
class _Instruction:
    name: str
    type: str
    op: str
    line: str

    def names(self) -> str | None:
        """The computation of a fusion."""
        found = re.search(r"calls=%?([\w.\-]+)", self.line)
        return found.group(1) if found else None

    def operands(self) -> list[str]:
        """The names of what it reads."""
        inside = self.line.split(f" {self.op}(", 1)[1].split(")", 1)[0]
        return re.findall(r"%([\w.\-]+)", inside)


def _computations(hlo: str) -> tuple[dict[str, list[_Instruction]], str]:
    """The instructions of every computation, and the name of the entry."""
    found: dict[str, list[_Instruction]] = {}
    current, entry = "", ""
    for line in hlo.splitlines():
        header = COMPUTATION.match(line)
        if header:
            current = header["name"]
            found[current] = []
            entry = current if header["entry"] else entry
            continue
        match = INSTRUCTION.match(line)
        if match and current:
            found[current].append(_Instruction(match["name"], match["type"], match["op"], line))
    return found, entry


def _inner(one: _Instruction, bodies: dict[str, list[_Instruction]]) -> _Instruction:
    """The call in a fusion that lets it read a part of an operand where it lies; else itself."""
    body = bodies.get(one.names() or "", [])
    return next((inner for inner in body if inner.op == "custom-call"), one)


def _called(one: _Instruction) -> str:
    target = re.search(r'custom_call_target="([^"]*)"', one.line)
    return target.group(1) if target else ""


def _class_of(one: _Instruction, bodies: dict[str, list[_Instruction]]) -> str:
    if _fetches(one):
        return FETCH
    body = bodies.get(one.names() or "", [])
    if one.op in MATRIX or any(inner.op in MATRIX for inner in body):
        return PRODUCT
    called = _inner(one, bodies)
    if called.op == "custom-call":
        target = _called(called)
        if target.startswith(PRODUCT_TARGETS):
            return PRODUCT
        place = re.search(r'op_name="([^"]*)"', called.line)
        steps = place.group(1).split("/") if place and target.startswith(OWN_TARGETS) else []
        return steps[-2] if len(steps) > 1 else target
    if one.op in ("copy", "copy-start") or _only_copies(body):
        return COPY
    return FUSION if one.op == "fusion" else one.op


def _only_copies(body: list[_Instruction]) -> bool:
    """Whether a fusion moves its operand and does nothing else."""
    work = [inner.op for inner in body if inner.op not in FREE]
    return bool(work) and set(work) <= {"copy", "transpose"}


def _float32_of_halves(
    product: _Instruction, bodies: dict[str, list[_Instruction]], types: dict[str, str]
) -> bool:
    """Whether a product of 16-bit numbers has a float32 result."""
    if not product.type.lstrip("(").startswith("f32"):
        return False
    body = bodies.get(product.names() or "")
    if body is not None:
        operands = [inner.type for inner in body if inner.op == "parameter"]
    else:
        operands = [types.get(name, "") for name in product.operands()]
    return any(operand.startswith(HALF) for operand in operands)


def _launched(
    hlo: str,
) -> tuple[list[tuple[str, _Instruction]], dict[str, list[_Instruction]], str]:
    bodies, entry = _computations(hlo)
    kernels = [
        (_class_of(one, bodies), one)
        for one in bodies.get(entry, ())
        if one.op not in FREE and _called(one) != JOINED
    ]
    return kernels, bodies, entry


def _one_layer(
    classes: list[str], own: set[str], layers: int, moved: list[int]
) -> tuple[dict[str, int], int]:
    """What one layer launches and moves: what stands between two calls of a kernel that every layer
    has once; of this package's kernels no more than the layers' share.

    That may be more between some calls than between others, by what the program has once: the
    least counts. What follows the layers may have a kernel as often as there are layers, but not as
    far apart.
    """
    total = Counter(classes)
    once = [name for name in own if total[name] == layers > 1]
    calls = [[at for at, called in enumerate(classes) if called == name] for name in once]
    widest = max((places[-1] - places[0] for places in calls), default=0)
    spans = [
        span
        for places in calls
        if 2 * (places[-1] - places[0]) > widest
        for span in pairwise(places)
    ]
    if not spans:
        return {}, 0
    windows = [Counter(classes[begin:end]) for begin, end in spans]
    layer = {name: min(window[name] for window in windows) for name in total}
    layer |= {name: min(layer[name], total[name] // layers) for name in own}
    least = min(sum(moved[begin:end]) for begin, end in spans)
    return {name: count for name, count in layer.items() if count}, least


def _sizes(shapes: str) -> list[int]:
    """Bytes of each array of a type that is in the device's memory, not in a TPU's own.

    Types of four bytes and those that are not known count four, but for eight bits of floating
    point.
    """
    return [
        math.prod(map(int, filter(None, dims.split(","))))
        * ITEMSIZE.get(kind, 1 if kind.startswith("f8") else 4)
        for kind, dims, layout in re.findall(r"(\w+)\[([\d,]*)\](\{[^}]*\})?", shapes)
        if "S(" not in layout
    ]


def _moved(hlo: str, kernels: list[_Instruction], entry: list[_Instruction]) -> list[int]:
    """Bytes of arrays between kernels that each of these reads and writes."""
    types = {one.name: one.type for one in entry}
    given = {one.name for one in entry if one.op == "parameter"}
    numbers = re.findall(r"\}: \((\d+),", hlo.split("\n", 1)[0])
    changed = {
        size
        for one in entry
        if one.op == "parameter" and any(f" parameter({number})" in one.line for number in numbers)
        for size in _sizes(one.type)
        if size >= LEAST_HELD
    }
    for one in entry:
        if one.op in SAME and given.issuperset(one.operands()):
            given.add(one.name)
    found = []
    for kernel in kernels:
        read = [types.get(name, "") for name in kernel.operands() if name not in given]
        # what begins to fetch has the type of what it fetches from as well
        written = "" if _fetches(kernel) else kernel.type
        arrays = [size for shapes in (*read, written) for size in _sizes(shapes)]
        found.append(
            0 if kernel.op == "while" else sum(size for size in arrays if size not in changed)
        )
    return found


def counts(hlo: str, layers: int, thunks: str | None = None) -> Counts:
    """Counts what a program launches.

    Args:
        hlo: its optimised module, as `Compiled.as_text()` gives it.
        layers: number of the model's layers.
        thunks: XLA's list of what it launches on a GPU, after it has made graphs.
    """
    kernels, bodies, entry = _launched(hlo)
    types = {one.name: one.type for one in bodies.get(entry, ())}
    own = {kind for kind, one in kernels if _called(_inner(one, bodies)).startswith(OWN_TARGETS)}
    in_parts = rounded = 0
    for kind, product in kernels:
        if kind != PRODUCT or not _float32_of_halves(product, bodies, types):
            continue
        held = {product.name}
        for one in bodies[entry]:  # in the order in which they run
            if one.op in SAME and held.intersection(one.operands()):
                held.add(one.name)
        readers = [(name, one) for name, one in kernels if held.intersection(one.operands())]
        if any(_rounds(name, one, bodies) for name, one in readers):
            # one of [rows, outputs] is whole, one with an axis before them is in parts
            is_whole = product.type.count(",") < 3
            rounded, in_parts = rounded + is_whole, in_parts + (not is_whole)
    graphs, outside = (None, None) if thunks is None else _graphs(thunks)
    moved = _moved(hlo, [one for _, one in kernels], bodies.get(entry, []))
    a_layer, moved_a_layer = _one_layer([kind for kind, _ in kernels], own, layers, moved)
    total = Counter(kind for kind, _ in kernels)
    fetches = total.pop(FETCH, 0)
    a_layer.pop(FETCH, None)
    return Counts(
        kernels=dict(total),
        a_layer=a_layer,
        loops=sum(one.op == "while" for body in bodies.values() for one in body),
        in_parts=in_parts,
        rounded_elsewhere=rounded,
        graphs=graphs,
        outside=outside,
        fetches=fetches,
        moved=sum(moved),
        moved_a_layer=moved_a_layer,
    )


def copied(hlo: str, sizes: Collection[int]) -> tuple[str, ...]:
    """Arrays of these numbers of elements that a program writes to memory, such as "bf16[8,4] by
    fusion.3": a copy of a quantised weight, in its own type or, worse, in a wider one.

    Args:
        hlo: its optimised module.
        sizes: elements of one device's part of each quantised weight.
    """
    bodies, _ = _computations(hlo)
    fused = {one.names() for body in bodies.values() for one in body if one.op == "fusion"}
    return tuple(
        f"{kind}[{dims}] by {one.name}"
        for name, body in bodies.items()
        if name not in fused
        for one in body
        if one.op not in (*FREE, "while", "conditional", "call") and not _fetches(one)
        for kind, dims, layout in re.findall(r"(\w+)\[([\d,]*)\](\{[^}]*\})?", one.type)
        if "S(" not in layout  # another memory than the device's own: a TPU fetches ahead
        and math.prod(map(int, filter(None, dims.split(",")))) in sizes
    )


def exchanges(hlo: str) -> list[tuple[str, list[str]]]:
    """What devices exchange in a program, in the order in which it runs: the operation, such as
    "all-reduce", and the types of its result, such as "bf16[8,4]"."""
    bodies, entry = _computations(hlo)
    return [
        (found.group(1), re.findall(r"\w+\[[\d,]*\]", one.type))
        for one in bodies.get(entry, ())
        if (found := EXCHANGE.fullmatch(one.op))
    ]


def exchanged_indices(hlo: str) -> tuple[str, ...]:
    """Exchanges of what says which rows are meant, such as token ids and page tables.

    Each device can compute these: they come whole with the step. Integers travel once tokens are
    drawn, behind the logits, and nothing else of the model does after that.
    """
    found = exchanges(hlo)
    whole = [all(one.startswith(INTEGERS) for one in types) for _, types in found]
    numbers = [at for at, is_whole in enumerate(whole) if not is_whole]
    of_model = found[: numbers[-1] if numbers else 0]
    return tuple(
        f"{name} of {', '.join(indices)}"
        for name, types in of_model
        if (indices := [one for one in types if one.startswith(INTEGERS)])
    )


def _fetches(one: _Instruction) -> bool:
    """Whether it begins to bring a part of an array into a TPU's own memory, ahead of its use."""
    made = one.line.split(f" {one.op}(", 1)[0]
    return one.op.endswith("-start") and "S(" in made


def _rounds(kind: str, reader: _Instruction, bodies: dict[str, list[_Instruction]]) -> bool:
    """Whether a kernel makes 16-bit numbers: in a fusion by a conversion, else as its result."""
    body = bodies.get(reader.names() or "")
    if body is not None:
        return any(one.op == "convert" and one.type.startswith(HALF) for one in body)
    return kind != PRODUCT and any(half + "[" in reader.type for half in HALF)


def _graphs(thunks: str) -> tuple[int, int]:
    """Graphs, and what is launched outside of any."""
    outer = [line for line in thunks.splitlines() if re.match(r"\d+: k", line)]
    graphs = sum(": kCommandBuffer" in line for line in outer)
    return graphs, len(outer) - graphs
