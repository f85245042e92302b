"""Sections that fail in every way in which a GPU makes a process fail, and the process for them."""

from __future__ import annotations

import os
import time

import jax

from benchmarks.gpu import worker
from benchmarks.gpu.sections import Several, Single
from benchmarks.gpu.setting import Section
from benchmarks.isolated import serve


def raises(setting):
    raise jax.errors.JaxRuntimeError("CUDA_ERROR_ILLEGAL_ADDRESS")


def hangs(setting):
    time.sleep(600)


def cases(setting):
    return ["a 1", "b 1", "a 2", "b 2", "a 3", "b 3"]


def run(setting, case):
    if case.startswith("b"):
        os.abort()
    setting.shared[case] = 1.0
    return Section(columns=("case",), rows=[(case,)])


def last(setting):
    return Section(columns=("process", "shared"), rows=[(os.getpid(), sorted(setting.shared))])


SECTIONS = {
    "raises": Single(raises, 1),
    "aborts": Several(cases, run, 1, group=lambda case: case[0]),
    "hangs": Single(hangs, 1, 1),
    "last": Single(last, 1),
}

if __name__ == "__main__":
    worker.SECTIONS = SECTIONS
    serve(worker.answer, poisonous=(jax.errors.JaxRuntimeError,))
