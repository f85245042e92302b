"""A peer that is a private call of JAX: which versions have it, and what is said without it."""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
from types import SimpleNamespace
from typing import Any

import jax
import pytest

from benchmarks.kernel_bench import decode
from benchmarks.kernel_bench.cases import DecodeCase

MODULE = "jax._src.cudnn.fused_attention_stablehlo"
# Of JAX. Another release: look whether `paged_attention` there still takes what `cudnn` gives it.
VERSIONS = ("0.10", "0.11", "0.12")


def test_what_is_used_is_there_in_the_versions_that_are_named() -> None:
    assert ".".join(jax.__version__.split(".")[:2]) in VERSIONS, f"jax {jax.__version__} is new"
    module = importlib.import_module(MODULE)
    taken = inspect.signature(module.paged_attention).parameters
    tables = ["page_table_k", "page_table_v"]
    assert list(taken)[:7] == ["query", "key", "value", "q_seqlen", "kv_seqlen", *tables]
    assert {"scale", "mask_type"} <= set(taken) and module.MaskType.PADDING


def test_a_rename_is_a_row_of_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    case = DecodeCase(2, 40, 4, 2, head_dim=16)
    pool: Any = SimpleNamespace(kv_pages=SimpleNamespace(nbytes=1), layers=1)
    monkeypatch.setattr(decode, "make_pool", lambda *args: pool)
    monkeypatch.setattr(decode, "queries", lambda *args: None)
    monkeypatch.setattr(decode, "ours", lambda *args: (lambda: None, []))
    peer = functools.partial(decode.cudnn, case, pool, None)
    monkeypatch.setattr(decode, "peers", lambda *args: {decode.CUDNN: peer})
    monkeypatch.setitem(sys.modules, MODULE, None)
    backends = SimpleNamespace(decode="triton", decode_options={})
    bench: Any = SimpleNamespace(memory=10, cold_bytes=1, backends=backends)
    found = decode.entries(bench, case)
    assert list(found.programs) == [decode.OURS]
    (row,) = found.missing
    assert MODULE in str(row)
