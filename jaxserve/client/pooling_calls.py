"""What an engine in this process makes of whole prompts: vectors, labels and scores."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence
from typing import Any

from jaxserve.client.call_arguments import list_of_prompts, one_a_prompt
from jaxserve.client.engine_calls import EngineCalls
from jaxserve.client.pair_prompts import PairText, scoring_params
from jaxserve.client.prompt_reader import Prompt
from jaxserve.client.similarity import check_scores, pair_up, score
from jaxserve.errors import ValidationError
from jaxserve.outputs import (
    ClassificationRequestOutput,
    EmbeddingRequestOutput,
    PoolingRequestOutput,
    RequestOutput,
    ScoringRequestOutput,
)
from jaxserve.params.lora_request import LoRARequest
from jaxserve.params.pooling_params import CLASSIFY, EMBED, PoolingParams
from jaxserve.request.queueing import Queueing


class PoolingCalls(EngineCalls):
    """Calls that run prompts and generate nothing; each waits for all of its prompts."""

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling: str = "last",
        normalize: bool = True,
        *,
        layer: int | None = None,
        use_tqdm: bool = True,
        timeout: float | None = None,
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        lora_request: LoRARequest | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
    ) -> list[EmbeddingRequestOutput]:
        """The hidden states of prompts, one vector each, in their order.

        Args:
            prompts: as of `generate`.
            pooling: "last", "mean" or "cls", see `PoolingParams`.
            normalize: whether vectors are given the length 1.
            layer: whose hidden states, as in transformers' `hidden_states`; the last when None.
            use_tqdm: show a progress bar.
            timeout: seconds after which every request ends wherever it is, without a vector.
            pooling_params: for all prompts, or one for each, in the place of `pooling`, `normalize`
                and `layer`.
            lora_request: None, there are no adapters yet.
            tokenization_kwargs: how prompts become tokens, see `Tokenization.of`.

        Raises:
            ValidationError: the engine was made without `enable_embeddings`, the model classifies,
                or a prompt or value that cannot be served; nothing is run then.
            QueueFullError, EngineDeadError: as of `generate`.
        """
        params = PoolingParams(pooling, None if normalize is True else normalize, layer)
        if pooling_params is not None and params != PoolingParams():
            allowed = "nothing beside pooling, normalize and layer"
            raise ValidationError("pooling_params", pooling_params, allowed)
        asked = params if pooling_params is None else pooling_params
        found = self._pooled(
            prompts, asked, EMBED, lora_request, tokenization_kwargs, timeout, use_tqdm
        )
        return [EmbeddingRequestOutput.of(one) for one in found]

    def classify(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        use_tqdm: bool = True,
        lora_request: LoRARequest | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
    ) -> list[ClassificationRequestOutput]:
        """The probabilities of a model's labels for prompts, in their order.

        `PoolingParams(use_activation=False)` gives the scores themselves. Arguments and errors are
        those of `embed`.
        """
        found = self._pooled(
            prompts, pooling_params, CLASSIFY, lora_request, tokenization_kwargs, None, use_tqdm
        )
        return [ClassificationRequestOutput.of(one) for one in found]

    def encode(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        *,
        use_tqdm: bool = True,
        lora_request: LoRARequest | None = None,
        pooling_task: str | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
    ) -> list[PoolingRequestOutput]:
        """As `embed` or `classify`, by the task, with arrays float32[N] in `outputs.data`.

        Args:
            pooling_task: "embed" or "classify"; None: what the model does.
        """
        found = self._pooled(
            prompts, pooling_params, pooling_task, lora_request, tokenization_kwargs, None, use_tqdm
        )
        return [PoolingRequestOutput.of(one) for one in found]

    def score(
        self,
        data_1: Prompt | Sequence[Prompt],
        data_2: Prompt | Sequence[Prompt],
        /,
        *,
        use_tqdm: bool = True,
        pooling_params: PoolingParams | None = None,
        lora_request: LoRARequest | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        chat_template: str | None = None,
    ) -> list[ScoringRequestOutput]:
        """How well texts go together, one output a pair.

        A model with one label scores the pair, which is one prompt; for any other it is the cosine
        of their vectors.

        Args:
            data_1: one text, which meets all of `data_2`, or as many.
            data_2: the others.
            use_tqdm: show a progress bar.
            pooling_params: of all; `extra_kwargs` may have `max_tokens_per_query`,
                `max_tokens_per_doc` and `chat_template_kwargs`.
            lora_request, tokenization_kwargs: as of `embed`.
            chat_template: puts a pair together, from messages of the roles "query" and "document";
                None: that of the engine's setting, and without one the texts are one.

        Raises:
            ValidationError: numbers of texts that make no pairs, a template where texts have
                vectors, besides what `embed` raises.
        """
        if not isinstance(pooling_params, PoolingParams | None):
            raise ValidationError("pooling_params", pooling_params, "PoolingParams, or none")
        first, second = list_of_prompts(data_1), list_of_prompts(data_2)
        pairs = pair_up(len(first), len(second), ("data_1", "data_2"))
        most = self.config.scheduler.max_model_len
        params, limits, variables = scoring_params(pooling_params or PoolingParams(), most)
        rules = self._tokenization(tokenization_kwargs)
        by_head = check_scores(self._opened.plan.model.labels)
        if by_head or limits.max_tokens_per_query:
            first = [limits.query(self.get_tokenizer(), _text(one)) for one in first]
        if by_head or limits.max_tokens_per_doc:
            second = [limits.document(self.get_tokenizer(), _text(one)) for one in second]
        if not by_head:
            if chat_template is not None or variables:
                allowed = "none: this model makes a vector of each text"
                raise ValidationError("chat_template", chat_template or variables, allowed)
            vectors = self.encode(
                [*first, *second],
                params,
                use_tqdm=use_tqdm,
                lora_request=lora_request,
                pooling_task=EMBED,
                tokenization_kwargs=tokenization_kwargs,
            )
            one, other = vectors[: len(first)], vectors[len(first) :]
            return [score(one[i], other[j]) for i, j in pairs]
        together = PairText(
            chat_template is not None or self.config.asked.chat_template is not None,
            chat_template,
            variables,
            rules.cut,
            rules.add_special_tokens is not False,
        )
        tokenizer = self.get_tokenizer()
        prompts = [together.prompt(tokenizer, _text(first[i]), _text(second[j])) for i, j in pairs]
        found = self._pooled(prompts, params, CLASSIFY, lora_request, None, None, use_tqdm)
        return [ScoringRequestOutput.of(one) for one in found]

    def _pooled(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: PoolingParams | Sequence[PoolingParams] | None,
        task: str | None,
        lora_request: LoRARequest | None,
        tokenization_kwargs: Mapping[str, Any] | None,
        timeout: float | None,
        use_tqdm: bool,
    ) -> list[RequestOutput]:
        """The outputs of prompts that are pooled."""
        self._check_ready(lora_request)
        items = self._tokenised(list_of_prompts(prompts), tokenization_kwargs)
        queueing = Queueing(time.monotonic(), timeout=timeout)
        asked_of_all = PoolingParams() if params is None else params
        every = one_a_prompt("pooling_params", asked_of_all, PoolingParams, len(items))
        prepared = []
        for prompt, asked in zip(items, every, strict=True):
            if task is not None and asked.task not in (None, task):
                raise ValidationError("task", asked.task, f"{task!r}, or none")
            own = asked if task is None else dataclasses.replace(asked, task=task)
            prepared.append(self._opened.requests.prepare(prompt, own, queueing))
        return self._opened.requests.run(prepared, use_tqdm)


def _text(given: Prompt) -> str:
    """A text of a pair."""
    if not isinstance(given, str):
        raise ValidationError("data", given, "texts, which are put together or cut")
    return given
