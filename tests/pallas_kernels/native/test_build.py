"""The build: cached by what it depends on, explicit about what is missing, right on other CPUs."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pallas_kernels import KernelError, native
from pallas_kernels.native import build, library, own_folder
from tests.pallas_kernels.native import emulated_unit
from tests.pallas_kernels.native.requirements import require_native

ROOT = Path(__file__).parents[3]
FLAGS = {
    "AVX2": ("-mno-avx512f", "-mno-avx512bf16", "-mno-avx512vnni"),
    "portable": ("-march=x86-64",),
    "an emulated matrix unit": emulated_unit.FLAGS,
}


def fake_compiler(folder: Path, body: str) -> None:
    script = folder / "c++"
    script.write_text(f"#!/bin/sh\n{body}\n")
    script.chmod(0o755)


@pytest.fixture
def empty(tmp_path, monkeypatch):
    """An empty cache folder, and a PATH that holds only what a test puts there."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}")
    (tmp_path / "bin").mkdir()
    return tmp_path


def test_without_a_compiler_the_reason_says_so(empty):
    with pytest.raises(build.BuildError, match=r"no C\+\+ compiler .* is on PATH"):
        build.build()


def test_a_failing_compiler_is_quoted(empty):
    body = (
        'case "$1" in --version) echo 1;; *) echo "x.cc:1: error: no such thing" >&2; exit 1;; esac'
    )
    fake_compiler(empty / "bin", body)
    with pytest.raises(build.BuildError, match=r"exit status 1: x\.cc:1: error: no such thing"):
        build.build()
    native = empty / "cache/jaxserve/native"
    assert [one.name for one in native.iterdir()] == [own_folder.MARKER]


def test_a_built_library_is_reused_and_named_by_what_it_depends_on(empty, monkeypatch):
    # stands in for a compiler: writes its output file and a line into a log
    log = empty / "log"
    body = (
        f'if [ "$1" = --version ]; then echo "$VERSION"; exit; fi\necho run >> {log}\n'
        'while [ "$1" != -o ]; do shift; done\necho built > "$2"'
    )
    fake_compiler(empty / "bin", body)
    monkeypatch.setenv("VERSION", "one")
    first = build.build()
    runs = log.read_text().count("run")
    assert runs == len(list(build.SOURCES.glob("*.cc"))) + 1
    assert build.build() == first
    assert log.read_text().count("run") == runs
    monkeypatch.setenv("VERSION", "two")
    paths = {first, build.build(), build.build(("-DOTHER",))}
    monkeypatch.setattr(build, "cpu_features", lambda: frozenset({"another"}))
    assert len({*paths, build.build()}) == 4


def test_an_unwritable_cache_is_a_reason(empty, monkeypatch):
    fake_compiler(empty / "bin", "echo 1")
    (empty / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(empty / "file"))
    with pytest.raises(build.BuildError, match=r"cache folder .* cannot be used"):
        build.build()


def test_a_torn_library_is_built_anew(tmp_path, monkeypatch):
    torn = tmp_path / "jaxserve.so"
    torn.write_bytes(b"\x7fELF")
    built = []

    def fake_build():
        if not torn.exists():
            built.append(torn)
        return torn

    def fake_load(path):
        if not built:
            ctypes.CDLL(str(path))  # what a torn file does

    monkeypatch.setattr(build, "build", fake_build)
    monkeypatch.setattr(library, "load", fake_load)
    assert library.availability.__wrapped__().available
    assert built == [torn]


def test_missing_kernels_are_told(monkeypatch, caplog):
    def fail():
        raise build.BuildError("No space left on device")

    monkeypatch.setattr(build, "build", fail)
    state = library.availability.__wrapped__()
    assert state == native.Availability(False, "No space left on device")
    assert "No space left on device" in caplog.text


def test_require_names_the_reason(monkeypatch):
    state = native.Availability(False, "no C++ compiler is on PATH")
    monkeypatch.setattr(library, "availability", lambda: state)
    with pytest.raises(KernelError, match=r"because no C\+\+ compiler is on PATH"):
        library.require()


@pytest.mark.slow
@pytest.mark.parametrize("flags", FLAGS)
def test_kernels_are_right_on_other_cpus(flags):
    """The kernels' own tests, in a process that loads a library built for another CPU."""
    require_native()
    if "x86" not in os.uname().machine:
        pytest.skip("the flags are those of x86 compilers")
    code = (
        "import sys, pytest; from pallas_kernels.native import build, library; "
        "real = build.build; "
        f"build.build = lambda: real({FLAGS[flags]!r}); "
        "sys.exit(pytest.main(['tests/pallas_kernels/linear/test_native.py', "
        "'tests/pallas_kernels/linear/test_native_groups.py', "
        "'tests/pallas_kernels/linear/test_row_invariance.py', "
        "'tests/pallas_kernels/rotary/test_rotary.py', "
        "'tests/pallas_kernels/paged_attention/test_native.py', "
        "'-k', 'against_float64 or largest or live or beside or ragged or products or stands']))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "instructions"),
    [
        ("linear.cc", ("tdpbf16ps", "tdpbusd")),
        ("linear_in_groups.cc", ("tdpbf16ps", "tdpbsud")),
        ("paged_attention.cc", ("tdpbf16ps",)),
    ],
)
def test_kernels_compile_for_a_matrix_unit(source, instructions, tmp_path):
    """To its own instructions, also on a machine without one."""
    require_native()
    if "x86" not in os.uname().machine:
        pytest.skip("the flags are those of x86 compilers")
    wide = ("-march=x86-64-v4", "-mavx512bf16", "-mavx512vnni", "-mavx512vbmi")
    unit = ("-mamx-tile", "-mamx-bf16", "-mamx-int8")
    output = tmp_path / "kernel.s"
    command = [str(build.find_compiler()), *build.FLAGS, *wide, *unit, "-O1", "-S"]
    subprocess.run([*command, str(build.SOURCES / source), "-o", str(output)], check=True)
    text = output.read_text()
    for instruction in ("ldtilecfg", "tileloadd", "tilestored", *instructions):
        assert instruction in text
    assert "transpose16" not in text  # its 16 vectors stay in registers
    assert "vinserti64x4" not in text  # half words are widened by one instruction
