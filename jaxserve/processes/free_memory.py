"""The memory that the system, its cgroups and the limits of a process leave."""

from __future__ import annotations

from pathlib import Path, PurePosixPath


def available_bytes(root: Path = Path("/"), *, reserve: float = 0.0) -> int | None:
    """Bytes that can be had without swapping; None where the system does not say (no /proc).

    Page cache counts as free, of the host as of a cgroup: it is dropped when memory is wanted.

    Args:
        root: of the file system, for tests.
        reserve: share of the host's memory, and of each limit, that is left alone: what is left may
            be less than nothing.
    """
    meminfo = _numbers(root / "proc/meminfo")
    host = meminfo.get("MemAvailable:")
    if host is None:
        return None
    kept = int(reserve * meminfo.get("MemTotal:", 0)) * 1024
    return min(
        [host * 1024 - kept, *_left_of_cgroups(root, reserve), *left_of_process(root, reserve)]
    )


def _left_of_cgroups(root: Path, reserve: float) -> list[int]:
    """What each limit of the process's cgroups and of those above them leaves."""
    left = []
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:  # version 2
            base, limit, usage, prefix = "", "memory.max", "memory.current", ""
        elif "memory" in controllers.split(","):
            base, limit = "memory", "memory.limit_in_bytes"
            usage, prefix = "memory.usage_in_bytes", "total_"
        else:
            continue
        # in a container the path may be the host's, of which only the root is there
        group = PurePosixPath(path.lstrip("/"))
        for place in {group, *group.parents}:
            folder = root / "sys/fs/cgroup" / base / place
            most, used = _text(folder / limit).strip(), _text(folder / usage).strip()
            if most.isdigit() and used.isdigit():
                stat = _numbers(folder / "memory.stat")
                pages = (f"{prefix}inactive_file", f"{prefix}active_file")  # as of MemAvailable
                reclaimable = sum(stat.get(name, 0) for name in pages)
                free = max(0, int(most) - int(used) + reclaimable)
                left.append(free - int(reserve * int(most)))
    return left


def left_of_process(root: Path, reserve: float) -> list[int]:
    """What the process's own limits (`ulimit -v`, `ulimit -d`) leave of addresses."""
    held = _numbers(root / "proc/self/status")  # kB
    left = []
    for line in _text(root / "proc/self/limits").splitlines():
        for name, used in (("Max address space", "VmSize:"), ("Max data size", "VmData:")):
            if not line.startswith(name):
                continue
            soft = line.removeprefix(name).split()[0]
            if soft.isdigit():
                left.append(int(soft) - 1024 * held.get(used, 0) - int(reserve * int(soft)))
    return left


def _numbers(file: Path) -> dict[str, int]:
    """Lines of a name and a number."""
    words = [line.split() for line in _text(file).splitlines()]
    return {line[0]: int(line[1]) for line in words if len(line) > 1 and line[1].isdigit()}


def _text(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        return ""
