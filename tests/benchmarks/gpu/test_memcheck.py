"""The section under compute-sanitizer, with a tool that is a shell script."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from benchmarks.gpu import memcheck
from benchmarks.gpu.setting import bare_setting


@pytest.fixture
def tool(tmp_path, monkeypatch):
    def make(script):
        path = tmp_path / memcheck.TOOL
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")

    return make


def run(seconds=60.0, dry_run=True):
    return memcheck.memcheck(bare_setting(dry_run, {}, seconds), "decode")


def test_the_tool_runs_our_program_with_every_buffer_an_allocation_of_its_own(tool, tmp_path):
    tool(f'echo "$@" > {tmp_path}/arguments; env > {tmp_path}/environment')
    section = run()
    assert section.rows == [("decode", str(tmp_path / memcheck.TOOL), "no error")]
    arguments = (tmp_path / "arguments").read_text()
    assert arguments.startswith("--tool memcheck --report-api-errors no --error-exitcode 99 ")
    assert "-m benchmarks.gpu.memcheck decode --dry-run" in arguments
    assert "XLA_PYTHON_CLIENT_ALLOCATOR=platform" in (tmp_path / "environment").read_text()


def test_what_it_finds_is_a_failure(tool):
    tool("echo Invalid __global__ read of size 16; exit 99")
    section = run()
    assert section.failures == ["decode: MEMORY ERRORS: Invalid __global__ read of size 16"]


def test_a_tool_that_refuses_the_device_has_found_nothing(tool, tmp_path):
    tool("echo starting; echo '=== Device not supported'; echo; exit 1")
    section = run()
    assert not section.failures
    told = "NOT RUN: exit status 1: === Device not supported"
    assert section.rows == [("decode", str(tmp_path / memcheck.TOOL), told)]


def test_without_a_tool_a_dry_run_tells_what_is_wrong(monkeypatch):
    monkeypatch.setattr(memcheck, "find_tool", lambda: None)
    monkeypatch.setattr(memcheck.sys, "executable", "false")
    assert run().failures == ["decode: exit status 1: "]


@pytest.mark.slow
def test_a_program_that_hangs_ends_with_its_children(tool, tmp_path):
    tool(f"sleep 600 & echo $! > {tmp_path}/child; wait")
    section = run(seconds=2.0)
    assert not section.failures and section.rows[0][2] == "NOT RUN: no end in time: no output"
    child = int((tmp_path / "child").read_text())
    deadline = time.monotonic() + 30
    while os.path.exists(f"/proc/{child}") and time.monotonic() < deadline:
        if Path(f"/proc/{child}/stat").read_text().split()[2] == "Z":
            break  # nobody has waited for it yet
        time.sleep(0.1)
    else:
        assert not os.path.exists(f"/proc/{child}")


def test_where_the_tool_is_absent_the_row_says_so(monkeypatch):
    monkeypatch.setattr(memcheck, "find_tool", lambda: None)
    section = run(dry_run=False)
    assert section.rows == [("decode", memcheck.TOOL, "NOT RUN: it is not on this machine")]
    assert not section.failures


def test_the_program_itself_passes_and_fails(monkeypatch, capsys):
    assert memcheck.main(["decode", "--dry-run"]) == 0
    monkeypatch.setattr("tests.pallas_kernels.oracle.relative_error", lambda got, want: 0.5)
    assert memcheck.main(["decode", "--dry-run"]) == 1
    assert "error 0.5" in capsys.readouterr().out
