"""Stages of a model (pipeline parallelism): each has a part of the layers and devices of its own.

Huang et al., "GPipe", 2019; here the stages work on steps of different requests at once.
"""

from __future__ import annotations

from dataclasses import dataclass

from jax.sharding import Mesh

from jaxserve.errors import ValidationError


@dataclass(frozen=True, slots=True)
class Stage:
    """The layers [start, stop) of a model's `num_layers`, on the devices of `mesh`.

    The first stage embeds tokens; the last one has the last norm, the head and the sampler.

    Attributes:
        mesh: of shape (1, tensor_parallel_size), with the axes of `make_mesh`.
        start, stop: of the layers.
        num_layers: of the model.
    """

    mesh: Mesh
    start: int
    stop: int
    num_layers: int

    @property
    def is_last(self) -> bool:
        return self.stop == self.num_layers

    def holds(self, place: tuple[str | int, ...], *, is_tied: bool) -> bool:
        """Whether the stage has the parameter of a place in the module tree.

        Args:
            place: as `nnx.to_flat_state` says it.
            is_tied: the head multiplies by the table of embeddings: the first and the last stage
                have it.
        """
        if place[0] == "blocks":
            layer = int(place[1])
            # the norm that follows the last layer of a stage may be in one kernel with it
            follows = layer == self.stop and place[2] == "input_norm"
            return self.start <= layer < self.stop or follows
        if place[0] == "embedding":
            return self.start == 0 or (self.is_last and is_tied)
        return self.is_last


def check_stages(stages: int, num_layers: int) -> None:
    """Raises ValidationError unless so many stages can have equal numbers of layers."""
    if num_layers % stages:
        allowed = f"a divisor of the model's {num_layers} layers"
        raise ValidationError("pipeline_parallel_size", stages, allowed)


def stages_of(mesh: Mesh, num_layers: int) -> list[Stage]:
    """The stages of a model on a mesh from `make_mesh`; one has all of both."""
    count = mesh.shape["stage"]
    check_stages(count, num_layers)
    if count == 1:
        return [Stage(mesh, 0, num_layers, num_layers)]
    each = num_layers // count
    meshes = [
        Mesh(mesh.devices[one : one + 1], mesh.axis_names, axis_types=mesh.axis_types)
        for one in range(count)
    ]
    return [Stage(own, each * n, each * (n + 1), num_layers) for n, own in enumerate(meshes)]
