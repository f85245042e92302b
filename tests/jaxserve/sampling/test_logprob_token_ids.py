"""logprob_token_ids: log-probabilities of exactly these tokens, and of the generated one."""

from __future__ import annotations

import pytest

from jaxserve import SamplingParams
from jaxserve.errors import ValidationError
from jaxserve.params.sampling_params import MAX_LOGPROB_TOKEN_IDS
from tests.jaxserve import oracle
from tests.tiny_models import VOCAB_SIZE


@pytest.mark.slow
def test_tokens_asked_for_by_id_equal_transformers(model_folder, make_llm) -> None:
    folder = model_folder("llama_gqa", num_hidden_layers=1)
    llm, reference = make_llm(folder), oracle.load(folder)
    ids = [*range(0, VOCAB_SIZE, 1 + VOCAB_SIZE // MAX_LOGPROB_TOKEN_IDS)]
    asked = [ids, None, ids[:3], [5, 6]]
    counts = [None, 2, None, 2]
    prompts = oracle.prompts(len(asked), VOCAB_SIZE, 20, seed=4)
    params = [
        SamplingParams(
            temperature=0.9, seed=5, max_tokens=4, logprobs=count, logprob_token_ids=tokens
        )
        for tokens, count in zip(asked, counts, strict=True)
    ]
    for output, tokens in zip(llm.generate(prompts, params, use_tqdm=False), asked):
        done = output.outputs[0]
        known = output.prompt_token_ids + done.token_ids
        expected = oracle.logprobs(reference, known)[len(output.prompt_token_ids) - 1 :]
        for row, position in enumerate(done.logprobs):
            assert next(iter(position)) == done.token_ids[row]
            own = {done.token_ids[row]}
            assert tokens is None or set(position) == own | set(tokens)
            assert tokens is not None or len(own) <= len(position) <= 3
            for token, entry in position.items():
                value = expected[row, token].item()
                assert entry.logprob == pytest.approx(value, abs=2e-4)
                assert entry.rank in (None, int((expected[row] > value).sum()) + 1)


def test_what_is_refused() -> None:
    with pytest.raises(ValidationError, match="logprob_token_ids='129 tokens'"):
        SamplingParams(logprobs=1, logprob_token_ids=[1] * 129)
    with pytest.raises(ValidationError, match="logprobs=2 is not supported: None or 1"):
        SamplingParams(logprobs=2, logprob_token_ids=[1])
    with pytest.raises(ValidationError, match="logprob_token_ids=-1"):
        SamplingParams(logprobs=1, logprob_token_ids=[-1])
    with pytest.raises(ValidationError, match="logprob_token_ids=99"):
        SamplingParams(logprobs=1, logprob_token_ids=[99]).verify(50, 100, 20)
