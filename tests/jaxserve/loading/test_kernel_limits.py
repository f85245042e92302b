"""Pools and page tables that the kernels do not address are never planned."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.model_shapes import SHAPES
from jaxserve.config.engine_config import EngineConfig
from jaxserve.errors import ValidationError
from jaxserve.loading.engine_plan import decide
from jaxserve.loading.hub import locate
from jaxserve.loading.kernel_limits import addressable_pages
from jaxserve.loading.load_progress import LoadProgress
from jaxserve.models.config_reader import model_config_of
from jaxserve.models.kv_cache import KVCache, KVFormat
from jaxserve.parallel.mesh import make_mesh
from pallas_kernels import Backends, KernelError, choose_backends
from pallas_kernels.backends import mosaic_tpu
from pallas_kernels.paged_attention.triton.block import require_addressable
from tests.jaxserve.test_step_contract import SETTINGS
from tests.resolved_config import resolved_config

GIB = 1 << 30
L4, H200 = ("NVIDIA L4", "8.9"), ("NVIDIA H200", "9.0")


def cache_of(kv_cache_dtype: str, device: tuple[str, str] = L4) -> KVCache:
    """The cache of Llama-3-8B: 65,536 numbers a token."""
    model = model_config_of(SHAPES["llama-3-8b"])
    kv_format = KVFormat.of(kv_cache_dtype, "bfloat16")
    shape = kv_format.attention_shape(model, "bfloat16", "gpu", 16, 1)
    backends = choose_backends(device[0], "gpu", shape, capability=device[1])
    return KVCache.of(model, kv_format, backends, platform="gpu", page_size=16)


@pytest.mark.parametrize(
    ("kv_cache_dtype", "device", "limited"),
    [
        ("fp8", L4, True),
        ("int8", L4, True),
        ("auto", L4, False),
        ("fp8", H200, False),
        ("int8", H200, True),  # Triton's there too
    ],
)
def test_pools_between_2_and_4_gib_of_8_bit_pages_are_lowered_with_a_warning(
    kv_cache_dtype: str, device: tuple[str, str], limited: bool, caplog: pytest.LogCaptureFixture
) -> None:
    config, cache = resolved_config(), cache_of(kv_cache_dtype, device)
    elements = 16 * 65536  # of a page
    for pages in (5, 2 * GIB // elements, 4 * GIB // elements + 1):
        assert addressable_pages(config, cache, 1, pages) == pages
    assert not caplog.records
    for pages in (2 * GIB // elements + 1, 3 * GIB // elements, 4 * GIB // elements):
        caplog.clear()
        expected = 2 * GIB // elements if limited else pages
        assert addressable_pages(config, cache, 1, pages) == expected
        assert len(caplog.records) == limited
        # so it is by what the kernels themselves refuse
        if "triton" in (cache.backends.decode, cache.backends.prefill):
            require_addressable(cache.with_pages(expected).shapes().pages)
        if limited:
            with pytest.raises(KernelError):
                require_addressable(cache.with_pages(pages).shapes().pages)
    if limited:
        assert addressable_pages(config, cache, 2, 3 * GIB // elements) == 3 * GIB // elements
        assert f"from {pages} to {expected} pages" in caplog.text


def test_a_pool_that_was_asked_for_is_refused_with_what_is_allowed() -> None:
    config, cache = resolved_config(num_pages=3000), cache_of("fp8")
    with pytest.raises(ValidationError, match=r"num_pages=3000 .*up to 2048, or from 4097 on"):
        addressable_pages(config, cache, 1, 3000)


def test_the_record_says_what_the_kernel_refuses() -> None:
    entries = choose_backends("TPU v6 lite", "tpu").table_entries
    assert entries == mosaic_tpu.TABLE_ENTRIES and mosaic_tpu.covers_table((1, entries)) is None
    assert mosaic_tpu.covers_table((1, entries + 1)) is not None
    assert choose_backends("NVIDIA H200", "gpu").table_entries is None


@pytest.mark.parametrize(
    ("settings", "slots", "longest", "warning"),
    [
        ({"max_model_len": 80, "max_num_seqs": 13}, 13, 80, None),
        ({"max_model_len": 80}, 13, 80, "max_num_seqs lowered from 32 to 13"),
        ({"max_num_seqs": 5}, 5, 208, "max_model_len lowered from 512 to 208"),
        ({}, 2, 512, "max_num_seqs lowered from 32 to 2"),
        ({"max_model_len": 80, "max_num_seqs": 14}, None, None, "at most 13 for max_model_len=80"),
    ],
)
def test_slots_and_context_fit_the_page_table_of_the_kernels(
    settings: dict[str, Any],
    slots: int | None,
    longest: int | None,
    warning: str | None,
    model_folder: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Of 130 entries, in pages of 8 tokens."""
    monkeypatch.setattr(Backends, "table_entries", property(lambda backends: 130))
    left_open = dict.fromkeys(("max_model_len", "max_num_seqs", "max_num_batched_tokens"))
    asked = {**SETTINGS, **left_open, "num_pages": 70, **settings}
    config = EngineConfig.from_settings(model=str(model_folder("llama_gqa")), **asked)
    report = LoadProgress(lambda line: None, shown=False)
    if slots is None:
        with pytest.raises(ValidationError, match=warning):
            decide(config, locate(config), make_mesh(1), report)
        return
    with caplog.at_level(logging.WARNING):
        decided, runner, _ = decide(config, locate(config), make_mesh(1), report)
    scheduler = decided.config.scheduler
    assert (scheduler.max_num_seqs, scheduler.max_model_len) == (slots, longest)
    table = runner.state_shape().abstract(make_mesh(1)).page_table
    assert table.shape == (slots + 1, -(-longest // 8)) and decided.config.cache.num_pages == 70
    assert len(caplog.records) == (warning is not None)
    assert warning is None or warning in caplog.text
