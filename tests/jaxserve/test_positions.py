"""A model with three kinds of position is given those that a feature supplies for each request."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxserve import LLM, SamplingParams
from jaxserve.execution.features import Chunk, Feature, SpecialRow, Tokens
from jaxserve.execution.layout import array, arrays
from jaxserve.memory.page_keys import KeySpan
from jaxserve.models import load_model, registry
from jaxserve.models.config_reader import read_model_config
from jaxserve.models.linear import PLAIN_LINEAR
from jaxserve.models.llama import Llama
from jaxserve.models.plain_forward import causal_attend
from jaxserve.models.protocol import Angles, TokenRows
from jaxserve.models.rope import rope_tables
from jaxserve.parallel import make_mesh
from jaxserve.request.request import Request
from tests.tiny_models import VOCAB_SIZE

pytestmark = pytest.mark.slow

CASE, AXES, LONGEST, NEW = "llama_gqa", 3, 96, 10
Grid = list[list[int]]  # positions by axis


class Sectioned(Llama):
    """Pairs of a head's dimensions are rotated by one of three positions each, as in M-RoPE."""

    def angles(self, rows: TokenRows) -> list[Angles]:
        config = self.config
        axes = jnp.broadcast_to(rows.positions, (AXES, rows.positions.shape[1]))
        tables = [rope_tables(config.rope, config.head_dim, axis) for axis in axes]
        of_pair = np.arange(config.head_dim // 2) % AXES
        cos, sin = (
            jnp.choose(of_pair, [table[part] for table in tables], mode="clip") for part in (0, 1)
        )
        return [Angles(cos, sin)] * config.num_layers


@arrays
class PlacesInputs:
    """Positions of each region token."""

    position: Any = array(AXES, "C")


@arrays
class PlacesRow:
    """What is added to the place of a token behind the prompt."""

    shift: Any = array()


class Places(Feature):
    """Tokens of a prompt are where its `extra_args` say; the others follow the last of them."""

    name = "places"
    special = False
    inputs = PlacesInputs
    token_row = PlacesRow

    def _grid(self, request: Request) -> np.ndarray:
        given = (request.params.extra_args or {}).get(self.name)
        if given is None:
            return np.tile(np.arange(request.num_prompt), (AXES, 1))
        return np.array(given)

    def needed_by_chunk(self, chunk: Chunk) -> bool:
        named = self.name in (chunk.request.params.extra_args or {})
        return named and chunk.start < chunk.request.num_prompt

    def token_row_of(self, request: Request) -> PlacesRow:
        return PlacesRow(self._grid(request).max() + 1 - request.num_prompt)

    def key_spans(self, request: Request) -> list[KeySpan]:
        grid = self._grid(request)
        others = np.flatnonzero((grid != np.arange(request.num_prompt)).any(0))
        if not len(others):
            return []
        begin = int(others[0])
        return [KeySpan(begin, request.num_prompt - begin, grid.tobytes())]

    def pack(self, inputs: PlacesInputs, rows: list[SpecialRow], chunks: list[Chunk]) -> None:
        begin = 0
        for request, start, length in chunks:
            grid = self._grid(request)
            more = np.arange(length) + grid.max() + 1
            placed = np.concatenate([grid, np.tile(more, (AXES, 1))], 1)[:, start : start + length]
            inputs.position[:, begin : begin + length] = placed
            begin += length

    def positions(self, tokens: Tokens, positions: jax.Array) -> jax.Array:
        assert positions.shape == (1, len(tokens.token))
        own = jnp.broadcast_to(positions + tokens.values.shift, (AXES, positions.shape[1]))
        return own.at[:, own.shape[1] - tokens.inputs.position.shape[1] :].set(
            tokens.inputs.position
        )


@pytest.fixture(scope="module")
def sectioned() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        families = [
            replace(family, model=Sectioned) if family.model_type == "llama" else family
            for family in registry.FAMILIES
        ]
        patch.setattr(registry, "FAMILIES", tuple(families))
        yield


@pytest.fixture(scope="module")
def llm(sectioned: None, make_llm: Any, model_folder: Any) -> LLM:
    return make_llm(model_folder(CASE), features=[Places])


@pytest.fixture(scope="module")
def expected(sectioned: None, model_folder: Any) -> Any:
    """Greedy tokens of the model without pages, chunks and batches."""
    folder = model_folder(CASE)
    config = read_model_config(folder)
    graph, state = nnx.split(
        load_model(folder, config, mesh=make_mesh(1), dtype="float32", form=PLAIN_LINEAR)
    )

    @jax.jit
    def best(tokens: jax.Array, positions: jax.Array) -> jax.Array:
        model: Any = nnx.merge(graph, state)
        attend = causal_attend(config)
        hidden, _ = model.layers(model.embed(tokens), TokenRows(positions), None, attend)
        return model.logits(hidden).argmax(-1)

    def run(prompt: list[int], grid: Grid | None) -> list[int]:
        tokens, size = [*prompt], len(prompt)
        given = np.tile(np.arange(size), (AXES, 1)) if grid is None else np.array(grid)
        more = np.arange(LONGEST - size) + given.max() + 1
        positions = np.concatenate([given, np.tile(more, (AXES, 1))], 1)
        for _ in range(NEW):
            padded = np.array(tokens + [0] * (LONGEST - len(tokens)))
            tokens.append(int(best(padded, positions)[len(tokens) - 1]))
        return tokens[size:]

    return run


def image(before: int, height: int, width: int, after: int) -> Grid:
    """Text, then the tokens of a picture by time, row and column, then text."""
    rows, columns = (axis.ravel().tolist() for axis in np.indices((height, width)))
    axes = [[before] * (height * width), [before + y for y in rows], [before + x for x in columns]]
    tail = [before + max(height, width) + i for i in range(after)]
    return [[*range(before), *axis, *tail] for axis in axes]


def wants(grid: Grid | None) -> SamplingParams:
    extra = None if grid is None else {"places": grid}
    return SamplingParams(temperature=0.0, max_tokens=NEW, ignore_eos=True, extra_args=extra)


def tokens_of(llm: LLM, prompts: list[list[int]], grids: list[Grid | None]) -> list[list[int]]:
    outputs = llm.generate(prompts, [wants(grid) for grid in grids], use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


def test_requests_of_one_step_have_their_own_positions(llm: LLM, expected: Any) -> None:
    grids = [
        image(5, 4, 6, 12),
        None,
        image(20, 6, 8, 1),
        None,
        image(0, 2, 2, 0),
        [[0], [9], [40]],
    ]
    sizes = [len(grid[0]) if grid else 33 for grid in grids]
    rng = np.random.default_rng(0)
    prompts = [rng.integers(3, VOCAB_SIZE, size).tolist() for size in sizes]
    wanted = [expected(prompt, grid) for prompt, grid in zip(prompts, grids)]
    assert tokens_of(llm, prompts, grids) == wanted
    others = tokens_of(llm, prompts, [None] * len(grids))
    assert [a == b for a, b in zip(others, wanted)] == [grid is None for grid in grids]


def test_equal_positions_are_found_in_the_prefix_cache_and_others_are_not(
    llm: LLM, expected: Any
) -> None:
    prompt = np.random.default_rng(1).integers(3, VOCAB_SIZE, 60).tolist()
    one, other = image(20, 5, 4, 20), image(20, 4, 5, 20)
    llm.reset_prefix_cache()
    for grid, cached in ((one, 0), (one, 56), (other, 16), (None, 16), (other, 56)):
        (found,) = llm.generate([prompt], wants(grid), use_tqdm=False)
        assert (found.outputs[0].token_ids, found.num_cached_tokens) == (
            expected(prompt, grid),
            cached,
        )


def test_where_nothing_supplies_positions_one_axis_stands_for_all(
    sectioned: None, make_llm: Any, model_folder: Any, expected: Any
) -> None:
    prompt = np.random.default_rng(2).integers(3, VOCAB_SIZE, 40).tolist()
    assert tokens_of(make_llm(model_folder(CASE)), [prompt], [None]) == [expected(prompt, None)]
