"""The workloads of every device: the engine end to end, and its kernels."""

from __future__ import annotations

from typing import Any

from benchmarks.kernel_bench.cases import Case, DecodeCase, MatmulCase, PrefillCase

BATCHES = (1, 8, 32)
LENGTH = 64  # tokens of a prompt and of an output
DRY_BATCHES = (2,)
DRY_LENGTH = 4


def engine_settings(batch: int) -> dict[str, Any]:
    """Settings of the engine that serves a batch, measured or estimated."""
    return {
        "max_num_seqs": max(2, batch),
        "max_model_len": 512,
        "num_pages": max(2, batch) * 40 + 8,
        "enable_prefix_caching": False,  # a workload is warmed up by one of its lengths
    }


def kernel_cases(page_size: int, dry_run: bool) -> list[Case]:
    """Shapes that a small device can hold as well; pages as long as the device likes them."""
    if dry_run:
        return [DecodeCase(2, 40, 4, 2, page_size=page_size)]
    return [
        DecodeCase(1, 4096, 32, 8, page_size=page_size),
        DecodeCase(8, 1024, 32, 8, page_size=page_size),
        DecodeCase(32, 1024, 32, 8, page_size=page_size),
        PrefillCase(512, 0, 32, 8, page_size=page_size),
        PrefillCase(512, 2048, 32, 8, page_size=page_size),
        MatmulCase("o", 1, 4096, 4096),
        MatmulCase("o", 16, 4096, 4096),
        MatmulCase("o", 256, 4096, 4096),
    ]
