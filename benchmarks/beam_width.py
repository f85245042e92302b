#!/usr/bin/env python3
"""The gain and cost of a wider beam search: the bundled model on its held-out questions.

For each width: how many of the tasks' answers are right, BLEU of answers and of stories against
the references, the mean sum of log-probabilities of the best sequences, and their tokens a second.
Sequences are ranked by that sum (`--length-penalty 0`), so it is what a search makes larger. A task
has one right answer; a story has many, of which one is the reference.

    python -m benchmarks.beam_width
"""

from __future__ import annotations

import argparse
import sys
import time
from importlib.metadata import version
from typing import NamedTuple

from benchmarks.extras import require
from checkpoints import bundled_model_path
from checkpoints.tiny.pair import Pair
from checkpoints.tiny.tasks import TASKS, held_out_pairs
from jaxserve import LLM, BeamSearchParams
from jaxserve.bench.measure import describe, environment
from jaxserve.client.prompt_reader import Prompt

WIDTHS = (1, 2, 4, 8)
LONGEST = 120  # tokens of an answer


class Found(NamedTuple):
    """The best sequences of one width."""

    answers: list[str]
    sum_logprob: float  # mean over the questions
    tokens_per_second: float


def search(llm: LLM, pairs: list[Pair], width: int, length_penalty: float) -> Found:
    """Answer every question by a beam search."""
    tokenizer = llm.get_tokenizer()
    prompts: list[Prompt] = []
    for pair in pairs:
        message = {"role": "user", "content": pair.prompt}
        text = tokenizer.apply_chat_template([message], add_generation_prompt=True)
        prompts.append({"prompt_token_ids": tokenizer.encode(text, add_special_tokens=False)})
    params = BeamSearchParams(width, LONGEST, length_penalty=length_penalty)
    begin = time.perf_counter()
    best = [output.sequences[0] for output in llm.beam_search(prompts, params)]
    seconds = time.perf_counter() - begin
    answers, num_tokens = [], 0
    for prompt, sequence in zip(prompts, best, strict=True):
        given = sequence.tokens[len(prompt["prompt_token_ids"]) :]  # type: ignore[call-overload]
        num_tokens += len(given)
        answers.append(tokenizer.decode(given[:-1] if sequence.finish_reason == "stop" else given))
    total = sum(sequence.cum_logprob for sequence in best)
    return Found(answers, total / len(best), num_tokens / seconds)


def bleu(answers: list[str], pairs: list[Pair]) -> float:
    import sacrebleu  # where it is used: an extra's

    return float(sacrebleu.corpus_bleu(answers, [[pair.answer for pair in pairs]]).score)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--widths", type=int, nargs="+", default=WIDTHS)
    parser.add_argument("--pairs", type=int, default=40, help="questions of each task, and stories")
    parser.add_argument("--length-penalty", type=float, default=0.0)
    parser.add_argument("--quick", action="store_true", help="one question of each task")
    options = parser.parse_args(arguments)
    require(parser, "bench", "sacrebleu")
    count = 1 if options.quick else options.pairs
    plain = {n: t for n, t in TASKS.items() if not t.memorised and not t.with_tools}
    exact = [name for name, task in plain.items() if task.exact]
    questions = [pair for name in exact for pair in held_out_pairs(name, count)]
    stories = held_out_pairs("story", count)
    llm = LLM(
        str(bundled_model_path()),
        dtype="float32",
        max_num_seqs=32,
        max_model_len=512,
        max_logprobs=max(20, max(options.widths) + 1),
        compile_ahead=2 if options.quick else 1000,
        compile_in_background=False,
    )
    print(
        f"{len(questions)} questions of {len(exact)} tasks, {len(stories)} stories\n\n"
        "| width | right | BLEU of answers | BLEU of stories | sum of log-probabilities | tok/s |\n"
        "|---:|---:|---:|---:|---:|---:|"
    )
    for width in options.widths:
        answers, total, speed = search(llm, questions + stories, width, options.length_penalty)
        told = answers[len(questions) :]
        answers = answers[: len(questions)]
        right = sum(given == pair.answer for given, pair in zip(answers, questions))
        print(
            f"| {width} | {right / len(questions):.2%} | {bleu(answers, questions):.2f} | "
            f"{bleu(told, stories):.2f} | {total:.4f} | {speed:.0f} |",
            flush=True,
        )
    print(f"\n{describe(environment())}, sacrebleu {version('sacrebleu')}")
    llm.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
