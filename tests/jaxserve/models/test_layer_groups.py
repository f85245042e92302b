"""The groups of layers that share page tables."""

from __future__ import annotations

from dataclasses import replace

import pytest

from jaxserve.memory.page_groups import PageGroups
from jaxserve.models.config_reader import model_config_of
from jaxserve.models.layer_groups import MOST_GROUPS, LayerGroups
from tests.jaxserve.models.test_config import LLAMA

MODEL = model_config_of(LLAMA)
LONG = 100_000


def groups_of(*windows: int | None, max_model_len: int = LONG) -> LayerGroups:
    model = replace(MODEL, num_layers=len(windows), windows=windows)
    return LayerGroups.by_window(model, max_model_len)


def gemma3(layers: int) -> list[int | None]:
    return [None if layer % 6 == 5 else 1024 for layer in range(layers)]


@pytest.mark.parametrize(
    ("windows", "pages", "layers_per_page"),
    [
        ([None] * 32, PageGroups(), 32),
        ([4096] * 32, PageGroups(0, 1, 4096), 32),
        ([4096, None] * 21, PageGroups(1, 1, 4096), 21),  # Gemma 2 9B
        (gemma3(26), PageGroups(1, 6, 1024), 4),  # Gemma 3 1B
        (gemma3(48), PageGroups(1, 5, 1024), 8),  # 12B
        (gemma3(62), PageGroups(1, 5, 1024), 11),  # 27B
        ([17, 33, None, None], PageGroups(1, 1, 33), 2),
        ([None] * 25 + [1024], PageGroups(), 26),  # it would cost more than it saves
        ([LONG] * 4, PageGroups(), 4),
    ],
)
def test_published_models(
    windows: list[int | None], pages: PageGroups, layers_per_page: int
) -> None:
    found = groups_of(*windows)
    assert (found.pages.num_full, found.pages.num_windowed) == (pages.num_full, pages.num_windowed)
    assert not pages.num_windowed or found.pages.window == pages.window
    assert found.layers_per_page == layers_per_page


@pytest.mark.parametrize("num_full", [0, 1, 3, 10, 25])
@pytest.mark.parametrize("num_windowed", [1, 2, 7, 25, 60])
def test_every_layer_has_a_place_of_its_own_in_a_group_of_its_kind(
    num_full: int, num_windowed: int
) -> None:
    windows = [*[None] * num_full, *[512] * num_windowed]
    found = groups_of(*windows)
    assert found.pages.num_groups <= MOST_GROUPS
    assert len({*found.places}) == len(found.places) == len(windows)
    for window, (group, place) in zip(windows, found.places, strict=True):
        assert 0 <= group < found.pages.num_groups and 0 <= place < found.layers_per_page
        assert group not in found.pages.windowed or window == 512


def test_one_group_is_the_layers_in_their_order() -> None:
    found = groups_of(None, 4096, max_model_len=4096)
    assert found == LayerGroups.one(2) and found.places == ((0, 0), (0, 1))
