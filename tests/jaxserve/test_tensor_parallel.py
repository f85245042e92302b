"""`tensor_parallel_size=2` gives transformers' greedy tokens, on fake CPU devices."""

from __future__ import annotations

import json

import pytest
import torch

from tests.fake_devices import said
from tests.jaxserve import oracle
from tests.tiny_models import VOCAB_SIZE

SCRIPT = """
import json, sys
import jax
from jaxserve import LLM, SamplingParams
from jaxserve.errors import ValidationError

folder, prompts = sys.argv[1], json.loads(sys.argv[2])
assert len(jax.devices()) == 4
llm = LLM(
    model=folder, tensor_parallel_size=2, skip_tokenizer_init=True, max_model_len=96,
    max_num_seqs=2, max_num_batched_tokens=16, block_size=8, num_pages=20, compile_ahead=4,
    compile_in_background=False, enable_embeddings=True,
)
pool = llm.client.engine.runner.state.kv.pages
assert pool.addressable_shards[0].data.shape[3] * 2 == pool.shape[3], "heads are sharded"
programs = llm.client.engine.runner.programs.programs
(fast,) = [one for one in programs if one.layout.shape.name == "decode[2] fast"]
text, most = fast.call.as_text(), f"f32[2,{llm.client.model_config.vocab_size}]"
gathered = [line for line in text.splitlines() if " all-gather(" in line and most in line]
assert "all-to-all" in text and not gathered, "no device has all logits of all rows"
params = [
    SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True),
    SamplingParams(temperature=0.8, top_p=0.9, seed=1, max_tokens=24, ignore_eos=True, logprobs=2),
]
tokens = [
    [o.outputs[0].token_ids for o in llm.generate(prompts, p, use_tqdm=False)] for p in params
]
# each device draws one of two rows, by the row's own parameters
own = [
    SamplingParams(temperature=1.0 + row, seed=row, max_tokens=8, ignore_eos=True)
    for row in range(2)
]
drawn = [o.outputs[0].token_ids for o in llm.generate(prompts[:2], own, use_tqdm=False)]
for prompt, param, found in zip(prompts, own, drawn):
    (alone,) = llm.generate([prompt], param, use_tqdm=False)
    assert alone.outputs[0].token_ids == found, "as alone"
vectors = [o.outputs.embedding for o in llm.embed(prompts, "mean", False, use_tqdm=False)]
try:
    LLM(model=folder, tensor_parallel_size=3, skip_tokenizer_init=True)
except ValidationError as error:
    refusal = error.field
print(json.dumps({"tokens": tokens, "vectors": vectors, "refusal": refusal}))
"""


@pytest.mark.slow
@pytest.mark.parametrize("case", ["llama_gqa", "qwen3_tied_biases"])
def test_two_devices_give_the_tokens_of_transformers(case, model_folder) -> None:
    folder = model_folder(case, num_hidden_layers=2, vocab_size=200)  # which two devices divide
    prompts = oracle.prompts(4, VOCAB_SIZE, 40, seed=8)
    seen = json.loads(said(4, "-c", SCRIPT, str(folder), json.dumps(prompts))[-1])
    model = oracle.load(folder)
    assert seen["tokens"][0] == [oracle.greedy(model, prompt, 24) for prompt in prompts]
    for found, prompt in zip(seen["vectors"], prompts, strict=True):
        with torch.no_grad():
            wanted = model.model(torch.tensor([prompt])).last_hidden_state[0].mean(dim=0)
        torch.testing.assert_close(torch.tensor(found), wanted, atol=1e-4, rtol=1e-4)
    assert seen["refusal"] == "tensor_parallel_size"
