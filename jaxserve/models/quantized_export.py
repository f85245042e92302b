"""The tensors of a Hugging Face checkpoint, quantised or not, made of a loaded model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
from flax import nnx

from checkpoints.quantize.quantized_matrices import KeptMatrix, config_of, method_of, written
from checkpoints.quantize.rounding import RoundedMatrix
from jaxserve.errors import ValidationError
from jaxserve.models.export import tensors_of
from jaxserve.models.protocol import Model
from jaxserve.models.quant_array import QuantArray
from jaxserve.models.registry import family_of
from jaxserve.models.sources import Place, Source, Stack

WEIGHT = ".weight"


class CheckpointExport:
    """A model as tensors, and the config that its quantised weights need.

    Attributes:
        method: quant_method of the checkpoint.
        overrides: of config.json beside `quantization_config`.
    """

    def __init__(self, model: Model, source_method: str | None, dtype: np.dtype):
        """Chooses the method.

        Args:
            model: with its arrays.
            source_method: quant_method of the checkpoint that it comes from; None: of none.
            dtype: of its floats.
        """
        self._dtype = dtype
        self._family, self._config = family_of(model.config), model.config
        self._variables = list(nnx.to_flat_state(nnx.split(model)[1]))
        self._matrices: dict[str, KeptMatrix] = {}
        self._groups: dict[str, dict[str, Any]] = {}
        self.overrides: dict[str, Any] = {}
        for place, variable in self._variables:
            value = variable.get_value()
            if not isinstance(value, QuantArray):
                continue
            if place[0] == "lm_head" and model.config.tie_word_embeddings:
                # the embedding has floats, and its copy that is multiplied has not
                self.overrides["tie_word_embeddings"] = False
            stored = value.format.stored
            zeros = "none" if stored.zeros == "none" else "integer"
            for name, shape in self._source(place).tensors(value.shape, True).items():
                matrix = KeptMatrix(replace(stored, zeros=zeros), (shape[0], shape[1]))
                self._matrices[name.removesuffix(WEIGHT)] = matrix
        self.method = method_of(self._matrices.values(), source_method)

    @property
    def is_quantized(self) -> bool:
        """Whether any weight is."""
        return bool(self._matrices)

    def tensors(self) -> Iterator[tuple[str, np.ndarray]]:
        """Name and value of every tensor, parameter by parameter.

        Raises:
            ValidationError: a weight with zeros that are no integers.
        """
        for place, variable in self._variables:
            value = variable.get_value()
            source = self._source(place)
            if isinstance(value, QuantArray):
                yield from self._quantized(".".join(map(str, place)), source, value)
            else:
                is_matrix = variable.get_metadata("fill") is None
                yield from tensors_of(source, np.asarray(value), is_matrix).items()

    def config(self) -> dict[str, Any]:
        """The quantization_config, once all tensors are made."""
        kept = []
        for place, variable in self._variables:
            is_matrix = variable.get_metadata("fill") is None
            if is_matrix and not isinstance(variable.get_value(), QuantArray):
                names = [] if place[0] == "embedding" else self._source(place).names
                kept += [name.removesuffix(WEIGHT) for name in names]
        if "lm_head" not in {*kept, *self._matrices}:
            kept.append("lm_head")
        return config_of(self.method, self._matrices, self._groups, kept)

    def _source(self, place: Place) -> Source | Stack:
        return self._family.source(place, self._config)

    def _quantized(
        self, name: str, source: Source | Stack, value: QuantArray
    ) -> Iterator[tuple[str, np.ndarray]]:
        """The tensors of one parameter."""
        elements, scales, zeros = value.stored_arrays()
        if zeros is not None and zeros.dtype == np.float32:
            zeros = _integer_zeros(name, scales, zeros)
        order = None if value.order is None else np.asarray(value.order)
        if order is not None:
            natural = np.empty_like(elements)
            natural[..., order] = elements
            elements = natural
        static = None if value.input_scale is None else float(np.asarray(value.input_scale)[0])
        by_name = [
            {} if part is None else tensors_of(source, part, True)
            for part in (elements, scales, zeros)
        ]
        for weight in by_name[0]:
            module = weight.removesuffix(WEIGHT)
            own, own_scales, own_zeros = (part.get(weight) for part in by_name)
            assert own is not None and own_scales is not None
            rounded = RoundedMatrix(own, own_scales, own_zeros, order)
            matrix = self._matrices[module]
            made = written(self.method, matrix, rounded, self._dtype, static)
            self._groups[module] = made.group
            yield from ((f"{module}.{part}", tensor) for part, tensor in made.tensors.items())


def _integer_zeros(name: str, scales: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """int16 of zeros that are kept times their scales, float32.

    Raises:
        ValidationError: they are no integers.
    """
    quotients = np.divide(offsets, scales, out=np.zeros_like(offsets), where=scales != 0)
    zeros: np.ndarray = np.rint(quotients)
    if not (zeros * scales == offsets).all():
        allowed = "weights with integer zeros: no Hugging Face format has other ones"
        raise ValidationError("model", name, allowed)
    return zeros.astype(np.int16)
