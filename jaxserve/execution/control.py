"""Programs beside the step: what the host tells the device of a slot without computing a token."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from jaxserve.execution.layout import Layout, array
from jaxserve.execution.step import DeviceState
from jaxserve.scheduling.plan import Upload

UPLOAD_TOKENS = 4096  # of one call; more take several


@dataclass(frozen=True, slots=True)
class UploadInputs:
    """Entries of the token history and of the page table; unused ones name the trash slot."""

    token_slot: Any = array("T")
    position: Any = array("T")
    token: Any = array("T")
    page_slot: Any = array("P")
    page_index: Any = array("P")
    page: Any = array("P")


class UploadLayout:
    """The blob of an upload.

    Args:
        page_size: tokens a page.
        trash: slot of unused entries.
    """

    def __init__(self, page_size: int, trash: int):
        self._trash = trash
        self._num_tokens, self._num_pages = UPLOAD_TOKENS, -(-UPLOAD_TOKENS // page_size)
        self._layout = Layout(UploadInputs, {"T": self._num_tokens, "P": self._num_pages})
        self.size = self._layout.end

    def run(self, state: DeviceState, blob: jax.Array) -> DeviceState:
        """The device state with the entries written; traced."""
        given = self._layout.read(blob)
        return state._replace(
            page_table=state.page_table.at[given.page_slot, given.page_index].set(given.page),
            history=state.history.at[given.token_slot, given.position].set(given.token),
        )

    def pack(self, uploads: list[Upload]) -> Iterator[np.ndarray]:
        """As many blobs as the uploads need; each is fresh memory."""
        tokens = _entries((u.slot, u.tokens) for u in uploads)
        pages = _entries((u.slot, np.array(u.pages, np.int32)) for u in uploads)
        while tokens.shape[1] or pages.shape[1]:
            blob = np.zeros(self.size, np.int32)
            views = self._layout.views(blob)
            views.token_slot[:] = views.page_slot[:] = self._trash
            some, tokens = np.split(tokens, [self._num_tokens], axis=1)
            count = some.shape[1]
            views.token_slot[:count], views.position[:count], views.token[:count] = some
            some, pages = np.split(pages, [self._num_pages], axis=1)
            count = some.shape[1]
            views.page_slot[:count], views.page_index[:count], views.page[:count] = some
            yield blob


def _entries(rows: Iterator[tuple[int, np.ndarray]]) -> np.ndarray:
    """int32[3, N] (slot, index, value) of every value of every row."""
    parts = [
        np.stack([np.full(len(values), slot), np.arange(len(values)), values])
        for slot, values in rows
    ]
    return np.concatenate([np.zeros((3, 0), np.int32), *parts], axis=1).astype(np.int32)
