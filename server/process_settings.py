"""How the processes that answer HTTP use their machine."""

from __future__ import annotations

import gc
import logging

from jaxserve.observability.process_collector import usable_cpus

logger = logging.getLogger("jaxserve.server")

# Between two threads that both want the interpreter: the event loop asks for it at each event, and
# would wait so long for a thread.
SWITCH_S = 0.0005


def workers_of(asked: int | None) -> int | None:
    """Threads for `--num-workers`: no more than there are cores, which a log line says."""
    cores = max(1, int(usable_cpus()))
    if asked is None or asked <= cores:
        return asked
    logger.warning("--num-workers %d is lowered to %d, the cores", asked, cores)
    return cores


def leave_out_of_collections() -> None:
    """What lives as long as the process is not looked at for garbage any more.

    A collection that walks it stops the event loop for tenths of a second, once a second under
    load.
    """
    gc.collect()  # what is garbage already would never be freed
    gc.freeze()
