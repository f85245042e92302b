"""What launchers say of the processes that they have started, by environments as they make them."""

from __future__ import annotations

from typing import Any

import pytest

from jaxserve.config.several_processes import address_of
from jaxserve.processes.launchers import FIRST_PORT, NUM_PORTS, launched

SLURM = {
    "SLURM_JOB_ID": "71",
    "SLURM_STEP_ID": "0",
    "SLURM_NTASKS": "8",  # of the job
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NODELIST": "node[003,005-007],other",
    "SLURM_PROCID": "1",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://10.96.0.1,10.148.0.1:34911",
}
TPU = {"TPU_WORKER_ID": "1", "TPU_WORKER_HOSTNAMES": "t-0.svc,t-1.svc"}
JAX = {
    "JAX_COORDINATOR_ADDRESS": "10.0.0.1:9000",
    "JAX_NUM_PROCESSES": "2",
    "JAX_PROCESS_ID": "0",
}


def place(environ: dict[str, str]) -> tuple[Any, ...] | None:
    """Number, id, host, whether on several hosts and whether that is certain; the port fits."""
    found = launched(environ)
    if found is None:
        return None
    host = None
    if found.coordinator is not None:
        host, port = address_of(found.coordinator)
        assert FIRST_PORT <= port < FIRST_PORT + NUM_PORTS <= 65536 or environ.keys() >= JAX.keys()
    return found.num_processes, found.process_id, host, found.spans_hosts, found.is_certain


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, None),
        (SLURM, (2, 1, "node003", True, False)),
        (SLURM | {"SLURM_STEP_NODELIST": "a,b"}, (2, 1, "a", True, False)),
        (SLURM | {"SLURM_STEP_NODELIST": "rack[1-2]n[04-05]"}, (2, 1, "rack1n04", True, False)),
        (SLURM | {"SLURM_STEP_NUM_NODES": "1"}, (2, 1, "127.0.0.1", False, False)),
        (SLURM | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}, None),  # salloc, a shell
        ({k: v for k, v in SLURM.items() if "STEP" not in k}, None),  # a batch script
        (SLURM | {"SLURM_PROCID": "2"}, None),
        (SLURM | {"SLURM_STEP_NUM_TASKS": "two"}, None),
        (OPEN_MPI, (4, 3, "10.96.0.1", True, False)),
        (OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "4"}, (4, 3, "127.0.0.1", False, False)),
        (
            OPEN_MPI | {"OMPI_MCA_orte_hnp_uri": "13.0;tcp6://[fe80::1,2620::2]:43370"},
            (4, 3, "fe80::1", True, False),
        ),
        (
            {k: v for k, v in OPEN_MPI.items() if "hnp" not in k} | {"PMIX_NAMESPACE": "p@1"},
            (4, 3, None, True, False),  # Open MPI 5 does not say where mpirun is
        ),
        (SLURM | OPEN_MPI, (4, 3, "10.96.0.1", True, False)),
        (TPU, (2, 1, "t-0.svc", True, True)),
        (
            TPU | {"TPU_PROCESS_ADDRESSES": "10.0.0.7:8471,10.0.0.8:8471"},
            (2, 1, "10.0.0.7", *[True] * 2),
        ),
        (TPU | {"TPU_WORKER_HOSTNAMES": "localhost", "TPU_WORKER_ID": "0"}, None),
        (TPU | {"MEGASCALE_NUM_SLICES": "2"}, None),
        ({"TPU_WORKER_ID": "0"}, None),
        (JAX, (2, 0, "10.0.0.1", True, True)),
        (JAX | SLURM, (2, 0, "10.0.0.1", True, True)),
        ({"JAX_COORDINATOR_ADDRESS": "10.0.0.1:9000"}, None),
    ],
)
def test_a_place_is_what_the_variables_say(environ: Any, expected: Any) -> None:
    assert place(environ) == expected


def test_all_processes_of_a_start_choose_one_port() -> None:
    starts = (
        [SLURM | {"SLURM_PROCID": one} for one in "01"],
        [SLURM | {"SLURM_PROCID": one, "SLURM_STEP_ID": "1"} for one in "01"],
        [OPEN_MPI | {"OMPI_COMM_WORLD_RANK": one} for one in "0123"],
        [TPU | {"TPU_WORKER_ID": one} for one in "01"],
    )
    ports = []
    for start in starts:
        found = {place.coordinator for one in start if (place := launched(one)) is not None}
        (address,) = found
        assert address is not None
        ports.append(address_of(address)[1])
    assert len({*ports}) == len(starts), "another start has another one"
