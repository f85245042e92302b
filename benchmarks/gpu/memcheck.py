"""Section: tiny attention problems under compute-sanitizer, which finds what poisoning cannot.

As a program (`python -m benchmarks.gpu.memcheck decode`) it runs one of the problems.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys

import jax

from benchmarks.cuda_toolkit import candidates, toolkit_environment
from benchmarks.device_run import ROOT
from benchmarks.gpu import correctness
from benchmarks.gpu.setting import Section, Setting, dry_setting, gpu_setting
from benchmarks.isolated import importing_from

TOOL = "compute-sanitizer"
FOUND = 99  # exit status when it found something
PROBLEMS = ("decode", "prefill")
LIMIT_S = 75
TAIL = 600  # characters of the output that a failure quotes
# probing a driver for what it can do is no error; a buffer must be an allocation of its own
OPTIONS = ("--tool", "memcheck", "--report-api-errors", "no", "--error-exitcode", str(FOUND))
ALLOCATOR = {"XLA_PYTHON_CLIENT_ALLOCATOR": "platform", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}


def find_tool() -> str | None:
    """compute-sanitizer on the PATH or in a CUDA toolkit."""
    folders = [os.environ.get("PATH", "")]
    for root in candidates():
        folders += [str(root / "bin"), str(root / TOOL)]
    return shutil.which(TOOL, path=os.pathsep.join(folders))


def cases(setting: Setting) -> list[str]:
    """One of each operation."""
    return list(PROBLEMS)


def memcheck(setting: Setting, case: str) -> Section:
    """One problem under the tool; a dry run goes without it where it is absent.

    Only FOUND is a finding: a tool that refuses the device, or is too slow, has found nothing.
    """
    section = Section(columns=("problem", "tool", "result"))
    tool = find_tool()
    if tool is None and not setting.dry_run:
        section.rows.append((case, TOOL, "NOT RUN: it is not on this machine"))
        return section
    command = [sys.executable, "-m", "benchmarks.gpu.memcheck", case]
    command += ["--dry-run"] if setting.dry_run else []
    if tool is not None:
        command = [tool, *OPTIONS, *command]
    environment = os.environ | importing_from(ROOT) | toolkit_environment() | ALLOCATOR
    process = subprocess.Popen(
        command,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,  # the tool's own child must end with it
    )
    try:
        output, _ = process.communicate(timeout=min(LIMIT_S, setting.seconds_left))
        status: int | None = process.returncode
        ended = f"exit status {status}"
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        status, ended = None, "no end in time"
    told = {0: "no error", FOUND: "MEMORY ERRORS"}.get(status, "")
    failed = status == FOUND or (tool is None and status != 0)
    if failed:
        told = told or ended
        section.failures.append(f"{case}: {told}: {' '.join(output.split())[-TAIL:]}")
    elif not told:
        lines = [line.strip() for line in output.splitlines() if line.strip()]
        told = f"NOT RUN: {ended}: {lines[-1][-TAIL:] if lines else 'no output'}"
    section.rows.append((case, tool or "none, as this is a dry run", told))
    return section


def main(arguments: list[str]) -> int:
    """Runs a problem of PROBLEMS; 1 when its result is wrong."""
    problem, dry_run = arguments[0], "--dry-run" in arguments
    if dry_run:
        jax.config.update("jax_platforms", "cpu")
    setting = (dry_setting if dry_run else gpu_setting)({}, float(LIMIT_S))
    if setting is None:
        print("there is no GPU")
        return 1
    small = correctness.Small("bfloat16", 128, 4, 16, correctness.WHOLE, {})
    check = {"decode": correctness.decode, "prefill": correctness.prefill}[problem]
    found = check(setting, json.dumps(small), chosen=True)
    print(found.rows, *found.failures)
    return 1 if found.failures else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
