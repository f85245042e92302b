"""The program beside the steps: batches of few sizes, and what it keeps."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx

from jaxserve.execution.encoder import ACTIVATIONS, Encoder
from jaxserve.parallel import make_mesh

SHAPE = (2, 3)
ROW_BYTES = 4 * 3  # of a row that is kept


class Doubled(nnx.Module):
    """[B, 2, 3] -> [B, 1, 3]."""

    def __init__(self) -> None:
        self.factor = nnx.Param(jax.numpy.full((3,), 2.0))

    def __call__(self, x: jax.Array, places: jax.Array) -> jax.Array:
        return x.sum(1, keepdims=True) * self.factor[...]


def made(most: int = 4, cache_bytes: int = 1000) -> Encoder:
    return Encoder(Doubled(), make_mesh(1), SHAPE, most=most, cache_bytes=cache_bytes)


@pytest.fixture
def encoder() -> Iterator[Encoder]:
    found = made()
    found.warm_up()
    yield found
    found.close()


def one(number: float) -> tuple[tuple[int, ...], bytes]:
    return SHAPE, np.full(SHAPE, number, "<f4").tobytes()


def rows(encoder: Encoder, *numbers: float) -> list[float]:
    return [float(each.rows[0, 0]) for each in encoder.encode([one(n) for n in numbers]).result(9)]


def test_rows_come_in_the_order_that_was_asked(encoder: Encoder) -> None:
    assert encoder.sizes == [1, 2, 4]
    assert rows(encoder, 3, 1, 2, 1, 5, 6) == [12, 4, 8, 4, 20, 24]
    assert encoder.num_encoded == 5, "one of them twice"
    assert (encoder.num_asked, encoder.num_known) == (6, 1)


def test_what_is_known_is_not_encoded_again(encoder: Encoder) -> None:
    assert rows(encoder, 1, 2) == rows(encoder, 1, 2) and encoder.num_encoded == 2
    assert (encoder.num_asked, encoder.num_known) == (4, 2)
    encoder.forget()
    assert rows(encoder, 2, 2) == [8, 8] and encoder.num_encoded == 3
    same = np.full((3, 2), 1, "<f4").tobytes()
    assert same == one(1)[1]
    with pytest.raises(ValueError, match="shape"):
        encoder.encode([((3, 2), same)]).result(9)  # the same bytes are another array
    assert rows(encoder, 7) == [28], "others go on"


def test_what_is_kept_has_a_bound() -> None:
    encoder = made(cache_bytes=2 * ROW_BYTES)
    encoder.warm_up()
    for number in (1, 2, 1, 3, 1, 2):  # the third takes the room of the second
        rows(encoder, number)
    assert encoder.num_encoded == 4
    encoder.close()


def test_one_launch_takes_what_waits_and_no_more(encoder: Encoder, monkeypatch: Any) -> None:
    entered, go = threading.Event(), threading.Event()
    launch, counts = encoder._launch, []

    def slow(arrays: list[np.ndarray]) -> list[np.ndarray]:
        counts.append(len(arrays))
        entered.set()
        assert go.wait(9)
        return launch(arrays)

    monkeypatch.setattr(encoder, "_launch", slow)
    first = encoder.encode([one(1)])
    assert entered.wait(9)
    others = [encoder.encode([one(n)]) for n in (2, 3, 4, 5, 6, 1)]
    go.set()
    assert [float(each.result(9)[0].rows[0, 0]) for each in (first, *others)] == [
        4,
        8,
        12,
        16,
        20,
        24,
        4,
    ]
    assert counts == [1, 4, 1]


def test_a_closed_one_leaves_nobody_waiting(monkeypatch: Any) -> None:
    encoder = made(most=1)
    encoder.warm_up()
    go = threading.Event()
    launch = encoder._launch

    def slow(arrays: list[np.ndarray]) -> list[np.ndarray]:
        assert go.wait(9)
        return launch(arrays)

    monkeypatch.setattr(encoder, "_launch", slow)
    running, waiting = encoder.encode([one(1)]), encoder.encode([one(2)])
    closing = threading.Thread(target=encoder.close)
    closing.start()
    go.set()
    closing.join(9)
    assert running.done() and waiting.done()


def test_sizes_of_odd_numbers() -> None:
    assert made(most=6).sizes == [1, 3, 6] and made(most=0).sizes == [1]
    assert made().device_bytes == 12 + 4 * 4 * (6 + 1) + ACTIVATIONS * 4 * 4 * 3


def test_a_launch_that_would_be_mostly_empty_is_cut() -> None:
    encoder = made(most=11)
    assert encoder.sizes == [1, 2, 5, 11]
    kept = [encoder._kept(list(range(1, count + 1))) for count in range(1, 12)]
    assert kept == [1, 2, 2, 4, 5, 5, 5, 8, 9, 10, 11]
    assert encoder._kept([5, 10]) == 2 and encoder._kept([5, 6]) == 1


class Located(nnx.Module):
    """Rows [T, 2] by fours -> [T / 4, 3]: their sum, the number of their array, where it ends."""

    def __init__(self) -> None:
        self.factor = nnx.Param(jax.numpy.ones(()))

    def __call__(self, x: jax.Array, places: jax.Array) -> jax.Array:
        fours = places.reshape(-1, 4, 3)
        where = fours[:, -1, 1] * 100 + fours[:, -1, 2]
        total = x.reshape(len(fours), -1).sum(1) * self.factor[...]
        return jax.numpy.stack([total, fours[:, 0, 0], where], 1)


@pytest.mark.parametrize("is_alone", [False, True])
def test_arrays_of_their_own_sizes_share_launches(is_alone: bool, monkeypatch: Any) -> None:
    made = {"axes": 2, "unit": 4, "most": 27, "cache_bytes": 0, "is_alone": is_alone}
    encoder = Encoder(Located(), make_mesh(1), (2,), **made)  # type: ignore[arg-type]
    encoder.warm_up()
    assert encoder.sizes == [4, 8, 12, 24]
    shapes = (2, 2), (1, 4), (5, 4), (3, 4), (6, 4)
    arrays = [np.full((*shape, 2), number, "<f4") for number, shape in enumerate(shapes, 1)]
    launched = []
    launch = encoder._launch
    monkeypatch.setattr(
        encoder, "_launch", lambda given: launched.append(len(given)) or launch(given)
    )
    monkeypatch.setattr(encoder, "_thread", True)  # all of them wait before the first launch
    done = encoder.encode([(array.shape, array.tobytes()) for array in arrays])
    encoder._work()
    found = [each.rows for each in done.result(9)]
    assert launched == ([1] * 5 if is_alone else [2, 1, 1, 1])
    assert [rows[:, 0].tolist() for rows in found] == [
        [8.0 * number] * (array.size // 8) for number, array in enumerate(arrays, 1)
    ]
    assert [rows[0, 1] for rows in found] == [1, 1 if is_alone else 2, 1, 1, 1]
    assert found[0][:, 2].tolist() == [101] and found[3][:, 2].tolist() == [3, 103, 203]
    encoder.close()


def test_what_nobody_waits_for_is_not_encoded(encoder: Encoder, monkeypatch: Any) -> None:
    monkeypatch.setattr(encoder, "_thread", True)
    both, gone = encoder.encode([one(1), one(2)]), encoder.encode([one(3)])
    wanted = encoder.encode([one(2), one(4)])
    assert both.cancel() and gone.cancel()
    encoder._work()
    assert [float(each.rows[0, 0]) for each in wanted.result(9)] == [8, 16]
    assert encoder.num_encoded == 2, "of the cancelled ones what another waits for"
    monkeypatch.undo()
    assert rows(encoder, 1) == [4]
