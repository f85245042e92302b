"""A steering vector: the difference of two captured states, added for other requests.

Turner and others, "Activation Addition: Steering Language Models Without Optimization", 2023. Run
it with `python docs/examples/steering_vector.py`.
"""

from checkpoints import bundled_model_path
from jaxserve import LLM, SamplingParams
from jaxserve.params.probes import add_vector

SITE = "layers.1.residual"
SCALES = (0.0, 1.0, 4.0)


def main():
    llm = LLM(str(bundled_model_path()), max_num_seqs=4, max_model_len=256)
    one = SamplingParams(temperature=0.0, max_tokens=1)
    texts = ["Max of 40, 66, 92", "Sort: 51,60,89,61"]
    captured = llm.generate(texts, one, capture=[SITE], use_tqdm=False)
    largest, ordered = (output.captured[SITE] for output in captured)  # [tokens, hidden size]
    print("captured:", largest.shape, ordered.shape)
    vector = largest[-1] - ordered[-1]

    params, prompt = SamplingParams(temperature=0.0, max_tokens=16), "Sort: 12,70,33"
    (before,) = llm.generate([prompt], params, use_tqdm=False)
    changes = [[], *([add_vector(SITE, vector, scale)] for scale in SCALES)]
    outputs = llm.generate([prompt] * 4, params, interventions=changes, use_tqdm=False)
    for scale, output in zip(("none", *SCALES), outputs):
        print(f"{scale}:", repr(output.outputs[0].text))
    tokens = [output.outputs[0].token_ids for output in outputs]
    print("the row without one is as it was:", tokens[0] == before.outputs[0].token_ids)
    print("scale 0 changes nothing:", tokens[1] == tokens[0])
    print("scale 4 changes something:", tokens[3] != tokens[0])
    llm.close()


if __name__ == "__main__":
    main()
