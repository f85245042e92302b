"""The free memory of a host and its cgroups, and the sum that is refused."""

from __future__ import annotations

import mmap
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.config.engine_config import EngineConfig
from jaxserve.errors import ValidationError
from jaxserve.execution import host_memory
from jaxserve.execution.host_memory import (
    RESERVE_BYTES,
    check_limits,
    forget_zeros,
    host_pool_bytes,
    share_of_host,
)
from jaxserve.execution.memory_plan import DEFAULT_HOST_CACHE_BYTES, Demand
from jaxserve.processes.free_memory import available_bytes

GB = 10**9
MEMINFO = "MemTotal:       24000000 kB\nMemFree:  1 kB\nMemAvailable:   20000000 kB\n"
HOST = 20_000_000 * 1024


def files(root: Path, contents: dict[str, object]) -> Path:
    for name, content in contents.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(str(content))
    return root


def test_the_host_alone(tmp_path: Path) -> None:
    assert available_bytes(tmp_path) is None
    assert available_bytes(files(tmp_path, {"proc/meminfo": MEMINFO})) == HOST


def test_a_limit_of_cgroup_v2_anywhere_above(tmp_path: Path) -> None:
    base = "sys/fs/cgroup/a"
    contents = {
        "proc/meminfo": MEMINFO,
        "proc/self/cgroup": "0::/a/b\n",
        f"{base}/b/memory.max": "max\n",
        f"{base}/b/memory.current": 1 * GB,
        f"{base}/memory.max": 8 * GB,
        f"{base}/memory.current": 5 * GB,
        f"{base}/memory.stat": f"anon 1\ninactive_file {GB}\nactive_file {GB}\n",
    }
    assert available_bytes(files(tmp_path, contents)) == (8 - 5 + 2) * GB
    assert available_bytes(files(tmp_path, {f"{base}/memory.max": 100 * GB})) == HOST


def test_a_reserve_is_a_share_of_each_limit(tmp_path: Path) -> None:
    base = "sys/fs/cgroup/a"
    root = files(tmp_path, {"proc/meminfo": MEMINFO, "proc/self/cgroup": "0::/a\n"})
    assert available_bytes(root, reserve=0.5) == HOST - 12_000_000 * 1024
    files(tmp_path, {f"{base}/memory.max": 8 * GB, f"{base}/memory.current": 5 * GB})
    assert available_bytes(root, reserve=0.25) == (8 - 5 - 2) * GB
    assert available_bytes(root, reserve=0.5) == (8 - 5 - 4) * GB, "less than nothing is left"


def test_engines_that_load_at_once_have_equal_parts(monkeypatch) -> None:
    monkeypatch.setattr(host_memory, "available_bytes", lambda reserve: int(90 * reserve))
    for engines, part in ((1, 45), (2, 22), (4, 11)):
        asked = EngineConfig(model="m", data_parallel_size=engines, memory_reserve=0.5)
        assert share_of_host(asked) == part
    monkeypatch.setattr(host_memory, "available_bytes", lambda reserve: None)
    assert share_of_host(EngineConfig(model="m", data_parallel_size=2)) is None
    asked = EngineConfig(model="m", data_parallel_size=2)
    with pytest.raises(ValidationError, match=r"available here to each of 2 engines"):
        host_pool_bytes(5, Demand(1, 1, 1, 1), 1, 1, 2, asked)


def test_a_limit_of_cgroup_v1_in_a_container(tmp_path: Path) -> None:
    base = "sys/fs/cgroup/memory"  # the container's own group; its path is the host's
    contents = {
        "proc/meminfo": MEMINFO,
        "proc/self/cgroup": "9:cpu:/\n4:hugetlb,memory:/docker/123\n0::/\n",
        f"{base}/memory.limit_in_bytes": 4 * GB,
        f"{base}/memory.usage_in_bytes": 1 * GB,
        f"{base}/memory.stat": f"inactive_file 5\n"
        f"total_inactive_file {GB // 4}\ntotal_active_file {GB // 4}\n",
    }
    assert available_bytes(files(tmp_path, contents)) == 7 * GB // 2


def test_limits_of_the_process(tmp_path: Path) -> None:
    head = "Limit                     Soft Limit           Hard Limit           Units     \n"
    free = "Max address space         unlimited            unlimited            bytes     \n"
    contents = {
        "proc/meminfo": MEMINFO,
        "proc/self/status": f"VmSize:\t {3 * GB // 1024} kB\nVmData:\t {GB // 1024} kB\n",
        "proc/self/limits": head + free,
    }
    root = files(tmp_path, contents)
    assert available_bytes(root) == HOST
    limited = f"Max address space         {8 * GB}           unlimited            bytes     \n"
    files(tmp_path, {"proc/self/limits": head + limited})
    assert available_bytes(root) == pytest.approx(5 * GB, abs=1024)
    assert available_bytes(root, reserve=0.25) == pytest.approx(3 * GB, abs=1024)
    check_limits(root)
    data = f"Max data size             {2 * GB}           {2 * GB}           bytes     \n"
    files(tmp_path, {"proc/self/limits": head + limited + data})
    assert available_bytes(root) == pytest.approx(1 * GB, abs=1024)
    with pytest.raises(ValidationError, match=r"ulimit='1\.00 GB' .* leaves 1\.07 GB"):
        check_limits(root)


DEMAND = Demand(weights=16 * GB, tables=GB // 10, transfers=GB // 10, temporaries=GB // 10)
HELD = sum(DEMAND) + RESERVE_BYTES


def pool(available: int, devices: int = 1, most: int = 8 * GB, **settings: object) -> int:
    config = EngineConfig(model="m", **settings)  # type: ignore[arg-type]
    return host_pool_bytes(available, DEMAND, devices, 1000, most, config)


def test_pages_get_what_is_left_over() -> None:
    assert pool(HELD + 20 * GB) == DEFAULT_HOST_CACHE_BYTES
    assert pool(HELD + 3 * GB) == 3 * GB
    assert pool(HELD + 20 * GB, most=GB) == GB
    assert pool(2 * HELD + 3 * GB, devices=2) == (3 * GB + RESERVE_BYTES) // 2
    assert pool(HELD + 1000) == 1000


def test_the_sum_that_does_not_fit_is_told_with_the_setting_that_helps() -> None:
    with pytest.raises(ValidationError) as caught:
        pool(15 * GB)
    assert caught.value.field == "model"
    for part in (
        "17.37 GB of memory are needed and 15.00 GB are available",
        "weights 16.00 GB",
        "KV cache 0.00 GB",
        "temporaries and tables 0.30 GB",
        "reserve 1.07 GB",
        "quantization to int8",
    ):
        assert part in str(caught.value)
    with pytest.raises(ValidationError) as caught:
        pool(15 * GB, quantization="int8")
    assert "int8" not in str(caught.value)
    with pytest.raises(ValidationError, match=r"kv_cache_memory_bytes=5000000000.*lower it"):
        pool(HELD + 4 * GB, kv_cache_memory_bytes=5 * GB)
    with pytest.raises(ValidationError, match=r"num_pages=7.*KV cache 8\.00 GB"):
        pool(HELD + 4 * GB, num_pages=7)
    with pytest.raises(ValidationError, match="model='m'"):
        pool(HELD, kv_cache_memory_bytes=5 * GB)


@pytest.mark.skipif(sys.platform != "linux", reason="madvise is Linux's")
def test_zeros_are_forgotten_and_still_zeros():
    pages = jax.block_until_ready(jax.jit(lambda: jnp.zeros((1 << 22) + 3, jnp.float32))())
    small = jnp.zeros(5)
    before = resident_bytes()
    taken = forget_zeros([pages, small])
    assert pages.nbytes - 2 * mmap.PAGESIZE <= taken <= pages.nbytes
    assert before - resident_bytes() > pages.nbytes // 2
    assert not np.asarray(pages).any() and not np.asarray(small).any()


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE
