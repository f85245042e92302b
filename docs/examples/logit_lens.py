"""The logit lens: what each layer would say, read by the last norm and the head.

nostalgebraist, "interpreting GPT: the logit lens", 2020. Run it with
`python docs/examples/logit_lens.py`.
"""

import numpy as np

from checkpoints import bundled_model_path
from jaxserve import LLM, SamplingParams
from jaxserve.functional import forward, unembed


def main():
    llm = LLM(str(bundled_model_path()), max_num_seqs=4, max_model_len=256)
    tokenizer, model = llm.get_tokenizer(), llm.model_config
    params = SamplingParams(temperature=0.0, max_tokens=6)
    sites = ["layers.*.residual", "logits"]
    (output,) = llm.generate(["13 + 2 ="], params, capture=sites, use_tqdm=False)
    first, generated = len(output.prompt_token_ids) - 1, output.outputs[0].token_ids
    for layer in range(model.num_layers):
        stream = output.captured[f"layers.{layer}.residual"]  # [tokens, hidden size]
        said = np.asarray(unembed(llm.params, stream, model))[first:].argmax(-1)
        print(f"layer {layer}: ", [tokenizer.decode([int(token)]) for token in said])
    print("generated:", [tokenizer.decode([token]) for token in generated])
    print("the last layer says what was generated:", said.tolist() == generated)

    tokens = np.array([*output.prompt_token_ids, *generated])
    functional = np.asarray(forward(llm.params, tokens, model))[first:-1]
    gap = np.abs(functional - output.captured["logits"]).max()
    print(f"largest difference from the functional form: {gap:.1e}")
    llm.close()


if __name__ == "__main__":
    main()
