"""Seeded workloads: prompts as token ids with a fixed number of output tokens each."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING

from jaxserve.config.engine_config import EngineConfig
from jaxserve.errors import ValidationError
from jaxserve.params.sampling_params import RequestOutputKind, SamplingParams

if TYPE_CHECKING:
    from jaxserve.loading.engine_build import Footprint
    from jaxserve.models.config import ModelConfig


@dataclass(frozen=True, slots=True)
class WorkItem:
    """One request: its prompt, and how many tokens it generates (end-of-sequence ignored)."""

    prompt_token_ids: list[int]
    output_len: int

    def params(
        self, *, temperature: float = 0.0, seed: int | None = None, n: int = 1
    ) -> SamplingParams:
        return SamplingParams(
            n=n,
            temperature=temperature if n == 1 else 1.0,  # greedy ones would be equal
            seed=seed,
            max_tokens=self.output_len,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )


def random_tokens(rng: random.Random, count: int, vocab_size: int) -> list[int]:
    """Token ids from the upper part of the vocabulary, where no special tokens live."""
    first = min(16, vocab_size - 1)
    return [rng.randrange(first, vocab_size) for _ in range(count)]


def fixed(
    count: int, input_len: int, output_len: int, vocab_size: int, seed: int | str
) -> list[WorkItem]:
    """`count` requests of equal lengths."""
    rng = random.Random(seed)
    return [WorkItem(random_tokens(rng, input_len, vocab_size), output_len) for _ in range(count)]


def uniform(count: int, shortest: int, longest: int, vocab_size: int, seed: int) -> list[WorkItem]:
    """`count` requests whose prompt and output lengths are uniform in `shortest .. longest`."""
    if not 1 <= shortest <= longest:
        raise ValidationError("lengths", (shortest, longest), "1 <= shortest <= longest")
    rng = random.Random(seed)
    lengths = [
        (rng.randint(shortest, longest), rng.randint(shortest, longest)) for _ in range(count)
    ]
    return [WorkItem(random_tokens(rng, i, vocab_size), o) for i, o in lengths]


def context_length(config: EngineConfig) -> int:
    """Tokens of prompt and output that an engine takes; fetches config.json where it has to."""
    from jaxserve.loading.hub import locate
    from jaxserve.models.config_reader import read_model_config

    if config.max_model_len is not None:
        return config.max_model_len
    return read_model_config(locate(config).model, config.hf_overrides).max_context_length


def require_room(longest: int, config: EngineConfig) -> None:
    """Refuse a workload that cannot be served, before a model is loaded for it.

    Args:
        longest: tokens of the longest prompt and output together.
        config: of the engine.

    Raises:
        ValidationError: the workload is longer than the context, or there is no such model.
        HubError: the model's config.json cannot be fetched.
    """
    limit = context_length(config)
    if longest > limit:
        raise ValidationError(
            "prompt and output", f"{longest} tokens", f"at most the context of {limit} tokens"
        )


def bytes_moved(
    items: list[WorkItem], n: int, num_steps: int, config: ModelConfig, footprint: Footprint
) -> int:
    """Bytes that `num_steps` steps must read for `items`: weights each step, each row's context.

    The lower bound that a roofline uses: activations and the reads of prefill chunks are left out,
    and so is what `bytes_saved` tells. `num_steps` and `footprint` are of the engine, the other
    arguments those of `flops_of_items`.
    """
    context = n * sum(
        item.output_len * len(item.prompt_token_ids) + item.output_len * (item.output_len - 1) // 2
        for item in items
    )
    saved = bytes_saved(items, n, num_steps, config, footprint)
    return num_steps * footprint.weight_bytes + context * footprint.kv_bytes_per_token - saved


def bytes_saved(
    items: list[WorkItem], n: int, num_steps: int, config: ModelConfig, footprint: Footprint
) -> int:
    """Bytes that need not be read beside `bytes_moved`: idle experts, tokens before windows.

    Of experts it is an estimate: tokens are routed evenly, and a weight of an expert has as many
    bytes as any other. Generated tokens are spread evenly over the steps. Prompts are not: a chunk
    of one fills a step, so that few steps have many tokens and the others none of these.
    """
    from jaxserve.models.cost import Row
    from jaxserve.models.savings import tokens_unread, weights_unread

    # the last token of a sequence passes through nothing
    tokens = n * sum(item.output_len - 1 for item in items)
    unread = weights_unread(config, tokens / max(1, num_steps))
    rows = [Row(len(item.prompt_token_ids), item.output_len) for item in items]
    unseen = n * tokens_unread(config, rows)
    return int(num_steps * footprint.weight_bytes * unread + unseen * footprint.kv_bytes_per_token)


def flops_of_items(items: list[WorkItem], n: int, config: ModelConfig, num_found: int) -> int:
    """Floating-point operations of requests of `n` sequences each.

    Args:
        items: the requests; the sequences of one share what their prompt costs.
        n: sequences of each.
        config: of the model.
        num_found: prompt tokens that the prefix cache had; taken as spread evenly.
    """
    from jaxserve.models.cost import Row, flops_of

    rows, samples = [], 0
    for item in items:
        prompt, output = len(item.prompt_token_ids), item.output_len
        cached = min(num_found // len(items), prompt - 1)
        # the last token of a sequence passes through nothing
        rows += [Row(cached, prompt - cached), *[Row(prompt, output - 1)] * n]
        samples += n * output
    return flops_of(config, rows, samples)
