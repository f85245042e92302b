"""A batch of questions sorted into classes: each answer is constrained to those of its question.

The class of a question is the place of its largest number. Run it with
`python docs/examples/batch_classification.py`; constraints need the extra `structured`.
"""

import random

from checkpoints import bundled_model_path
from jaxserve import LLM, SamplingParams, StructuredOutputsParams

PLACES = ("first", "second", "third")
COUNT = 24


def main():
    llm = LLM(str(bundled_model_path()), max_num_seqs=COUNT, max_model_len=256)
    draw = random.Random(0)
    questions = [draw.sample(range(10, 100), len(PLACES)) for _ in range(COUNT)]
    chats = [
        [{"role": "user", "content": f"Max of {', '.join(map(str, numbers))}"}]
        for numbers in questions
    ]
    choices = [[f"Maximum: {number}" for number in numbers] for numbers in questions]
    asked = [
        SamplingParams(
            temperature=0.0,
            max_tokens=16,
            logprobs=0,
            structured_outputs=StructuredOutputsParams(choice=one),
        )
        for one in choices
    ]
    answers = [output.outputs[0] for output in llm.chat(chats, asked, use_tqdm=False)]
    right, known = 0, True
    for numbers, allowed, answer in zip(questions, choices, answers):
        known &= answer.text in allowed
        place = allowed.index(answer.text)
        right += numbers[place] == max(numbers)
        print(numbers, PLACES[place], f"log-probability {answer.cumulative_logprob:.2f}")
    print(f"right: {right} of {COUNT}")
    print("every answer is one of its question's:", known)
    print("far more than chance:", right > 0.6 * COUNT)
    llm.close()


if __name__ == "__main__":
    main()
