"""Which process the kernel ends where memory runs out."""

from __future__ import annotations

import logging
from pathlib import Path

logger = logging.getLogger(__name__)


def offer_to_oom_killer(score: int) -> None:
    """Have this process ended rather than others.

    Args:
        score: of 1000, the highest goes first; one that is higher already is left.
    """
    file = Path("/proc/self/oom_score_adj")
    try:
        if int(file.read_text()) < score:
            file.write_text(str(score))
    except OSError as error:  # not Linux, or a container that forbids it
        logger.debug("oom_score_adj stays as it is: %s", error)
