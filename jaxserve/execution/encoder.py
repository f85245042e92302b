"""A program beside the steps that makes embeddings of arrays, such as images.

A thread of its own launches it, one launch after the other, so that a step waits for one launch
at most. What it gives is kept by a digest of what it was given.
"""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict, deque
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

DIGEST_BYTES = 32
SAMPLES = 256  # numbers of a parameter that stand for it
ACTIVATIONS = 8  # arrays as large as the result that a launch has at once, as a bound


class _Item(NamedTuple):
    """An array that waits for a launch."""

    key: bytes
    array: np.ndarray
    made: Future[np.ndarray]


class Encoder:
    """Encodes arrays of one shape, as many in a launch as wait, in batches of few sizes.

    Args:
        module: with its parameters, or with `jax.ShapeDtypeStruct`s to know sizes alone; float32
            arrays [B, *shape] -> rows [B, P, E].
        mesh: its devices; each does the same.
        shape: of one array.
        most: arrays of one launch at most.
        cache_bytes: of host memory that rows are kept in; the least recently asked go first.

    Attributes:
        identity: a digest of some numbers of each parameter: files of pages outlive an engine.
        num_launches, num_encoded: launches, and the arrays in them, so far.
    """

    def __init__(
        self,
        module: nnx.Module,
        mesh: Mesh,
        shape: tuple[int, ...],
        *,
        most: int,
        cache_bytes: int,
    ):
        self._graph, self._state = nnx.split(module)
        self._everywhere = NamedSharding(mesh, PartitionSpec())
        self._shape, self._most = shape, max(1, most)
        self._cache_bytes, self._held = cache_bytes, 0
        self._rows: OrderedDict[bytes, np.ndarray] = OrderedDict()
        self._made: dict[bytes, Future[np.ndarray]] = {}  # of arrays that wait or are under way
        self._waiting: deque[_Item] = deque()
        self._lock = threading.Lock()
        self._is_closed = False
        self._programs: dict[int, Any] = {}  # by arrays of a launch
        self._thread: threading.Thread | None = None  # while there is something to launch
        self.identity = b""
        self.num_launches = self.num_encoded = 0

    @property
    def device_bytes(self) -> int:
        """Bytes on each device: of the parameters, and of what a launch is given and makes."""
        weights = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(self._state))
        given = jax.ShapeDtypeStruct((self._most, *self._shape), np.float32)
        made = jax.eval_shape(self._run, self._state, given)
        return weights + 4 * (given.size + ACTIVATIONS * made.size)

    @property
    def sizes(self) -> list[int]:
        """Arrays of the launches that are compiled: powers of two, and the most."""
        powers = (1 << power for power in range(self._most.bit_length()))
        return sorted({*powers, self._most})

    def warm_up(self) -> None:
        """Compile a program for each size of launches."""
        digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
        for leaf in jax.tree.leaves(self._state):
            flat = leaf.reshape(-1)
            digest.update(np.asarray(flat[:: max(1, flat.size // SAMPLES)]).tobytes())
        self.identity = digest.digest()
        for size in self.sizes:
            shape = (size, *self._shape)
            given = jax.ShapeDtypeStruct(shape, np.float32, sharding=self._everywhere)
            self._programs[size] = jax.jit(self._run).lower(self._state, given).compile()

    def encode(self, given: Sequence[tuple[tuple[int, ...], bytes]]) -> Future[list[np.ndarray]]:
        """Rows float32[P, E] of each array, which comes as its shape and little-endian float32.

        Arrays that are known, or wait already, are not encoded again.
        """
        every = [self._submit(shape, data) for shape, data in given]
        done: Future[list[np.ndarray]] = Future()
        left = [len(every)]
        counting = threading.Lock()

        def count(one: Future[np.ndarray]) -> None:
            with counting:
                left[0] -= 1
                is_last = not left[0]
            if not is_last:
                return
            try:
                done.set_result([future.result() for future in every])
            except Exception as error:  # of any of them: the request ends with it
                done.set_exception(error)

        for future in every:
            future.add_done_callback(count)
        return done

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

    def _run(self, state: Any, arrays: jax.Array) -> jax.Array:
        """Traced: arrays [B, *shape] -> float32 rows [B, P, E]."""
        rows: jax.Array = nnx.merge(self._graph, state)(arrays)
        return rows.astype(jnp.float32)

    def _submit(self, shape: tuple[int, ...], data: bytes) -> Future[np.ndarray]:
        digest = hashlib.blake2b(repr(tuple(shape)).encode(), digest_size=DIGEST_BYTES)
        digest.update(data)
        key, array = digest.digest(), np.frombuffer(data, "<f4").reshape(shape)
        with self._lock:
            if key in self._made:
                return self._made[key]
            made: Future[np.ndarray] = Future()
            if self._is_closed:
                made.cancel()
                return made
            if key in self._rows:
                self._rows.move_to_end(key)
                made.set_result(self._rows[key])
                return made
            self._made[key] = made
            self._waiting.append(_Item(key, array, made))
            if self._thread is None:
                # it ends with the work: one that waited would keep the parameters alive
                self._thread = threading.Thread(
                    target=self._work, name="jaxserve-encoder", daemon=True
                )
                self._thread.start()
            return made

    def _next(self) -> list[_Item]:
        """The arrays of the next launch; none ends the thread."""
        with self._lock:
            count = min(self._most, len(self._waiting))
            items = [self._waiting.popleft() for _ in range(count)]
            if not items:
                self._thread = None
            return items

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
                    del self._made[item.key]
                    if error is None:
                        self._keep(item.key, rows[place])
            for place, item in enumerate(items):
                if error is None:
                    item.made.set_result(rows[place])
                else:
                    item.made.set_exception(error)

    def _launch(self, arrays: list[np.ndarray]) -> list[np.ndarray]:
        size = next(one for one in self.sizes if one >= len(arrays))
        batch = np.zeros((size, *self._shape), np.float32)
        batch[: len(arrays)] = arrays
        rows = self._programs[size](self._state, jax.device_put(batch, self._everywhere))
        self.num_launches += 1
        self.num_encoded += len(arrays)
        found = np.asarray(rows)
        return [found[place].copy() for place in range(len(arrays))]

    def _keep(self, key: bytes, rows: np.ndarray) -> None:
        if rows.nbytes > self._cache_bytes:
            return
        self._rows[key] = rows
        self._held += rows.nbytes
        while self._held > self._cache_bytes:
            _, oldest = self._rows.popitem(last=False)
            self._held -= oldest.nbytes
