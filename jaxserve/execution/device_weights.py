"""The weights on the devices: their bytes, how they are put away and taken back, who reads them."""

from __future__ import annotations

import hashlib
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from jaxserve.execution.parameters import ModelStructure, split_model
from jaxserve.models.linear import dequantized_bytes
from jaxserve.models.protocol import Model
from jaxserve.models.streamed import HELD, StreamedBlocks, streamed_bytes
from jaxserve.parallel.placement import HOST, HostCopy, put_away, taken_back

SAMPLES = 256  # numbers of an array that stand for it


@dataclass
class StageWeights:
    """The parameters of a stage, see `split_model`.

    Attributes:
        structure: how to get the module back from them.
        leaves: the parameters; their shapes with shardings where they are not on the devices.
        kept: of those that were put away, what the host's memory has.
    """

    structure: ModelStructure
    leaves: tuple[Any, ...]
    kept: list[HostCopy | None] | None = None


class DeviceWeights:
    """The parameters of an engine; shapes alone before `set`.

    Args:
        models: of each stage, in order, their parameters `jax.ShapeDtypeStruct`s with shardings.
        mapped: bytes of the parameters that may lie in mapped files.

    Attributes:
        stages: what each stage has of them.
    """

    def __init__(self, models: Sequence[Model], *, mapped: int = 0):
        self.stages = [StageWeights(*split_model(model)) for model in models]
        self._mapped = mapped
        self._load: Callable[[], Sequence[Model]] | None = None
        self._num_readers = 0  # threads that trace a program, which holds the parameters
        self._readers_left = threading.Condition()

    @property
    def leaves(self) -> tuple[Any, ...]:
        """The parameters of all stages."""
        return tuple(leaf for stage in self.stages for leaf in stage.leaves)

    @property
    def device_bytes(self) -> int:
        """Bytes on each device of the stage that has the most."""
        return max(bytes_on_device(stage.leaves) for stage in self.stages)

    @property
    def unmapped_bytes(self) -> int:
        """The same without those that may lie in mapped files."""
        return max(0, self.device_bytes - self._mapped)

    @property
    def host_bytes(self) -> int:
        """Bytes in the host's memory, from where steps bring them."""
        on_host = [leaf for leaf in self.leaves if leaf.sharding.memory_kind == HOST]
        return sum(leaf.size * leaf.dtype.itemsize for leaf in on_host)

    def set(
        self, models: Sequence[Model], load: Callable[[], Sequence[Model]] | None = None
    ) -> None:
        """Take the parameters themselves, of the shapes, types and shardings that were told.

        Args:
            models: of each stage, with the parameters.
            load: reads them again; None: they are in no file.
        """
        self._load = load
        for stage, model in zip(self.stages, models, strict=True):
            (_, stage.leaves), stage.kept = split_model(model), None

    def model(self) -> Model:
        """The model with its parameters, of the one stage that there is."""
        (stage,) = self.stages
        return stage.structure.merge(stage.leaves)

    def digest(self) -> bytes:
        """Bytes that stand for the weights: a digest of some numbers of each array.

        Files of pages are named by it, so it tells models of one shape apart.
        """
        digest = hashlib.blake2b(digest_size=32)
        for leaf in self.leaves:
            part = leaf.addressable_shards[0].data
            # NumPy reads a CPU's memory, and the host's
            (device,) = part.devices()
            is_here = device.platform == "cpu" or leaf.sharding.memory_kind == HOST
            flat = (np.asarray(part) if is_here else part).reshape(-1)
            digest.update(np.asarray(flat[:: max(1, flat.size // SAMPLES)]).tobytes())
        return digest.digest()

    def put_away(self, *, keep: bool) -> None:
        """Free them on the devices; only shapes and shardings are left there.

        Args:
            keep: whether host memory keeps them, or they stay mapped where they lie in files; else
                they are read again.
        """
        if keep and self._mapped and self._load is not None:
            return  # no memory is theirs alone, and another store may be in the folder by then
        for stage in self.stages:
            stage.leaves, stage.kept = put_away(stage.leaves, keep=keep)

    def take_back(self) -> None:
        """Have those that were put away on the devices again."""
        for stage in self.stages:
            if all(isinstance(leaf, jax.Array) for leaf in stage.leaves):
                continue  # they stayed, or came back before another stage's failed
            if stage.kept is None:  # then no stage's were kept
                assert self._load is not None
                self.set(self._load(), self._load)
                return
            stage.leaves, stage.kept = taken_back(stage.leaves, stage.kept), None

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Within, `close` does not take them away."""
        with self._readers_left:
            self._num_readers += 1
        try:
            yield
        finally:
            with self._readers_left:
                self._num_readers -= 1
                self._readers_left.notify_all()

    def close(self) -> None:
        """Wait until no thread is within `reading`, then drop the parameters.

        `Runner.close` has made `check_alive` raise before it calls this, so a thread that enters
        `reading` afterwards does not take them.
        """
        with self._readers_left:
            self._readers_left.wait_for(lambda: self._num_readers == 0)
        for stage in self.stages:
            stage.leaves, stage.kept = (), None


def bytes_on_device(leaves: Sequence[Any]) -> int:
    """Of arrays, or of their shapes with shardings, on each device."""
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in leaves
        if leaf.sharding.memory_kind != HOST
    )


def working_bytes(model: Model, matmul: tuple[str, ...], itemsize: int, num_devices: int) -> int:
    """Bytes of weights that a step has on a device beside the parameters there.

    They are a weight that it dequantises, of which a device has the part that it multiplies with,
    and layers that it brings from the host, as many as it holds at once.

    Args:
        model: with its parameters or their shapes.
        matmul, itemsize: see `dequantized_bytes`.
        num_devices: that share it.
    """
    streamed: StreamedBlocks | None = getattr(model, "streamed", None)
    brought = 0 if streamed is None else HELD * streamed_bytes(streamed) // streamed.count
    return dequantized_bytes(model, matmul, itemsize) // num_devices + brought
