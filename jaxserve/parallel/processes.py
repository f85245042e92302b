"""JAX's own connection between the processes of one engine (`jax.distributed`), for a start.

It tells each process of the devices of all, and how sums over devices reach the other processes: by
Gloo on a CPU, by NCCL on GPUs. Once every program has run it is left: JAX would abort a process
when it loses another one, before the process could say why.
"""

from __future__ import annotations

import jax

from jaxserve.errors import JaxServeError, ValidationError

CONNECT_S = 25  # that process 0's service is waited for
LEAVE_S = 120  # that a process which is warmed up waits for the others


def connect(address: str, num_processes: int, process_id: int) -> None:
    """Join the others; all do at once, before any of them uses a device.

    Args:
        address: HOST:PORT at which process 0 serves the others.
        num_processes: with this one.
        process_id: of this one.

    Raises:
        ValidationError: this process has used its devices, or was connected, before.
        JaxServeError: the others are not reached.
    """
    if jax.distributed.is_initialized():
        allowed = "1 in a process that has had an engine of several processes"
        raise ValidationError("num_processes", num_processes, allowed)
    try:
        jax.distributed.initialize(
            address,
            num_processes,
            process_id,
            cluster_detection_method="deactivate",
            initialization_timeout=CONNECT_S,
            shutdown_timeout_seconds=LEAVE_S,
            coordinator_bind_address=address,
        )
    except jax.errors.JaxRuntimeError as error:
        raise JaxServeError(f"JAX does not connect the processes at {address}: {error}") from error
    except RuntimeError as error:
        allowed = "1 in a process that has used JAX's devices before"
        raise ValidationError("num_processes", num_processes, allowed) from error
    if jax.default_backend() == "gpu":
        # XLA divides the timing of kernels among the processes, so that all choose the same: one
        # that had a program already would let the others wait
        jax.config.update("jax_enable_compilation_cache", False)


def disconnect() -> None:
    """Leave JAX's service; all do at once. What has run goes on running, nothing is compiled."""
    jax.distributed.shutdown()
