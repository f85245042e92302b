"""Runs the container of a rendered pod in namespaces of this machine, as a kubelet would.

The root is made of this machine's own system folders, Python and checkout, all read-only, in the
place of the image; user, capabilities, memory, volumes, arguments and environment are those of the
pod. The network is the machine's.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.server.server_process import ROOT

TOOLS = ("unshare", "nsenter", "setpriv", "prlimit", "chroot", "mount")
SYSTEM = ("usr", "bin", "sbin", "lib", "lib32", "lib64")
# Run as root in a mount namespace of its own. $1 is an empty folder, and standard input has a mount
# a line: where from, where to below $1, and rw or ro.
BUILD = """
root=$1; shift
mount -t tmpfs -o mode=755 tmpfs "$root"
while read -r from to how; do
  if [ -h "$from" ]; then
    cp -P "$from" "$root$to"
  elif [ -d "$from" ]; then
    mkdir -p "$root$to"
    mount --rbind "$from" "$root$to"
    [ "$how" = rw ] || mount -o remount,bind,ro "$root$to"
  else
    mkdir -p "$(dirname "$root$to")"
    : >"$root$to"
    mount --bind "$from" "$root$to"
  fi
done
mkdir -p "$root/proc"
mount -t proc proc "$root/proc"
mount -o remount,ro "$root"
exec chroot "$root" "$@"
"""
BYTES = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30}
NONE: Mapping[str, Any] = {}


def missing() -> str | None:
    """Why no container can be run here; None: one can."""
    absent = [tool for tool in TOOLS if shutil.which(tool) is None]
    if absent:
        return f"needs {', '.join(absent)} (util-linux, coreutils)"
    if os.geteuid() != 0:
        return "needs root, which makes namespaces and gives its rights away"
    done = subprocess.run(
        ["unshare", "--mount", "--pid", "--fork", "mount", "-t", "tmpfs", "tmpfs", "/mnt"],
        capture_output=True,
        text=True,
    )
    return None if done.returncode == 0 else f"no namespaces here: {done.stderr.strip()}"


class Container:
    """A running container.

    Attributes:
        pid: of its first process, as the machine counts.
        process: what started it; it ends when the container does.
    """

    def __init__(self, process: subprocess.Popen[str]):
        self.process = process
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        while not (found := children.read_text().split()):
            assert process.poll() is None, "the container ended at once"
        self.pid = int(found[0])

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        """Run a command in it, as a hook of its life or `kubectl exec` does."""
        where = ["nsenter", "--target", str(self.pid), "--mount", "--pid", "--root", "--wd"]
        return subprocess.run([*where, *command], capture_output=True, text=True)

    def status(self) -> dict[str, str]:
        """What the kernel says of its first process."""
        lines = Path(f"/proc/{self.pid}/status").read_text().splitlines()
        return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}

    def memory_limit(self) -> int:
        """Bytes of addresses that it may have."""
        lines = Path(f"/proc/{self.pid}/limits").read_text().splitlines()
        (line,) = [line for line in lines if line.startswith("Max address space")]
        return int(line.split()[3])


@contextmanager
def running(
    pod: Mapping[str, Any],
    config_maps: Mapping[str, Mapping[str, str]],
    folder: Path,
    cache: Path | None = None,
    secrets: Mapping[str, Mapping[str, str]] = NONE,
    variables: Mapping[str, str] = NONE,
) -> Iterator[Container]:
    """The one container of a pod, killed at the end.

    Args:
        pod: its spec, rendered.
        config_maps: the files of each by its name.
        folder: an empty one, for the volumes.
        cache: what the volume `cache` holds at first.
        secrets: the values of each by its name.
        variables: what a cluster and its operators tell the container.
    """
    (container,) = pod["containers"]
    user, group = pod["securityContext"]["runAsUser"], pod["securityContext"]["runAsGroup"]
    root = folder / "root"
    root.mkdir()
    mounts = [(f"/{name}", f"/{name}", "ro") for name in SYSTEM if Path(f"/{name}").exists()]
    # a kubelet makes a container's /etc/hosts too
    mounts += [(path, path, "ro") for path in ("/etc/ld.so.cache", "/etc/hosts")]
    # by it Debian names c++, whose name is a part of the kernels' key
    if (alternatives := Path("/etc/alternatives")).is_dir():
        mounts.append((str(alternatives), str(alternatives), "ro"))
    mounts += [("/dev", "/dev", "rw")]
    mounts += [(path, path, "ro") for path in (sys.base_prefix, sys.prefix, str(ROOT))]
    for mount in container["volumeMounts"]:
        (volume,) = [one for one in pod["volumes"] if one["name"] == mount["name"]]
        held = folder / mount["name"]
        held.mkdir()
        if "configMap" in volume:
            for name, text in config_maps[volume["configMap"]["name"]].items():
                (held / name).write_text(text)
        elif "secret" in volume:
            for item in volume["secret"]["items"]:
                text = secrets[volume["secret"]["secretName"]][item["key"]]
                (held / item["path"]).write_text(text)
        else:
            assert "emptyDir" in volume or "persistentVolumeClaim" in volume, volume
            if mount["name"] == "cache" and cache is not None:
                shutil.copytree(cache, held, dirs_exist_ok=True)
            for path in [held, *held.rglob("*")]:
                os.chown(path, user, pod["securityContext"]["fsGroup"])
        mounts.append((str(held), mount["mountPath"], "ro" if mount.get("readOnly") else "rw"))
    security = container["securityContext"]
    assert security["readOnlyRootFilesystem"] and not security["allowPrivilegeEscalation"]
    rights = ["--no-new-privs", "--bounding-set=-all", "--inh-caps=-all", "--clear-groups"]
    environment = {
        "PATH": f"{sys.prefix}/bin:/usr/bin:/bin",  # the image's own: its programs, its home
        "HOME": "/home/jaxserve",
        "PYTHONPATH": str(ROOT),
        "PYTHONUNBUFFERED": "1",
        **{one["name"]: one["value"] for one in container.get("env", []) if "value" in one},
        **variables,
    }
    args = container["args"]
    words = [re.sub(r"\$\((\w+)\)", lambda one: environment[one[1]], word) for word in args]
    command = [
        *["unshare", "--mount", "--pid", "--fork", "--kill-child", "sh", "-euc", BUILD, "sh", root],
        *["prlimit", f"--as={num_bytes(container['resources']['limits']['memory'])}"],
        *["setpriv", f"--reuid={user}", f"--regid={group}", *rights],
        *["env", "-i", *[f"{name}={value}" for name, value in environment.items()]],
        *[ROOT / "deploy" / "docker" / "entrypoint.sh", *words],
    ]
    log = folder / "log"
    with log.open("w") as output:
        process = subprocess.Popen(
            [str(word) for word in command],
            cwd="/",
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            text=True,
        )
    assert process.stdin is not None
    process.stdin.write("".join(f"{' '.join(one)}\n" for one in mounts))
    process.stdin.close()
    try:
        yield Container(process)
    except BaseException:
        print(log.read_text())
        raise
    finally:
        process.kill()
        process.wait()


def num_bytes(quantity: str) -> int:
    """Bytes of a quantity such as 8Gi."""
    return int(quantity[:-2]) * BYTES[quantity[-2:]]
