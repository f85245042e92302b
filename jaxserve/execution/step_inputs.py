"""What a step takes and gives: typed arrays, each side one flat int32 array of derived layout."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.execution.features import Facts, Feature, of_region
from jaxserve.execution.features.mask import WORD
from jaxserve.execution.layout import Layout, RowTable, array, arrays
from jaxserve.execution.step_shape import StepShape


@arrays
class StepInputs:
    """The blob's own fields: B decode rows, C region tokens, N lanes, M special rows, U updates.

    Attributes:
        slot: int32[B] row of the device state; `max_num_seqs` (the trash row) where unused.
        start: int32[B] 1 + position of the row's first token; 0: where the device knows it ends.
        first: int32[B] 1 + the row's first token; 0: the device knows it.
        length: int32[B] tokens of the row, drafts included; absent (as D) where all have one.
        updates: int32[3, U] page-table entries (slot, place, page) to write first.
        lane_slot: int32[N] likewise.
        lane_start, lane_length, lane_context: int32[N] see `pallas_kernels.PrefillLanes`.
        token, token_lane, token_position: int32[C] the region; unused tokens have lane N.
        prompt_len: int32[B + N] tokens of the prompt, of decode rows and lanes.
        sample_slot: int32[N] slots that sample from the region; the trash row where unused.
        sample_source: int32[N] from which of its tokens.
        special: int32[M] rows that the costly features work on; R where unused.
        wanted: int32[F] by place among the engine's features: 1 where a row or chunk needs it.
    """

    slot: Any = array("B")
    start: Any = array("B")
    first: Any = array("B")
    length: Any = array("D")
    updates: Any = array(3, "U")
    lane_slot: Any = array("N")
    lane_start: Any = array("N")
    lane_length: Any = array("N")
    lane_context: Any = array("N")
    token: Any = array("C")
    token_lane: Any = array("C")
    token_position: Any = array("C")
    prompt_len: Any = array("B + N")
    sample_slot: Any = array("N")
    sample_source: Any = array("N")
    special: Any = array("M")
    wanted: Any = array("F")


@arrays
class StepOutputs:
    """The result's own fields.

    Attributes:
        token: int32[R] the sampled tokens: those of each decode row, then those of the region.
        count: int32[B] how many of a decode row's tokens count; absent (as D) where all have one.
    """

    token: Any = array("R")
    count: Any = array("D")


class Blob(NamedTuple):
    """A step's input as NumPy views or as traced arrays.

    Attributes:
        step: the blob's own fields.
        rows: int32[B + N, width] the features' values of decode rows and of the samples of the
            region, see `BlobLayout.row_table`.
        token_rows: int32[B + N, width] their values of decode rows and lanes, see
            `BlobLayout.token_table`.
        features: the inputs of each feature that has some, by its name.
    """

    step: StepInputs
    rows: Any
    token_rows: Any
    features: dict[str, Any]


class Result(NamedTuple):
    """A step's result: its own fields, and the outputs of each feature that has some, by name."""

    step: StepOutputs
    features: dict[str, Any]


def contained(features: Sequence[Feature], shape: StepShape) -> list[Feature]:
    """The features of a program, in their order."""
    return [feature for feature in features if feature.name in shape.features]


class RowTables(NamedTuple):
    """Columns of the features' values by row (`Feature.row`) and by token (`token_row`)."""

    rows: RowTable
    tokens: RowTable


def row_tables(features: Sequence[Feature]) -> RowTables:
    """The tables of a program's features, or of an engine's.

    Columns of the features that are in more programs come first, so the columns of most programs
    are the first of the engine's, and stay where they are when features are added.
    """
    order = sorted(features, key=lambda f: (f.on_demand, of_region(f), f.special))
    return RowTables(
        RowTable({f.name: f.row for f in order if f.row}),
        RowTable({f.name: f.token_row for f in order if f.token_row}),
    )


class BlobLayout:
    """Where everything lies in the blob of one program."""

    def __init__(
        self,
        shape: StepShape,
        features: Sequence[Feature],
        facts: Facts,
        page_size: int,
        num_groups: int = 1,
    ):
        self.shape = shape
        self.facts = facts
        self.page_size = page_size
        # most page-table entries that a step can touch: those of decode rows, of all chunks
        per_row = -(-shape.num_queries // page_size)
        chunks = shape.num_prefill // page_size + 2 * shape.num_lanes
        updates = (shape.num_decode * per_row + chunks) * num_groups
        sizes = _sizes(shape, facts) | {"U": updates, "W": -(-facts.vocab_size // WORD)}
        sizes["F"] = len(features)
        self._order = [feature.name for feature in features]
        self._step = Layout(StepInputs, sizes)
        parts = contained(features, shape)
        self.row_table, self.token_table = row_tables(parts)
        self._num_rows = rows = shape.num_decode + shape.num_lanes
        self._no_token_rows = np.zeros((rows, 0), np.int32)
        self._rows = slice(self._step.end, self._step.end + rows * self.row_table.width)
        end = self._rows.stop + rows * self.token_table.width
        self._token_rows = slice(self._rows.stop, end)
        self._features: dict[str, Layout[Any]] = {}
        for feature in parts:
            if feature.inputs is not None:
                self._features[feature.name] = Layout(feature.inputs, sizes, end)
                end = self._features[feature.name].end
        self.size = end

    def _tables(self, flat: Any) -> tuple[Any, Any]:
        rows = flat[self._rows].reshape(self._num_rows, -1)
        if not self.token_table.width:
            return rows, self._no_token_rows
        return rows, flat[self._token_rows].reshape(self._num_rows, -1)

    def is_wanted(self, given: Blob, feature: Feature) -> Any:
        """Whether a row or chunk of the step needs the feature; traced or not, as the blob is."""
        return given.step.wanted[self._order.index(feature.name)] > 0

    def first_special(self, given: Blob, count: int) -> Blob:
        """The blob as if it had only the first special rows; traced."""
        features = {
            name: layout.cut(given.features[name], "M", count)
            for name, layout in self._features.items()
        }
        step = self._step.cut(given.step, "M", count)
        return given._replace(step=step, features=features)

    def outputs(self, feature: Feature, num_special: int) -> Any:
        """Shapes and types of what a feature gives of so many special rows, or of the region."""
        assert feature.outputs is not None
        sizes = _sizes(self.shape, self.facts) | {"M": num_special}
        return Layout(feature.outputs, sizes).abstract()

    def updates(self, flat: np.ndarray) -> np.ndarray:
        """The page-table entries of a NumPy blob, see `StepInputs.updates`."""
        offset, size, shape, _ = self._step.places["updates"]
        return flat[offset : offset + size].reshape(shape)

    def views(self, flat: np.ndarray) -> Blob:
        """Writable views of a NumPy blob."""
        features = {name: layout.views(flat) for name, layout in self._features.items()}
        return Blob(self._step.views(flat), *self._tables(flat), features)

    def read(self, flat: jax.Array) -> Blob:
        """The arrays of a blob inside a traced step."""
        features = {name: layout.read(flat) for name, layout in self._features.items()}
        return Blob(self._step.read(flat), *self._tables(flat), features)


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
        "B": shape.num_decode,
        "D": shape.num_decode if shape.num_queries > 1 else 0,
        "B + N": shape.num_decode + shape.num_lanes,
        "R": shape.num_rows,
        "C": shape.num_prefill,
        "N": shape.num_lanes,
        "M": shape.num_special,
        "K": facts.num_logprobs,
        "E": facts.hidden_size,
        "P": facts.pooled_size,
    }
