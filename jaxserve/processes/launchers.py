"""Which of several processes this one is, by what its launcher has put into its environment.

The variables are those by which `jax.distributed` knows launchers, but for Slurm's: the tasks of
the step that this process is in count, not those of the job, which may have asked for more.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping
from typing import NamedTuple

# ports of `coordinator` where the launcher names none: all processes choose the same one, and
# another engine of the same hosts most likely another one
FIRST_PORT, NUM_PORTS = 61440, 4096
THIS_HOST = "127.0.0.1"
# by which libtpu takes some chips of a host as a slice of their own
OWN_CHIPS = ("TPU_PROCESS_BOUNDS", "TPU_CHIPS_PER_PROCESS_BOUNDS", "TPU_VISIBLE_DEVICES")
_BRACKETS = re.compile(r"\[(\d+)[^\]]*\]")  # of a list of hosts, as node[003,005-007]
_MPIRUN = re.compile(r"tcp://([^,:]+)|tcp6://\[([^,\]]+)")  # the first address of mpirun


class ProcessPlace(NamedTuple):
    """This process among those of a launcher, which are two or more.

    Attributes:
        launcher: its name.
        num_processes: that it has started.
        process_id: of this one, from 0.
        coordinator: HOST:PORT of process 0; None: the launcher does not say its host.
        spans_hosts: whether they are on several hosts.
        is_certain: whether none of them can have devices of its own alone, as in a TPU slice, or
            JAX's own variables say that they belong together.
    """

    launcher: str
    num_processes: int
    process_id: int
    coordinator: str | None
    spans_hosts: bool
    is_certain: bool = False


def launched(environ: Mapping[str, str]) -> ProcessPlace | None:
    """This process's place; None: it was started alone, or not all variables of a launcher are
    there.

    Where one launcher was started by another one, as mpirun by Slurm, the inner one counts.
    """
    places = (of(environ) for of in (_jax, _open_mpi, _slurm, _tpu))
    return next((place for place in places if place is not None), None)


def _jax(environ: Mapping[str, str]) -> ProcessPlace | None:
    """JAX_COORDINATOR_ADDRESS, which JAX reads, and two that are named like the other arguments of
    `jax.distributed.initialize`: what scripts and deployments set, as on Ray."""
    address = environ.get("JAX_COORDINATOR_ADDRESS")
    counts = _counts(environ, "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
    if counts is None or not address:
        return None
    return ProcessPlace("JAX's variables", *counts, address, spans_hosts=True, is_certain=True)


def _open_mpi(environ: Mapping[str, str]) -> ProcessPlace | None:
    counts = _counts(environ, "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK")
    if counts is None:
        return None
    here = environ.get("OMPI_COMM_WORLD_LOCAL_SIZE")
    spans_hosts, mpirun = here != str(counts[0]), environ.get("OMPI_MCA_orte_hnp_uri", "")
    job = mpirun.partition(".")[0] or environ.get("PMIX_NAMESPACE", "")
    found = _MPIRUN.search(mpirun)
    host = THIS_HOST if not spans_hosts else found and (found[1] or found[2])
    return ProcessPlace("Open MPI", *counts, _address(host, job), spans_hosts)


def _slurm(environ: Mapping[str, str]) -> ProcessPlace | None:
    counts = _counts(environ, "SLURM_STEP_NUM_TASKS", "SLURM_PROCID")
    names = ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_STEP_NODELIST")
    job, step, hosts = (environ.get(name, "") for name in names)
    if counts is None or not (job and step and hosts):
        return None
    spans_hosts = environ.get("SLURM_STEP_NUM_NODES") != "1"
    host = _BRACKETS.sub(r"\1", hosts).partition(",")[0] if spans_hosts else THIS_HOST
    return ProcessPlace("Slurm", *counts, _address(host, f"{job}.{step}"), spans_hosts)


def _tpu(environ: Mapping[str, str]) -> ProcessPlace | None:
    """A host of a TPU slice, by the variables that GKE sets, and `tpu_metadata` on a TPU VM."""
    hosts = environ.get("TPU_PROCESS_ADDRESSES") or environ.get("TPU_WORKER_HOSTNAMES", "")
    names = [one.strip().partition(":")[0] for one in hosts.split(",")]
    own = _counts({"size": str(len(names)), **environ}, "size", "TPU_WORKER_ID")
    is_one_of_slices = environ.get("MEGASCALE_NUM_SLICES", "1") != "1"
    has_own_chips = any(name in environ for name in OWN_CHIPS)
    if own is None or is_one_of_slices or has_own_chips or not all(names):
        return None
    address = _address(names[0], hosts)
    return ProcessPlace("the TPU slice", *own, address, spans_hosts=True, is_certain=True)


def _counts(environ: Mapping[str, str], count: str, own: str) -> tuple[int, int] | None:
    """How many processes there are and which one this is; None: one, or not numbers of some."""
    try:
        num_processes, process_id = int(environ[count]), int(environ[own])
    except (KeyError, ValueError):
        return None
    return (num_processes, process_id) if 0 <= process_id < num_processes > 1 else None


def _address(host: str | None, job: str) -> str | None:
    """HOST:PORT, the port by what tells this start from others; None without a host."""
    if host is None:
        return None
    port = FIRST_PORT + zlib.crc32(job.encode()) % NUM_PORTS
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
