"""Outputs have vLLM's fields, and log-probabilities in few lists read as a list of dicts."""

from __future__ import annotations

import pytest

from jaxserve import CompletionOutput, RequestOutput
from jaxserve.outputs import FlatLogprobs, Logprob

# vLLM 0.33.0, vllm/outputs.py
FIELDS = {
    CompletionOutput: "index text token_ids cumulative_logprob logprobs routed_experts "
    "finish_reason stop_reason lora_request sampling_mask spec_decode_metrics weight_versions",
    RequestOutput: "request_id prompt prompt_token_ids prompt_logprobs outputs finished metrics "
    "lora_request encoder_prompt encoder_prompt_token_ids num_cached_tokens "
    "num_cache_creation_tokens prompt_token_id_logprobs kv_transfer_params ec_transfer_params",
}
OUTPUTS = {
    CompletionOutput: CompletionOutput(0, "a", [1]),
    RequestOutput: RequestOutput("r", None, [1], [], True),
}


@pytest.mark.parametrize("kind", FIELDS)
def test_every_field_of_vllm_is_there(kind: type) -> None:
    missing = [name for name in FIELDS[kind].split() if not hasattr(OUTPUTS[kind], name)]
    assert not missing
    assert OUTPUTS[kind].lora_request is None


def test_few_lists_read_as_a_list_of_dicts() -> None:
    positions = [None, {5: Logprob(-0.5, 1, "a"), 7: Logprob(-2.0, None)}, {9: Logprob(0.0, 1)}]
    flat = FlatLogprobs.of(positions)
    assert [*flat] == [{}, *positions[1:]] and len(flat) == 3 and flat[-1] == positions[2]
    assert flat.token_ids == [5, 7, 9] and flat.ranks == [1, None, 1]
    assert (flat.start_indices, flat.end_indices) == ([0, 0, 2], [0, 2, 3])
    assert isinstance(flat[1:], FlatLogprobs) and [*flat[1:]] == positions[1:]
    twin = flat.copy()
    twin.append(positions[1])
    assert len(twin) == 4 and len(flat) == 3 and len(flat.token_ids) == 3
