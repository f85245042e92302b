"""The files of KV pages that `kv_offloading_path` asks for."""

from __future__ import annotations

import hashlib
import logging
from pathlib import Path

from jaxserve.execution.runner import Runner
from jaxserve.loading.engine_plan import EnginePlan
from jaxserve.loading.tier_plan import GIB
from jaxserve.memory.cold_store import MODEL_BYTES, ColdStore

logger = logging.getLogger(__name__)


def cold_store(decided: EnginePlan, runner: Runner) -> ColdStore | None:
    """The folder of pages; None where none was asked for, or where it cannot be used.

    An engine serves without it, and the log says why.

    Args:
        decided: the plan of the engine.
        runner: with its weights.
    """
    asked = decided.config.asked
    if asked.kv_offloading_path is None:
        return None
    model = hashlib.blake2b(decided.of_pages.encode(), digest_size=MODEL_BYTES)
    model.update(runner.weights.digest())
    folder = Path(asked.kv_offloading_path)
    try:
        return ColdStore(
            folder,
            model.digest(),
            runner.cache.page_bytes(1),
            int(asked.kv_offloading_path_size * GIB),
        )
    except OSError as error:
        logger.warning(
            "kv_offloading_path=%s: %s; the engine serves without files of pages", folder, error
        )
        return None
