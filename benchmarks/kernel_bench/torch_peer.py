"""The process with torch in it: FlashInfer and scaled_dot_product_attention on the same shapes.

Apart from ours because two owners of one GPU's memory and two sets of CUDA libraries in one process
can fail in ways that have nothing to do with what is measured. It answers requests, one JSON a line
(benchmarks.isolated): prepare a case, sample one candidate, drop the case.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.isolated import describe, serve
from benchmarks.kernel_bench.cases import Case, DecodeCase, PrefillCase, from_request
from benchmarks.kernel_bench.rows import FLASHINFER, SDPA

COLD_BYTES = 2**28
MOST_LAYERS = 256
SERIES = (4, 16)  # replays of the short and of the long series
WORKSPACE = 2**28
AGREEMENT = 0.05
CHECKED_ROWS = 16
USABLE = 0.85  # of the memory that is free when a case begins
CPU_MEMORY = 2**30
SMALL = DecodeCase(2, 64, 32, 8)  # what --build makes FlashInfer compile its kernels for
SMALL_MHA = DecodeCase(2, 64, 32, 32)
SMALL_PREFILL = PrefillCase(64, 64, 32, 8)
CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"

Layers = list[Callable[[], torch.Tensor]]


def layer_count(layer_bytes: int, memory: int) -> int:
    """Layers with pages of their own, so that the cache holds none of them when it comes round.

    Raises:
        MemoryError: one layer does not fit.
    """
    if layer_bytes > memory:
        raise MemoryError(f"a layer of {layer_bytes / 2**30:.1f} GiB, {memory / 2**30:.1f} left")
    wanted = math.ceil((COLD_BYTES if CUDA else 1) / layer_bytes)
    return max(2, min(MOST_LAYERS, wanted)) if 2 * layer_bytes <= memory else 1


def random_pages(case: DecodeCase, layers: int) -> torch.Tensor:
    """[layers, NP, 2, page_size, KVH, D], as FlashInfer wants them."""
    torch.manual_seed(0)
    shape = (layers, case.slots * case.pages, 2, case.page_size, case.kv_heads, case.head_dim)
    return torch.randn(shape, dtype=torch.bfloat16, device=DEVICE)


def page_tables(case: DecodeCase) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """FlashInfer's index pointers, page ids and lengths of the last pages."""
    order = torch.randperm(case.slots * case.pages, generator=torch.Generator().manual_seed(0))
    starts = torch.arange(case.slots + 1) * case.pages
    last = torch.full((case.slots,), case.context - (case.pages - 1) * case.page_size)
    return tuple(part.to(torch.int32).to(DEVICE) for part in (starts, order, last))


def gathered(
    case: DecodeCase, pages: torch.Tensor, order: torch.Tensor, slots: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values [slots, KVH, tokens, D] of the first slots of one layer's pages."""
    held = pages[order[: slots * case.pages].long()]
    held = held.reshape(slots, case.pages, *pages.shape[1:])
    held = held.permute(2, 0, 4, 1, 3, 5).flatten(3, 4)[:, :, :, : case.context]
    return held[0].contiguous(), held[1].contiguous()


def in_float32(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Attention of q [H, T, D] over k, v [KVH, S, D], the last query sees every key."""
    group = q.shape[0] // k.shape[0]
    k, v = (x.float().repeat_interleave(group, dim=0) for x in (k, v))
    scores = q.float() @ k.transpose(1, 2)
    rows, keys = scores.shape[1:]
    position = torch.arange(rows, device=q.device)[:, None] + (keys - rows)
    scores.masked_fill_(torch.arange(keys, device=q.device) > position, -math.inf)
    return scores.softmax(-1) @ v


class Attention:
    """The layers of every candidate of one case, each a call without arguments."""

    def __init__(self, case: DecodeCase | PrefillCase):
        self.case = case
        self.shape = case.as_decode if isinstance(case, PrefillCase) else case
        memory = int(USABLE * torch.cuda.mem_get_info()[0]) if CUDA else CPU_MEMORY
        # half of it for the contiguous copy that scaled_dot_product_attention reads
        self.layers = layer_count(self.shape.layer_bytes, memory // 2)
        self.pages = random_pages(self.shape, self.layers)
        self.tables = page_tables(self.shape)
        rows = self.shape.slots * (case.chunk if isinstance(case, PrefillCase) else 1)
        size = (rows, self.shape.heads, self.shape.head_dim)
        plain = torch.randn(size, device=DEVICE) * self.shape.head_dim**-0.5
        self.q = plain.to(torch.bfloat16)
        self.workspace = torch.empty(WORKSPACE if CUDA else 1, dtype=torch.uint8, device=DEVICE)

    def difference(self, found: torch.Tensor) -> float:
        """|found - wanted| / |wanted| for the first layer's last rows of the first slot."""
        k, v = gathered(self.shape, self.pages[0], self.tables[1], 1)
        last = len(self.q) // self.shape.slots
        rows = slice(max(0, last - CHECKED_ROWS), last)
        wanted = in_float32(self.q[rows].transpose(0, 1), k[0], v[0]).transpose(0, 1)
        return float((found[rows].float() - wanted).norm() / wanted.norm())

    def sdpa(self) -> Layers:
        """Contiguous keys and values: what attention costs without pages."""
        from torch.nn.attention.bias import causal_lower_right

        shape, case = self.shape, self.case
        rows = len(self.q) // shape.slots
        q = self.q.reshape(shape.slots, rows, shape.heads, -1).transpose(1, 2)
        mask = causal_lower_right(rows, shape.context) if isinstance(case, PrefillCase) else None
        parts = [
            gathered(shape, self.pages[layer], self.tables[1], shape.slots)
            for layer in range(self.layers)
        ]

        def layer(k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            attend = torch.nn.functional.scaled_dot_product_attention
            out = attend(q, k, v, attn_mask=mask, scale=1.0, enable_gqa=shape.heads != k.shape[1])
            return out.transpose(1, 2).reshape(self.q.shape)

        return [lambda k=k, v=v: layer(k, v) for k, v in parts]

    def flashinfer(self) -> Layers:
        """FlashInfer's batch wrappers, planned once as its users do for a step."""
        import flashinfer

        shape, case = self.shape, self.case
        heads = (shape.heads, shape.kv_heads, shape.head_dim, shape.page_size)
        types = {"q_data_type": torch.bfloat16, "kv_data_type": torch.bfloat16, "sm_scale": 1.0}
        if isinstance(case, PrefillCase):
            wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(self.workspace, "NHD")
            queries = torch.arange(case.lanes + 1, dtype=torch.int32, device=DEVICE) * case.chunk
            wrapper.plan(queries, *self.tables, *heads, causal=True, **types)
        else:
            grouped = shape.heads // shape.kv_heads >= 4
            wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
                self.workspace, "NHD", use_tensor_cores=grouped
            )
            wrapper.plan(*self.tables, *heads, **types)
        layers = range(self.layers)
        return [lambda layer=layer: wrapper.run(self.q, self.pages[layer]) for layer in layers]


def captured(layers: Layers) -> Callable[[], Any]:
    """All layers as one graph; a plain loop where there is no GPU."""
    if not CUDA:
        return lambda: [layer() for layer in layers]
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for layer in layers[:2]:
            layer()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for layer in layers:
            layer()
    return graph.replay


def series_seconds(run: Callable[[], Any], calls: int) -> float:
    """Seconds on the device between events before the first and after the last call."""
    if not CUDA:
        begin = time.perf_counter()
        for _ in range(calls):
            run()
        return time.perf_counter() - begin
    before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    before.record()
    for _ in range(calls):
        run()
    after.record()
    torch.cuda.synchronize()
    return before.elapsed_time(after) / 1e3


class Peer:
    """The state between requests: the case that was prepared."""

    def __init__(self) -> None:
        self.runs: dict[str, Callable[[], Any]] = {}
        self.layers = 1

    def prepare(self, case: Case) -> dict[str, Any]:
        """Builds, checks and captures every candidate of a case."""
        self.drop()
        if not isinstance(case, (DecodeCase, PrefillCase)):
            return {"ready": [], "refused": {}}
        refused: dict[str, str] = {}
        try:
            problem = Attention(case)
        except (MemoryError, torch.OutOfMemoryError) as error:
            return {"ready": [], "refused": dict.fromkeys((FLASHINFER, SDPA), describe(error))}
        self.layers = problem.layers
        for name, build in ((FLASHINFER, problem.flashinfer), (SDPA, problem.sdpa)):
            try:
                layers = build()
                error = problem.difference(layers[0]())
                if not error <= AGREEMENT:
                    raise ArithmeticError(f"its result differs from float32 by {error:.2g}")
                self.runs[name] = captured(layers)
                self.runs[name]()
            except Exception as error:  # a row of the table says so
                self.runs.pop(name, None)
                refused[name] = describe(error)
        return {"ready": list(self.runs), "refused": refused}

    def sample(self, name: str) -> float | None:
        """Seconds of one operation; None when the two series cannot be told apart."""
        short, long = (series_seconds(self.runs[name], calls) for calls in SERIES)
        found = (long - short) / (SERIES[1] - SERIES[0]) / self.layers
        return found if found > 0 else None

    def drop(self) -> None:
        """Gives the memory of the case back."""
        self.runs = {}
        if CUDA:
            torch.cuda.empty_cache()

    def answer(self, request: dict[str, Any]) -> Any:
        """One request."""
        if request["do"] == "prepare":
            return self.prepare(from_request(request["case"]))
        if request["do"] == "sample":
            return self.sample(request["name"])
        if request["do"] == "step":
            from benchmarks.kernel_bench.torch_step import measure

            return measure(request)
        self.drop()
        return None


def main() -> int:
    """Serves requests; with --build it only lets FlashInfer compile its kernels into its cache."""
    if sys.argv[1:] == ["--build"]:
        for case in (SMALL, SMALL_MHA, SMALL_PREFILL):
            print(Peer().prepare(case), flush=True)
        return 0
    peer = Peer()
    errors = (torch.AcceleratorError,) if hasattr(torch, "AcceleratorError") else ()
    serve(peer.answer, poisonous=errors)
    return 0


if __name__ == "__main__":
    sys.exit(main())
