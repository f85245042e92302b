"""The digest of static values: the same for the same meaning, refused where that is not known."""

from __future__ import annotations

import functools
import subprocess
import sys
import threading
from dataclasses import dataclass, replace
from types import MappingProxyType

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.execution.features import make_features
from jaxserve.execution.inputs import BlobLayout
from jaxserve.execution.shapes import StepShape
from jaxserve.execution.static_digest import UnknownValueError, digest
from jaxserve.models.linear import LinearForm
from pallas_kernels.kept_threshold import kept_threshold
from pallas_kernels.paged_attention.options import Scores
from tests.jaxserve.execution.engine_facts import FACTS

SHAPE = StepShape(4, 16, 1, frozenset({"sampling", "bias", "mask"}), 2, 1)
VALUES = {
    "shape": SHAPE,
    "another number": replace(SHAPE, num_decode=5),
    "another set": replace(SHAPE, features=frozenset({"sampling", "bias"})),
    "scores": Scores(1.0, None, 3),
    "a tuple": (1.0, None, 3),
    "a list": [1.0, None, 3],
    "another window": Scores(1.0, None, 4),
    "true": True,
    "one": 1,
    "text": "1",
    "bytes": b"1",
    "array": np.arange(2000.0),
    "another element": np.arange(2000.0) + (np.arange(2000) == 1000),
    "another type": np.arange(2000.0, dtype=np.float32),
    "on a device": jnp.arange(2000.0),
    "dtype": jnp.dtype("bfloat16"),
    "class": LinearForm,
    "another class": BlobLayout,
    "partial": functools.partial(kept_threshold, backend="xla"),
    "another backend": functools.partial(kept_threshold, backend="triton"),
    "mapping": MappingProxyType({"a": 1, "b": (2, 3)}),
    "dict": {"a": 1, "b": (2, 3)},
    "another order": {"b": (2, 3), "a": 1},
    "tree": jax.tree.structure({"a": 1, "b": (2, 3)}),
    "another tree": jax.tree.structure({"a": 1, "b": [2, 3]}),
}


def test_the_features_that_come_along_have_a_digest() -> None:
    features = [make_features(FACTS, lambda setting: True) for _ in range(2)]
    assert digest(features[0]) == digest(features[1])


def test_values_of_other_meanings_have_other_digests():
    found = {name: digest(value) for name, value in VALUES.items()}
    assert len(set(found.values())) == len(VALUES)


def test_equal_values_have_one_digest_whoever_made_them():
    again = StepShape(2 + 2, 16, 1, frozenset(["mask", "bias", "sampling"]), 2, 1)
    assert digest(again) == digest(SHAPE)
    assert digest([np.arange(3), np.arange(3)]) == digest([np.arange(3), np.arange(3)])


@pytest.mark.slow
def test_another_process_finds_the_same():
    code = (
        "from jaxserve.execution.shapes import StepShape\n"
        "from jaxserve.execution.static_digest import digest\n"
        "names = frozenset({'sampling', 'bias', 'mask'})\n"
        "print(digest(StepShape(4, 16, 1, names, 2, 1)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == digest(SHAPE)


@dataclass(frozen=True)
class Foreign:
    """A class of a package whose sources nobody digests."""

    size: int = 1


class HalfSeen:
    """Of this project by its module, and with a part that `vars` does not show."""

    __slots__ = ("__dict__", "hidden")
    __module__ = "jaxserve.tests"


@pytest.mark.parametrize(
    "value",
    [
        HalfSeen(),
        lambda x: x,
        Foreign(),
        Foreign,
        threading.Lock(),
        object(),
        {"a": (1, Foreign())},
    ],
    ids=["slots", "closure", "foreign value", "foreign class", "lock", "object", "inside"],
)
def test_what_is_not_known_is_refused(value):
    with pytest.raises(UnknownValueError, match="value"):
        digest(value)
