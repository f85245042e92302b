"""The corpus tasks: deterministic, right by independent arithmetic, split without leaks."""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import replace
from random import Random

import pytest

from checkpoints.tiny.pair import Pair
from checkpoints.tiny.tasks import TASKS, held_out_pairs, training_pair
from checkpoints.tiny.words import WORDS

_SMALL = {
    "cm": ("length", 10),
    "mm": ("length", 1),
    "m": ("length", 1000),
    "km": ("length", 1_000_000),
    "g": ("mass", 1),
    "kg": ("mass", 1000),
    "ml": ("volume", 1),
    "l": ("volume", 1000),
    "seconds": ("time", 1),
    "minutes": ("time", 60),
    "hours": ("time", 3600),
    "days": ("time", 86400),
    "weeks": ("time", 604800),
}


def _numbers(text: str) -> list[int]:
    return [int(n) for n in re.findall(r"\d+", text)]


def _list(prompt: str) -> list[str]:
    """The items of a prompt: all its numbers, or all its words that are in the word list."""
    found = re.findall(r"[a-z0-9]+", prompt)
    return [item for item in found if item.isdigit()] or [w for w in found if w in WORDS]


def _letters(prompt: str) -> list[str]:
    """The run of single letters at the end of a prompt."""
    words = prompt.rstrip("?").split()
    count = 0
    while count < len(words) and len(words[-1 - count]) == 1:
        count += 1
    return words[len(words) - count :]


def _equalities_hold(answer: str) -> bool:
    sides = []
    for side in answer.split(" = "):
        total = 0
        for term in side.replace(" - ", " + -").split(" + "):
            product = 1
            for factor in term.split(" * "):
                product *= int(factor)
            total += product
        sides.append(total)
    return len(set(sides)) == 1


def _is_right_with_tools(pair: Pair) -> bool:
    """A call of a listed tool with what the question names, or an answer that its turn gives."""
    listing = pair.system.partition("Tools:\n")[2].splitlines()
    assert 1 <= len(listing) <= 3
    if pair.task == "tool_unused":
        task, _, key = pair.key.partition("|")
        return _is_right(Pair(task, pair.prompt, pair.answer, key))
    if pair.task == "tool_list":
        return pair.answer.splitlines() == listing
    if pair.task == "tool_answer":
        result = pair.prompt.removeprefix("<tool_response> ").removesuffix(" </tool_response>")
        *_, asked = pair.before
        return asked.answer.startswith("<tool_call>") and pair.answer in (
            f"The result is {result}.",
            f"The result is {result}",
        )
    begin, call, end = pair.answer.split("\n")
    told = json.loads(call)
    (line,) = [one for one in listing if f'{{"name": "{told["name"]}", ' in one]
    needed = re.findall(r'"(\w+)": (?:string|number|integer)(?=[,}])', line)
    said = [
        part for value in told["arguments"].values() for part in re.split(" [-+*/] ", str(value))
    ]
    return (
        (begin, end) == ("<tool_call>", "</tool_call>")
        and list(told["arguments"]) == needed
        and all(part.lower() in pair.prompt.lower() for part in said)
    )


def _is_right(pair: Pair) -> bool:
    if TASKS[pair.task].with_tools:
        return _is_right_with_tools(pair)
    prompt, answer, task = pair.prompt, pair.answer, pair.task
    if task in ("addition", "addition_3_digits", "times_table", "multiplication", "subtraction"):
        left = _numbers(answer.split(" = ")[0])
        swapped = prompt.lower().startswith("subtract")
        same = _numbers(prompt) == (left[::-1] if swapped else left)
        sign = {"s": "-", "a": "+"}.get(task[0], "*")
        if task == "subtraction" and left[0] < left[1]:
            a, b = left
            turned = f"-({b} - {a}), {b} - {a} = {b - a}"
            return same and answer == f"{a} - {b} = {turned}, so {a} - {b} = {a - b}"
        return same and f" {sign} " in answer.split(" = ")[0] and _equalities_hold(answer)
    if task == "word_problem":
        more = "more" in prompt
        a, b = _numbers(prompt)
        return answer == (f"{a} + {b} = {a + b}" if more else f"{a} - {b} = {a - b}")
    if task == "sort_numbers":
        down = "descending" in prompt or "largest to smallest" in prompt
        wanted = sorted(map(int, _list(prompt)), reverse=down)
        return answer == "Sorted: " + ", ".join(map(str, wanted))
    if task == "sort_words":
        return answer == "Sorted: " + ", ".join(sorted(_list(prompt)))
    if task == "reverse_list":
        return answer == "Reversed: " + ", ".join(reversed(_list(prompt)))
    if task == "reverse_letters":
        return answer == "Reversed: " + " ".join(reversed(_letters(prompt)))
    if task == "count_items":
        return answer == f"Count: {len(_list(prompt))}"
    if task == "count_letters":
        target = re.search(r"(?:does|letter|many) ([a-z])\b", prompt)
        assert target
        letters = _letters(prompt)
        steps = [f"{x}{letters[: i + 1].count(target.group(1))}" for i, x in enumerate(letters)]
        return answer == f"Count: {' '.join(steps)} = {letters.count(target.group(1))}"
    if task == "convert_units":
        before, source, tens, ones, unit, after, target = re.fullmatch(  # type: ignore[union-attr]
            r"(\d+) (\w+) = (?:(\d+) \+ (\d+) (\w+) = )?(\d+) (\w+)", answer
        ).groups()
        (kind, size), (kind_2, size_2) = _SMALL[source], _SMALL[target]
        asked = f"{before} {source}" in prompt and target in prompt
        right = asked and kind == kind_2 and int(before) * size == int(after) * size_2
        if unit:
            factor = max(size, size_2) // _SMALL[unit][1]
            right &= int(before) * size == (int(tens) + int(ones)) * _SMALL[unit][1]
            right &= int(ones) // factor < 10 and int(tens) % (10 * factor) == 0
        return right
    if task == "max_min":
        items = _numbers(prompt)
        largest = re.search(r"largest|max", prompt, re.IGNORECASE)
        name, best = ("Maximum", max) if largest else ("Minimum", min)
        found = [best(items[: at + 1]) for at in range(len(items))]
        parts = zip(found, items[1:], found[1:])
        steps = "; ".join(f"{before}, {item}: {after}" for before, item, after in parts)
        return answer == f"{steps}. {name}: {best(items)}"
    if task == "compare":
        a, b = _numbers(prompt)
        *steps, last = re.split(", so |, ", answer)
        columns = [step.split() for step in steps]
        tops = "".join(x for x, _, _ in columns), "".join(x for _, _, x in columns)
        width = max(len(str(a)), len(str(b)))
        decided = columns[-1][1] != "=" or len(columns) == width
        return (
            decided
            and str(a).zfill(width).startswith(tops[0])
            and str(b).zfill(width).startswith(tops[1])
            and all(sign == _sign(int(x), int(y)) for x, sign, y in columns)
            and all(sign == "=" for _, sign, _ in columns[:-1])
            and last == f"{a} {_sign(a, b)} {b}"
        )
    if task == "next_number":
        terms = [int(n) for n in re.findall(r"-?\d+", prompt)]
        assert len(terms) == 4
        found = [int(n) for n in re.findall(r"-?\d+", answer.replace(" - ", " + -"))]
        high, low, difference, last, signed, result = found
        return (
            {high, -low} == set(terms[2:])
            and difference == high + low
            and (last, abs(signed)) == (terms[3], difference)
            and result == last + signed == 2 * terms[3] - terms[2]
        )
    if task == "story":
        subject = re.findall(r"\b([A-Z][a-z]+) the|: ([A-Z][a-z]+)", prompt)
        return all(name in answer for pair_ in subject for name in pair_)
    return len(answer) > 5


def _sign(a: int, b: int) -> str:
    return "<" if a < b else ">" if a > b else "="


@pytest.mark.parametrize("name", TASKS)
def test_every_answer_is_right(name: str) -> None:
    rng = Random(1)
    for _ in range(400):
        pair = TASKS[name].draw(rng)
        assert pair.task == name
        assert _is_right(pair), pair


def test_the_same_seed_gives_the_same_pairs() -> None:
    first, second, other = Random(3), Random(3), Random(4)
    pairs = [training_pair(first) for _ in range(200)]
    assert pairs == [training_pair(second) for _ in range(200)]
    assert pairs != [training_pair(other) for _ in range(200)]
    assert held_out_pairs("addition", 30) == held_out_pairs("addition", 30)


@pytest.mark.parametrize(("late", "with_tools"), [(False, False), (True, False), (True, True)])
def test_tasks_come_by_their_shares(late: bool, with_tools: bool) -> None:
    tasks = {name: task for name, task in TASKS.items() if task.with_tools is with_tools}
    rng, total = Random(5), sum(t.late_share if late else t.share for t in tasks.values())
    drawn = Counter(training_pair(rng, late, with_tools).task for _ in range(2000))
    assert drawn.keys() == tasks.keys()
    for name, task in tasks.items():
        share = (task.late_share if late else task.share) / total
        assert abs(drawn[name] / 2000 - share) < 5 * (share / 2000) ** 0.5, name


@pytest.mark.slow
def test_no_held_out_question_is_trained_on() -> None:
    checked = [name for name, task in TASKS.items() if not task.memorised]
    held_keys = {(p.task, p.key) for name in checked for p in held_out_pairs(name, 50)}
    # A tool's result is no question: it may follow other questions too.
    asked = [name for name in checked if name != "tool_answer"]
    held_prompts = {(p.system, p.prompt) for name in asked for p in held_out_pairs(name, 50)}
    rng = Random(9)
    drawn = [training_pair(rng, late) for late in (False, True) for _ in range(10_000)]
    drawn += [training_pair(rng, True, with_tools=True) for _ in range(5000)]
    trained = [turn for pair in drawn for turn in (*pair.before, replace(pair, before=()))]
    assert not held_keys & {(p.task, p.key) for p in trained}
    # Different keys must not share a wording either, or a held-out prompt could be trained on.
    assert not held_prompts & {(p.system, p.prompt) for p in trained}


def test_held_out_keys_leave_no_mirror_image() -> None:
    for pair in held_out_pairs("addition", 50):
        a, b = _numbers(pair.answer.split("=")[0])
        mirrored = Pair("addition", "", "", f"{sorted((b, a))}")
        assert mirrored.held_out


def test_memorised_tasks_have_no_held_out_pairs() -> None:
    with pytest.raises(ValueError, match="memorised"):
        held_out_pairs("times_table", 5)
