"""A batch of questions sorted into classes: each answer is constrained to those of its question.

The class of a question is what it asks for, a sum or a difference. Run it with
`python docs/examples/batch_classification.py`; constraints need the extra `structured`.
"""

import random

from checkpoints import bundled_model_path
from jaxserve import LLM, SamplingParams, StructuredOutputsParams

CLASSES = ("sum", "difference")
ENDS = (
    ("buys {} more", "finds {} more", "gets {} more"),
    ("gives away {}", "loses {}", "sells {}"),
)
COUNT = 24


def main():
    llm = LLM(str(bundled_model_path()), max_num_seqs=COUNT, max_model_len=256)
    draw = random.Random(0)
    chats, wanted, choices = [], [], []
    for _ in range(COUNT):
        a, b, kind = draw.randint(26, 50), draw.randint(1, 25), draw.randrange(len(CLASSES))
        end = draw.choice(ENDS[kind]).format(b)
        question = f"Hugo has {a} eggs and {end}. How many eggs does Hugo have?"
        chats.append([{"role": "user", "content": question}])
        wanted.append(kind)
        choices.append([f"{a} + {b} = {a + b}", f"{a} - {b} = {a - b}"])
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
    for chat, allowed, kind, answer in zip(chats, choices, wanted, answers):
        known &= answer.text in allowed
        said = allowed.index(answer.text)
        right += said == kind
        score = f"log-probability {answer.cumulative_logprob:.2f}"
        print(chat[0]["content"], CLASSES[said], score)
    print(f"right: {right} of {COUNT}")
    print("every answer is one of its question's:", known)
    print("far more than chance:", right > 0.8 * COUNT)
    llm.close()


if __name__ == "__main__":
    main()
