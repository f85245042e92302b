"""A program beside the steps that makes embeddings of arrays, such as images.

A thread of its own launches it, one launch after the other, so that a step waits for one launch
at most. What it gives is kept by a digest of what it was given.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxserve.compilation.compiler_options import Options, accepted

DIGEST_BYTES = 32
SAMPLES = 256  # numbers of a parameter that stand for it
MOST_SIZES = 5  # of launches
WORTH_CUTTING = 0.75  # of a launch's rows, which two smaller ones have together at most
ACTIVATIONS = 4  # arrays as large as its largest that a launch has at once, as a bound


class Encoded(NamedTuple):
    """The rows float32[P, E] of an array, and the digest of the array."""

    digest: bytes
    rows: np.ndarray


class _Item(NamedTuple):
    """An array that waits for a launch, and the calls that wait for it."""

    key: bytes
    array: np.ndarray
    made: Future[np.ndarray]
    calls: list[Future[list[Any]]]


class Encoder:
    """Encodes arrays, as many in a launch as wait and have room, in launches of few sizes.

    The first axes of an array count its rows. A launch has a fixed number of rows; the arrays in it
    lie one behind the other.

    Args:
        module: with its parameters, or with `jax.ShapeDtypeStruct`s to know sizes alone; called
            with rows float32[T, *row] and places int32[T, 1 + axes]: which array of the launch a
            row is of, from 1 (0: of none), and where it is in that. It gives [..., E], of each row
            as many or of as many rows one; a row's own do not depend on other arrays.
        mesh: its devices; each does the same.
        row: shape of a row.
        axes: number of the axes of an array that count rows.
        unit: rows that belong together; arrays have a multiple of it.
        most: rows of one launch at most.
        is_alone: whether a launch has one array.
        cache_bytes: of host memory that results are kept in; the least recently asked go first.

    Attributes:
        identity: a digest of some numbers of each parameter: files of pages outlive an engine.
        num_launches, num_encoded: launches, and the arrays in them, so far.
        num_asked, num_known: arrays that were asked for, and those of them that were kept or waited
            already, so far.
    """

    def __init__(
        self,
        module: nnx.Module,
        mesh: Mesh,
        row: tuple[int, ...],
        *,
        axes: int = 0,
        unit: int = 1,
        most: int,
        is_alone: bool = False,
        cache_bytes: int,
    ):
        self._graph, self._state = nnx.split(module)
        self._everywhere = NamedSharding(mesh, PartitionSpec())
        self._row, self._axes, self._unit = row, axes, unit
        self._most, self._is_alone = max(unit, most - most % unit), is_alone
        self._cache_bytes, self._held = cache_bytes, 0
        self._rows: OrderedDict[bytes, np.ndarray] = OrderedDict()
        self._items: dict[bytes, _Item] = {}  # that wait or are under way
        self._waiting: deque[_Item] = deque()
        self._lock = threading.Lock()
        self._is_closed = False
        self._programs: dict[int, Any] = {}  # by rows of a launch
        self._thread: threading.Thread | None = None  # while there is something to launch
        self.identity = b""
        self.num_launches = self.num_encoded = self.num_asked = self.num_known = 0

    @property
    def device_bytes(self) -> int:
        """Bytes on each device: of the parameters, and of what a launch is given and makes."""
        run, given = self.program(self._most)
        held = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(given))
        return held + ACTIVATIONS * max(_made_bytes(jax.make_jaxpr(run)(*given).jaxpr))

    @property
    def sizes(self) -> list[int]:
        """Rows of the launches that are compiled: the most, and halves of it."""
        halves = (self._most >> power for power in range(MOST_SIZES))
        return sorted({max(1, -(-half // self._unit)) * self._unit for half in halves})

    def warm_up(self) -> None:
        """Compile a program for each size of launches."""
        digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
        for leaf in jax.tree.leaves(self._state):
            flat = leaf.reshape(-1)
            digest.update(np.asarray(flat[:: max(1, flat.size // SAMPLES)]).tobytes())
        self.identity = digest.digest()
        # one process compiles it, and no other one has a part of the timing of its kernels
        is_gpu = self._everywhere.mesh.devices.flat[0].platform == "gpu"
        options: Options = {}
        if is_gpu and jax.process_count() > 1:
            options = accepted({"xla_gpu_shard_autotuning": False})
        for size in self.sizes:
            run, given = self.program(size)
            self._programs[size] = jax.jit(run).lower(*given).compile(options or None)

    def program(self, size: int) -> tuple[Callable[..., jax.Array], tuple[Any, Any, Any]]:
        """The function of a launch of so many rows, and what it is given: the parameters, and the
        shapes of rows and of places."""
        return self._run, (self._state, *self._given(size))

    def encode(
        self,
        given: Sequence[tuple[tuple[int, ...], bytes | memoryview]],
        join: Callable[[list[Encoded]], list[Any]] = lambda made: made,
    ) -> Future[list[Any]]:
        """Rows of each array, which comes as its shape and little-endian float32; or what `join`
        makes of them.

        Arrays that are known, or wait already, are not encoded again. An array that only cancelled
        futures wait for is dropped.
        """
        done: Future[list[Any]] = Future()
        every = [self._submit(shape, data, done) for shape, data in given]
        left = [len(every)]
        counting = threading.Lock()

        def count(_: Future[np.ndarray]) -> None:
            with counting:
                left[0] -= 1
                is_last = not left[0]
            if not is_last:
                return
            try:
                if done.set_running_or_notify_cancel():
                    made = [Encoded(key, future.result()) for key, future in every]
                    done.set_result(join(made))
            except Exception as error:  # of any of them: the request ends with it
                done.set_exception(error)
            finally:
                every.clear()  # futures hold this function: a cycle would outlive the request

        for _, future in every:
            future.add_done_callback(count)
        return done

    def forget(self) -> None:
        """Encode again what comes again."""
        with self._lock:
            self._rows, self._held = OrderedDict(), 0

    def close(self) -> None:
        """Take nothing more, and free the parameters; a launch under way is waited for."""
        with self._lock:
            self._is_closed = True
            left, self._waiting = [*self._waiting], deque()
            thread = self._thread
        if thread is not None:
            thread.join()
        for item in left:
            item.made.cancel()
        self._programs, self._state, self._rows = {}, None, OrderedDict()

    def _given(self, size: int) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
        """Rows and places of a launch."""
        shapes = ((size, *self._row), np.float32), ((size, 1 + self._axes), np.int32)
        rows, places = (
            jax.ShapeDtypeStruct(shape, kind, sharding=self._everywhere) for shape, kind in shapes
        )
        return rows, places

    def _run(self, state: Any, rows: jax.Array, places: jax.Array) -> jax.Array:
        """Traced: rows [T, *row], places int32[T, 1 + axes] -> float32 [.., E]."""
        made: jax.Array = nnx.merge(self._graph, state)(rows, places)
        return made.astype(jnp.float32).reshape(-1, made.shape[-1])

    def _submit(
        self, shape: tuple[int, ...], data: bytes | memoryview, call: Future[list[Any]]
    ) -> tuple[bytes, Future[np.ndarray]]:
        if tuple(shape[self._axes :]) != self._row:
            raise ValueError(f"an array of the shape {[*shape]}, not of rows of {[*self._row]}")
        if math.prod(shape[: self._axes]) > self._most:
            allowed = f"{self._most} of max_encoder_patches"
            raise ValueError(f"an array of {[*shape]}, which is more than {allowed}")
        digest = hashlib.blake2b(repr(tuple(shape)).encode(), digest_size=DIGEST_BYTES)
        digest.update(data)
        key, array = digest.digest(), np.frombuffer(data, "<f4").reshape(shape)
        made: Future[np.ndarray] = Future()
        with self._lock:
            self.num_asked += 1
            if (item := self._items.get(key)) is not None:
                self.num_known += 1
                item.calls.append(call)
                return key, item.made
            if self._is_closed:
                made.cancel()
                return key, made
            if key in self._rows:
                self.num_known += 1
                self._rows.move_to_end(key)
                made.set_result(self._rows[key])
                return key, made
            self._items[key] = item = _Item(key, array, made, [call])
            self._waiting.append(item)
            if self._thread is None:
                # it ends with the work: one that waited would keep the parameters alive
                self._thread = threading.Thread(
                    target=self._work, name="jaxserve-encoder", daemon=True
                )
                self._thread.start()
            return key, made

    def _count(self, array: np.ndarray) -> int:
        """Rows of an array."""
        return math.prod(array.shape[: self._axes])

    def _next(self) -> list[_Item]:
        """The arrays of the next launch; none ends the thread."""
        items: list[_Item] = []
        with self._lock:
            room = self._most
            while self._waiting and not (items and self._is_alone):
                item = self._waiting[0]
                if all(call.cancelled() for call in item.calls):
                    del self._items[self._waiting.popleft().key]
                    item.made.cancel()
                    continue
                room -= self._count(item.array)
                if items and room < 0:
                    break
                items.append(self._waiting.popleft())
            kept = self._kept(list(itertools.accumulate(self._count(i.array) for i in items)))
            self._waiting.extendleft(reversed(items[kept:]))
            del items[kept:]
            if not items:
                self._thread = None
        return items

    def _size(self, rows: int) -> int:
        """Rows of the launch that so many are in."""
        return next(size for size in self.sizes if size >= rows)

    def _kept(self, ends: list[int]) -> int:
        """How many arrays, which end at those rows, are in the next launch.

        They are fewer than all where two launches would spend clearly less on empty rows.
        """
        for kept in reversed(range(1, len(ends))):
            rows = self._size(ends[kept - 1]) + self._size(ends[-1] - ends[kept - 1])
            if rows <= WORTH_CUTTING * self._size(ends[-1]):
                return kept
        return len(ends)

    def _work(self) -> None:
        while items := self._next():
            rows: list[np.ndarray] = []
            error: Exception | None = None
            try:
                rows = self._launch([item.array for item in items])
            except Exception as caught:  # the requests that wait for these end with it
                error = caught
            with self._lock:
                for place, item in enumerate(items):
                    del self._items[item.key]
                    if error is None:
                        self._keep(item.key, rows[place])
            for place, item in enumerate(items):
                if error is None:
                    item.made.set_result(rows[place])
                else:
                    item.made.set_exception(error)

    def _launch(self, arrays: list[np.ndarray]) -> list[np.ndarray]:
        counts = [self._count(array) for array in arrays]
        size = self._size(sum(counts))
        rows = np.zeros((size, *self._row), np.float32)
        places = np.zeros((size, 1 + self._axes), np.int32)
        begin = 0
        for number, (array, count) in enumerate(zip(arrays, counts, strict=True), start=1):
            here = slice(begin, begin + count)
            rows[here] = array.reshape(count, *self._row)
            places[here, 0] = number
            places[here, 1:] = np.indices(array.shape[: self._axes]).reshape(self._axes, count).T
            begin += count
        given = jax.device_put((rows, places), self._everywhere)
        made = np.asarray(self._programs[size](self._state, *given))
        self.num_launches += 1
        self.num_encoded += len(arrays)
        ends = np.cumsum([0, *counts]) * len(made) // size
        return [made[first:last].copy() for first, last in itertools.pairwise(ends)]

    def _keep(self, key: bytes, rows: np.ndarray) -> None:
        if rows.nbytes > self._cache_bytes:
            return
        self._rows[key] = rows
        self._held += rows.nbytes
        while self._held > self._cache_bytes:
            _, oldest = self._rows.popitem(last=False)
            self._held -= oldest.nbytes


def _made_bytes(jaxpr: Any) -> Iterator[int]:
    """Bytes of each array that a traced program makes, those of its inner programs too."""
    for step in jaxpr.eqns:
        for made in step.outvars:
            yield math.prod(made.aval.shape) * made.aval.dtype.itemsize
        for inner in jax.tree.leaves(
            [*step.params.values()], is_leaf=lambda x: hasattr(x, "jaxpr")
        ):
            if hasattr(inner, "jaxpr"):
                yield from _made_bytes(inner.jaxpr)
