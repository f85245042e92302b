"""Texts sorted into classes: the answer is constrained to their names, and scored exactly.

Run it with `python docs/examples/batch_classification.py`; constraints need the extra `structured`.
"""

from collections import Counter

from checkpoints import bundled_model_path
from jaxserve import LLM, SamplingParams
from jaxserve.params.structured_outputs_params import StructuredOutputsParams

CLASSES = ["sum", "list", "story"]
TEXTS = [
    "13 + 2 =",
    "Sort: 51,60,89,61",
    "Write a story: Carla, bear, kite.",
    "Max of 40, 66, 92",
    "7 + 18 =",
    "Write a story: Tom, boat, lamp.",
]
QUESTION = "{}\nThis was a "


def main():
    llm = LLM(str(bundled_model_path()), max_num_seqs=8, max_model_len=256)
    asked = SamplingParams(
        temperature=0.0,
        max_tokens=16,
        structured_outputs=StructuredOutputsParams(choice=CLASSES),
    )
    prompts = [QUESTION.format(text) for text in TEXTS]
    said = [output.outputs[0].text for output in llm.generate(prompts, asked, use_tqdm=False)]
    pairs = [(prompt, name) for prompt in prompts for name in CLASSES]
    scores = iter(llm.loglikelihood(pairs))
    for text, answer in zip(TEXTS, said):
        told = ", ".join(f"{name} {next(scores).total:.1f}" for name in CLASSES)
        print(f"{text!r}: {answer} ({told})")
    print("of each class:", dict(Counter(said)))
    print("every answer is one of the classes:", set(said) <= set(CLASSES))
    llm.close()


if __name__ == "__main__":
    main()
