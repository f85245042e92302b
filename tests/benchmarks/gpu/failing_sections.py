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


def names(setting):
    return ["1", "hangs", "3"]


def sleeps(setting, case):
    if case == "hangs":
        time.sleep(600)
    return Section(columns=("case", "process"), rows=[(case, os.getpid())])


def last(setting):
    return Section(columns=("process", "shared"), rows=[(os.getpid(), sorted(setting.shared))])


SECTIONS = {
    "raises": Single(raises, "A"),
    "aborts": Several(cases, run, "A", group=lambda case: case[0]),
    "hangs": Single(hangs, "A", 1),
    "hanging case": Several(names, sleeps, "A", 3, group=str),
    "last": Single(last, "A"),
}

if __name__ == "__main__":
    worker.SECTIONS = SECTIONS
    serve(worker.Answers(), poisonous=(jax.errors.JaxRuntimeError,))
