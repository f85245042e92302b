"""A backend is added by the file of its record and its name in one list."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import pallas_kernels
from pallas_kernels.backends import BACKENDS, NAMES, OPERATIONS

ROOT = Path(__file__).parents[2]
RECORD = '''
"""Fake: writes pages as plain XLA does, says so, and takes pages of 16 tokens only."""

from dataclasses import dataclass

from pallas_kernels.backends.record import CPU, Backend, Implementation, Tuning
from pallas_kernels.errors import KernelError


@dataclass(frozen=True, slots=True)
class FakeTuning(Tuning):
    stages: int = 2


def covers(shape):
    if shape.page_size not in (None, 16):
        return KernelError("page_size", shape.page_size, "16 tokens")
    return None


BACKEND = Backend(
    "fake",
    (
        Implementation("write_kv", "backends.fake", covers, (CPU,)),
        Implementation(
            "decode", "backends.fake", covers, (CPU,), True, FakeTuning, instruction="fake.mma",
        ),
    ),
)


def write(*operands):
    print("fake wrote")
    from pallas_kernels.write_kv import xla

    return xla.write(*operands)


def decode(q, kv_pages, page_table, kv_lens, options, *, splits, tuning, interpret):
    print("fake decoded with", splits, tuning, interpret)
    return q
'''
USE = """
import jax.numpy as jnp
import pallas_kernels
from pallas_kernels import AttentionShape, KernelError, choose_backends, require_backend
from pallas_kernels.backends.fake import FakeTuning
from benchmarks.verify.prove.cases import Attention, cases_of
from benchmarks.verify.prove.lists import ProofCase, Proved

backends = choose_backends("cpu", "cpu", AttentionShape(page_size=16))
assert (backends.decode, backends.write_kv) == ("fake", "fake"), backends
assert "page_size=8" in choose_backends("cpu", "cpu", AttentionShape(page_size=8)).reason
require_backend("decode", "fake", "cpu", "cpu", AttentionShape(page_size=16))
one, two = jnp.ones((1, 2, 8)), jnp.zeros((2, 16, 2, 2, 8))
place = jnp.ones((1,), jnp.int32)
pool = pallas_kernels.write_kv(two, one, one, place, place, **backends.write_options)
assert pool.sum() == 2 * 16
table = jnp.ones((1, 1), jnp.int32)
tuned = backends.decode_options | {"tuning": FakeTuning(3)}
pallas_kernels.paged_decode_attention(one, pool, table, place, scale=1.0, splits=4, **tuned)
try:
    lanes = (place,) * 3
    pallas_kernels.paged_prefill_attention(one, pool, table, lanes, scale=1.0, backend="fake")
except KernelError as error:
    assert "one of mosaic_gpu" in str(error), error
(case,) = cases_of(Proved("decode", "fake", ("h200",), (ProofCase(Attention(3)),)))
assert (case.operation, case.requires, case.own) == ("decode", "fake.mma", True)
"""


def test_the_list_names_the_files_of_the_folder() -> None:
    folder = Path(pallas_kernels.__file__).parent / "backends"
    files = {path.stem for path in folder.glob("*.py")}
    assert set(NAMES) == files - {"__init__", "record"}
    assert [backend.name for backend in BACKENDS] == list(NAMES)


@pytest.mark.parametrize("operation", OPERATIONS)
def test_what_is_chosen_on_every_device_takes_every_problem(operation: str) -> None:
    fused = ("decode_and_write", "rotate_and_write", "residual_norm", "finish_rows")
    if operation not in (*fused, "grouped_linear", "rotary"):
        last = [one for one in OPERATIONS[operation].values() if one.runs][-1]
        assert last.backend == "xla" and last.covers(None) is None
    for one in OPERATIONS[operation].values():
        assert one.interprets or one.tuning is None, one


@pytest.mark.slow
def test_a_backend_is_one_file_and_one_name(tmp_path: Path) -> None:
    package = tmp_path / "pallas_kernels"
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(Path(pallas_kernels.__file__).parent, package, ignore=ignored)
    (package / "backends" / "fake.py").write_text(RECORD)
    names = package / "backends" / "__init__.py"
    names.write_text(names.read_text().replace("NAMES = (", 'NAMES = ("fake", '))
    path = os.pathsep.join(map(str, (tmp_path, ROOT)))
    done = subprocess.run(
        [sys.executable, "-c", USE],
        env=os.environ | {"PYTHONPATH": path, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert "fake wrote" in done.stdout and "fake decoded with 4 FakeTuning(stages=3)" in done.stdout
