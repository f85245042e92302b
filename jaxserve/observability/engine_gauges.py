"""The engine's numbers by name: what `/metrics`, `LLM.memory_report` and logs tell."""

from __future__ import annotations

from typing import NamedTuple

from jaxserve.boundary.messages import EngineStats


class Reading(NamedTuple):
    """One number: its name without the prefix, a line of help, and its value."""

    name: str
    text: str
    value: float


def load_line(stats: EngineStats) -> str:
    """A line of the log: queues, pages and the steps so far."""
    return (
        f"running: {stats.num_running}, waiting: {stats.num_waiting}, "
        f"pages in use: {stats.page_usage:.1%}, steps: {stats.num_steps}"
    )


def memory_gauges(stats: EngineStats, page_bytes: int) -> list[Reading]:
    """What the KV pages hold now.

    Args:
        stats: a snapshot of the engine.
        page_bytes: bytes of one page over all layers and devices.
    """
    pages, tiers = stats.pages, stats.pages.tiers
    held = pages.num_tokens / pages.num_active if pages.num_active else 0.0
    size = page_bytes / pages.page_size
    return [
        Reading("kv_cache_usage_perc", "Share of KV pages in use, 0 to 1.", stats.page_usage),
        Reading("kv_pages", "KV pages that requests can have.", pages.num_pages),
        Reading("kv_pool_bytes", "Bytes of these pages.", pages.num_pages * page_bytes),
        Reading("kv_pages_in_use", "Pages that requests own.", pages.num_active),
        Reading(
            "kv_pages_reclaimable",
            "Pages that nobody owns and the prefix cache keeps until they are needed.",
            pages.num_reclaimable,
        ),
        Reading("kv_pages_cached", "Pages that the prefix cache can find.", pages.num_cached),
        Reading(
            "kv_allocated_bytes", "Bytes of pages that requests own.", pages.num_active * page_bytes
        ),
        Reading(
            "kv_active_bytes", "Bytes of computed tokens in these pages.", pages.num_tokens * size
        ),
        Reading(
            "kv_active_ratio",
            "Active bytes over allocated bytes, 0 to 1; 0 without a request.",
            held / pages.page_size,
        ),
        Reading("kv_host_pages", "KV pages that the host's memory holds.", tiers.num_host_pages),
        Reading("kv_host_pool_bytes", "Bytes of these pages.", tiers.num_host_pages * page_bytes),
        Reading(
            "kv_host_pages_in_use",
            "Pages of the host's memory that hold what can be found.",
            tiers.num_held,
        ),
        Reading("kv_host_bytes", "Bytes of these pages.", tiers.num_held * page_bytes),
        Reading(
            "kv_host_pages_arriving",
            "Those of them that a copy is on its way to.",
            tiers.num_arriving,
        ),
        Reading("kv_disk_pages", "Files of KV pages in the folder of pages.", tiers.num_files),
        Reading("kv_disk_bytes", "Bytes of these files.", tiers.file_bytes),
    ]


def memory_counters(stats: EngineStats) -> list[Reading]:
    """What happened to the KV pages since the engine started."""
    pages, tiers = stats.pages, stats.pages.tiers
    return [
        Reading(
            "num_preemptions",
            "Requests preempted for want of pages, or for another client's share of slots.",
            stats.num_preemptions,
        ),
        Reading(
            "beam_shrinks", "Beams that searches gave up for want of pages.", stats.num_beam_shrinks
        ),
        Reading(
            "prefix_cache_queries",
            "Prompt tokens that the prefix cache was asked for.",
            pages.num_queried,
        ),
        Reading("prefix_cache_hits", "Prompt tokens that it had.", pages.num_found),
        Reading(
            "mm_cache_queries", "Images and tiles that the encoder was asked for.", stats.num_images
        ),
        Reading(
            "mm_cache_hits", "Those of them that it had encoded already.", stats.num_known_images
        ),
        Reading(
            "kv_pages_offloaded", "Pages moved from the device to the host's memory.", tiers.num_out
        ),
        Reading("kv_pages_restored", "Pages moved back into the device.", tiers.num_back),
        Reading(
            "kv_pages_dropped",
            "Pages that left the device and no host page could take at once.",
            tiers.num_lost,
        ),
        Reading(
            "kv_pages_recomputed",
            "Pages that the host's memory had and that were sooner computed than moved.",
            tiers.num_recomputed,
        ),
        Reading("kv_pages_read", "Pages read of files.", tiers.num_read),
        Reading(
            "kv_pages_unwritten",
            "Pages that no file was written for: too many waited, or the disk was full.",
            tiers.num_unwritten,
        ),
        Reading(
            "integrity_failures",
            "Idle checks that found pages or slots lost, or owned twice.",
            stats.num_integrity_failures,
        ),
    ]
