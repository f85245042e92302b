"""What a step takes and gives: typed arrays, each side one flat int32 array of derived layout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.execution.features import KINDS, Facts, Feature
from jaxserve.execution.features.mask import WORD
from jaxserve.execution.layout import Layout, RowTable, array
from jaxserve.execution.shapes import StepShape


@dataclass(frozen=True, slots=True)
class StepInputs:
    """The blob's own fields: R sampling rows, C region tokens, N lanes, U updates, M special rows.

    Attributes:
        slot: int32[R] row of the device state; `max_num_seqs` (the trash row) where unused.
        position: int32[R] position of the last computed token; the sampled one follows it.
        prompt_len: int32[R] tokens of the row's prompt.
        updates: int32[3, U] page-table entries (slot, index, page) to write first.
        token, token_lane, token_position: int32[C] the region; unused tokens have lane N.
        lane_start, lane_length, lane_context: int32[N] see `pallas_kernels.PrefillLanes`.
        special: int32[M] rows that the costly features work on; R where unused.
        wanted: int32[F] by place in `features.KINDS`: 1 where a row or chunk needs the feature.
    """

    slot: Any = array("R")
    position: Any = array("R")
    prompt_len: Any = array("R")
    updates: Any = array(3, "U")
    token: Any = array("C")
    token_lane: Any = array("C")
    token_position: Any = array("C")
    lane_start: Any = array("N")
    lane_length: Any = array("N")
    lane_context: Any = array("N")
    special: Any = array("M")
    wanted: Any = array(len(KINDS))


@dataclass(frozen=True, slots=True)
class StepOutputs:
    """The result's own fields: token int32[R], the sampled tokens."""

    token: Any = array("R")


class Blob(NamedTuple):
    """A step's input as NumPy views or as traced arrays.

    Attributes:
        step: the blob's own fields.
        rows: int32[R, width] the features' row values, see `BlobLayout.row_table`.
        features: the inputs of each feature that has some, by its name.
    """

    step: StepInputs
    rows: Any
    features: dict[str, Any]


class Result(NamedTuple):
    """A step's result: its own fields, and the outputs of each feature that has some, by name."""

    step: StepOutputs
    features: dict[str, Any]


def contained(features: Sequence[Feature], shape: StepShape) -> list[Feature]:
    """The features of a program, in their order."""
    return [feature for feature in features if feature.name in shape.features]


class BlobLayout:
    """Where everything lies in the blob of one program."""

    def __init__(self, shape: StepShape, features: Sequence[Feature], facts: Facts, page_size: int):
        self.shape = shape
        self.facts = facts
        self.page_size = page_size
        # most page-table entries that a step can touch: one a decode row, the pages of all chunks
        updates = shape.num_decode + shape.num_prefill // page_size + 2 * shape.num_lanes
        sizes = _sizes(shape, facts) | {"U": updates, "W": -(-facts.vocab_size // WORD)}
        self._step = Layout(StepInputs, sizes)
        self.row_table = RowTable({f.name: f.row for f in contained(features, shape) if f.row})
        self._rows_at = self._step.end
        end = self._rows_at + shape.num_rows * self.row_table.width
        self._features: dict[str, Layout[Any]] = {}
        for feature in contained(features, shape):
            if feature.inputs is not None:
                self._features[feature.name] = Layout(feature.inputs, sizes, end)
                end = self._features[feature.name].end
        self.size = end

    def _row_part(self, flat: Any) -> Any:
        end = self._rows_at + self.shape.num_rows * self.row_table.width
        return flat[self._rows_at : end].reshape(self.shape.num_rows, self.row_table.width)

    def views(self, flat: np.ndarray) -> Blob:
        """Writable views of a NumPy blob."""
        features = {name: layout.views(flat) for name, layout in self._features.items()}
        return Blob(self._step.views(flat), self._row_part(flat), features)

    def read(self, flat: jax.Array) -> Blob:
        """The arrays of a blob inside a traced step."""
        features = {name: layout.read(flat) for name, layout in self._features.items()}
        return Blob(self._step.read(flat), self._row_part(flat), features)


class ResultLayout:
    """Where everything lies in the result of one program."""

    def __init__(self, shape: StepShape, features: Sequence[Feature], facts: Facts):
        self.shape = shape
        sizes = _sizes(shape, facts)
        self._step = Layout(StepOutputs, sizes)
        self._features: dict[str, Layout[Any]] = {}
        end = self._step.end
        for feature in contained(features, shape):
            if feature.outputs is not None:
                self._features[feature.name] = Layout(feature.outputs, sizes, end)
                end = self._features[feature.name].end
        self.size = end

    def write(self, result: Result) -> jax.Array:
        """Concatenate traced arrays into the flat result."""
        parts = self._step.parts(result.step)
        for name, layout in self._features.items():
            parts += layout.parts(result.features[name])
        return jnp.concatenate(parts)

    def views(self, flat: np.ndarray) -> Result:
        """The arrays of a fetched result."""
        features = {name: layout.views(flat) for name, layout in self._features.items()}
        return Result(self._step.views(flat), features)


def _sizes(shape: StepShape, facts: Facts) -> dict[str, int]:
    return {
        "R": shape.num_rows,
        "C": shape.num_prefill,
        "N": shape.num_lanes,
        "M": shape.num_special,
        "K": facts.num_logprobs,
    }
