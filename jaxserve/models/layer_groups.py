"""The layers of a model in groups that share page tables: those that attend alike are together."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import jax

from jaxserve.memory.page_groups import PageGroups
from jaxserve.models.config import ModelConfig
from jaxserve.models.protocol import Layer

# page tables that a request has at most: each costs the host a page and an entry more
MOST_GROUPS = 8
# how many windows long sequences are taken to be where a choice depends on it
LENGTH_IN_WINDOWS = 4


@dataclass(frozen=True)
class LayerGroups:
    """Where each layer's keys and values lie.

    Attributes:
        pages: what requests and pages know of the groups.
        layers_per_page: of each group; a group with fewer layers leaves places of its pages empty.
        places: of each layer, its group and its place in the pages of that.
    """

    pages: PageGroups
    layers_per_page: int
    places: tuple[tuple[int, int], ...]

    @staticmethod
    def one(num_layers: int, stages: int = 1) -> LayerGroups:
        """All layers in one group, which keeps the pages of all tokens.

        Each of several stages has a page of its own for the same tokens, with its layers.
        """
        each = num_layers // stages
        return LayerGroups(PageGroups(), each, tuple((0, n % each) for n in range(num_layers)))

    @staticmethod
    def by_window(model: ModelConfig, max_model_len: int) -> LayerGroups:
        """The layers with a window apart from the others, where that saves memory.

        The layers a page are chosen such that a sequence several windows long takes the fewest
        bytes. A window that no sequence outgrows is none. Layers with windows of several lengths
        keep the pages of the longest.
        """
        layers = range(model.num_layers)
        windows = [model.layer_window(layer) or max_model_len for layer in layers]
        longest = max((w for w in windows if w < max_model_len), default=0)
        windowed = [layer for layer in layers if windows[layer] < max_model_len]
        full = [layer for layer in layers if windows[layer] >= max_model_len]

        def groups(size: int) -> PageGroups:
            return PageGroups(-(-len(full) // size), -(-len(windowed) // size), longest)

        def cost(size: int) -> int:
            """Places of layers that such a sequence takes, in windows."""
            return size * (LENGTH_IN_WINDOWS * groups(size).num_full + groups(size).num_windowed)

        sizes = (n for n in range(1, len(layers) + 1) if groups(n).num_groups <= MOST_GROUPS)
        size = min(sizes, key=lambda n: (cost(n), groups(n).num_groups))
        if cost(size) >= LENGTH_IN_WINDOWS * len(layers):
            return LayerGroups.one(len(layers))
        found = groups(size)
        places = dict(_places(full, 0, size)) | dict(_places(windowed, found.num_full, size))
        return LayerGroups(found, size, tuple(places[layer] for layer in layers))

    def place(self, layer: Layer) -> tuple[int, int | jax.Array]:
        """The group of a layer, and its place there; those of a loop lie one behind the other."""
        if isinstance(layer, int):
            return self.places[layer]
        group, first = self.places[layer.first]
        return group, first + layer.number - layer.first


def _places(layers: list[int], first: int, size: int) -> Iterator[tuple[int, tuple[int, int]]]:
    """Layers, in groups of a size from the group `first` on, and their places."""
    for number, layer in enumerate(layers):
        yield layer, (first + number // size, number % size)
