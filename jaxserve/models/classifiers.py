"""Models that classify: any family's decoder with a head of labels in the place of the lm head."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from checkpoints.quantized import TensorReader
from jaxserve.errors import UnsupportedModelError
from jaxserve.models.config import Head, ModelConfig
from jaxserve.models.hf_fields import one_of, refuse
from jaxserve.models.sources import Part, Place, Source, Stack, whole

if TYPE_CHECKING:
    from jaxserve.models.registry import Family

# as transformers names them, where it is not by the rule
_NAMES = {"Gemma3ForCausalLM": "Gemma3TextForSequenceClassification"}
_METHODS = ("from_2_way_softmax", "no_post_processing")
_PROBLEMS = ("regression", "single_label_classification", "multi_label_classification")
_PLACE = "torch.nn.modules.activation."  # of the names that sentence-transformers writes
_FUNCTIONS = {"torch.nn.modules.linear.Identity": "none"} | {
    f"{_PLACE}{name}": "by_count" for name in ("Sigmoid", "Softmax")
}


def classifier_of(family: Family) -> Family:
    """The family of `...ForSequenceClassification` beside one of `...ForCausalLM`."""
    name = family.architecture
    return replace(
        family,
        architecture=_NAMES.get(name, name.replace("ForCausalLM", "ForSequenceClassification")),
        read_config=partial(_read_config, family.read_config),
        source=partial(_source, family.source),
    )


def _read_config(
    decoder: Callable[[str, Mapping[str, Any]], ModelConfig],
    architecture: str,
    config: Mapping[str, Any],
) -> ModelConfig:
    return replace(decoder(architecture, config), head=_head(config))


def _head(config: Mapping[str, Any]) -> Head:
    """The head that a parsed config.json describes.

    Raises:
        UnsupportedModelError: an option or value that is not implemented.
    """
    refuse(config, "use_sep_token", unless=False)
    tokens, method = config.get("classifier_from_token"), config.get("method")
    is_reranker = config.get("is_original_qwen3_reranker") is True
    if tokens is None:
        if method is not None or is_reranker:
            allowed = "texts of tokens, whose rows of the lm head become the head's"
            raise UnsupportedModelError("classifier_from_token", None, allowed)
        labels = _labels(config)
        return Head(labels=labels, activation=_activation(config, len(labels)))
    if is_reranker:
        method = _METHODS[0]
    is_difference = one_of("method", method, _METHODS) == _METHODS[0]
    if not isinstance(tokens, list) or not all(isinstance(one, str) for one in tokens):
        raise UnsupportedModelError("classifier_from_token", tokens, "a list of texts of tokens")
    if not tokens or (is_difference and len(tokens) != 2):
        allowed = "two tokens, no and yes" if is_difference else "at least one token"
        raise UnsupportedModelError("classifier_from_token", tokens, allowed)
    count = 1 if is_difference else len(tokens)
    names = tuple(f"LABEL_{index}" for index in range(count))
    return Head(
        labels=names,
        activation=_activation(config, count),
        tokens=tuple(tokens),
        is_difference=is_difference,
    )


def _labels(config: Mapping[str, Any]) -> tuple[str, ...]:
    """The names of the labels; transformers has two where a config says nothing."""
    named, count = config.get("id2label"), config.get("num_labels")
    if not isinstance(named, Mapping | None):
        raise UnsupportedModelError("id2label", named, "an object: number -> name of a label")
    if count is None:
        count = 2 if named is None else len(named)
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise UnsupportedModelError("num_labels", count, "an integer >= 1")
    # where the numbers differ transformers makes names of its own
    found = {str(key): name for key, name in (named or {}).items()}
    found = found if len(found) == count else {}
    return tuple(str(found.get(str(index), f"LABEL_{index}")) for index in range(count))


def _activation(config: Mapping[str, Any], count: int) -> str:
    """As vLLM takes it: of the problem, else of sentence-transformers, else by the labels."""
    by_count = "softmax" if count > 1 else "sigmoid"
    problem = config.get("problem_type")
    if problem is not None:
        kinds = dict(zip(_PROBLEMS, ("none", by_count, "sigmoid"), strict=True))
        return kinds[one_of("problem_type", problem, _PROBLEMS)]
    written = config.get("sentence_transformers")
    function = written.get("activation_fn") if isinstance(written, Mapping) else None
    field = "sentence_transformers.activation_fn"
    if function is None:
        field = "sbert_ce_default_activation_function"
        function = config.get(field)
    kind = "by_count" if function is None else _FUNCTIONS[one_of(field, function, _FUNCTIONS)]
    return by_count if kind == "by_count" else kind


def _source(
    decoder: Callable[..., Source | Stack], place: Place, config: ModelConfig
) -> Source | Stack:
    """The tensors of a parameter."""
    head = config.head
    if head is None or place != ("score",):
        return decoder(place, config)
    if not head.tokens:
        return whole("score.weight")
    from_place = ("embedding",) if config.tie_word_embeddings else ("lm_head",)
    (name,) = decoder(from_place, config).names
    rows = tuple(Part(name, first=token) for token in head.token_ids)
    return HeadRows(rows, len(rows), config.vocab_size, head.is_difference)


@dataclass(frozen=True, slots=True)
class HeadRows(Source):
    """A head of labels that is made of rows of an lm head, each a part.

    Attributes:
        num_rows: that the lm head has.
        is_difference: the one label's is the second row less the first.
    """

    num_rows: int = 0
    is_difference: bool = False

    def tensors(self, shape: tuple[int, ...], is_matrix: bool) -> dict[str, tuple[int, ...]]:
        """Name and shape of the lm head's tensor."""
        return dict.fromkeys(self.names, (self.num_rows, shape[1]))

    def read(
        self,
        reader: TensorReader,
        shape: tuple[int, ...],
        index: tuple[slice, ...],
        dtype: np.dtype,
        is_matrix: bool,
    ) -> np.ndarray:
        """As of a `Source`; the difference is taken in float32."""
        rows, all_rows = (self.indices, shape[1]), (slice(None), index[1])
        found = Source.read(self, reader, rows, all_rows, np.dtype(np.float32), is_matrix)
        if self.is_difference:
            found = found[1:] - found[:1]
        return found[index[0]].astype(dtype)
