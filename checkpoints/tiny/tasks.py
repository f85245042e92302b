"""The instruction tasks of the corpus, their shares, and the two sides of the split.

An instance has a ``key`` that names what is asked apart from the wording. Whether it is held out
depends on the key alone, so no phrasing of a held-out instance is ever trained on. Order is left
out of the key where it would let a near copy through (``3 + 5`` and ``5 + 3``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from checkpoints.tiny import arithmetic_tasks as arithmetic
from checkpoints.tiny import chat_tasks as chat
from checkpoints.tiny import list_tasks as lists
from checkpoints.tiny import tool_tasks as tools
from checkpoints.tiny.pair import Pair


@dataclass(frozen=True, slots=True)
class Task:
    """A task of the corpus: how to draw an instance, and its share of the drawn pairs.

    ``late_share`` counts while the learning rate falls: what is not yet learnt then gets more.
    ``memorised`` tasks are closed sets of facts or phrases: all of them are trained on, none is
    held out, and none counts as evidence of generalisation. ``exact`` tasks have one right answer.
    ``with_tools``: the shares are of conversations with tools.
    """

    draw: Callable[[Random], Pair]
    share: float
    late_share: float
    memorised: bool = False
    exact: bool = True
    with_tools: bool = False


TASKS: dict[str, Task] = {
    "addition": Task(arithmetic.addition, 9, 6),
    "addition_3_digits": Task(arithmetic.addition_3_digits, 9, 9),
    "subtraction": Task(arithmetic.subtraction, 11, 45),
    "times_table": Task(arithmetic.times_table, 2, 2, memorised=True),
    "multiplication": Task(arithmetic.multiplication, 5, 5),
    "sort_numbers": Task(lists.sort_numbers, 12, 30),
    "sort_words": Task(lists.sort_words, 11, 50),
    "reverse_list": Task(lists.reverse_list, 5, 5),
    "reverse_letters": Task(lists.reverse_letters, 4, 4),
    "count_items": Task(lists.count_items, 3, 6),
    "count_letters": Task(lists.count_letters, 6, 7),
    "convert_units": Task(arithmetic.convert_units, 5, 10),
    "max_min": Task(lists.extreme, 9, 90),
    "compare": Task(arithmetic.compare, 6, 4),
    "next_number": Task(arithmetic.next_number, 5, 5),
    "word_problem": Task(arithmetic.word_problem, 5, 4),
    "story": Task(chat.story, 2, 2, exact=False),
    "chat": Task(chat.chat, 1.2, 1.2, memorised=True),
    "unknown": Task(chat.unknown, 1.5, 1.5, memorised=True),
    "tool_call": Task(tools.tool_call, 5, 8, with_tools=True),
    "tool_lookup": Task(tools.tool_lookup, 4, 8, with_tools=True),
    "tool_new_word": Task(tools.tool_new_word, 5, 14, with_tools=True),
    "tool_answer": Task(tools.tool_answer, 4, 2, with_tools=True),
    "tool_list": Task(tools.tool_list, 4, 3, with_tools=True),
    "tool_unused": Task(tools.tool_unused, 3, 3, with_tools=True),
}


def training_pair(rng: Random, late: bool = False, with_tools: bool = False) -> Pair:
    """Draw one pair of a random task of which no turn is held out.

    Late, most calls that leave no choice of a tool are drawn again: the choice is learnt last.
    """
    tasks = [task for task in TASKS.values() if task.with_tools is with_tools]
    (task,) = rng.choices(tasks, [t.late_share if late else t.share for t in tasks])
    while True:
        pair = task.draw(rng)
        if late and pair.leaves_no_choice and rng.random() < 0.6:
            continue
        if task.memorised or not any(turn.held_out for turn in (*pair.before, pair)):
            return pair


def held_out_pairs(name: str, count: int, seed: int = 0) -> list[Pair]:
    """At most ``count`` held-out pairs of a task, each with a key of its own.

    Small tasks have fewer held-out keys; then all that 400 draws per wanted pair find are returned.

    Raises:
        ValueError: the task is memorised, so none of it is held out.
    """
    if TASKS[name].memorised:
        raise ValueError(f"task {name!r} is memorised: none of it is held out")
    rng = Random(f"held-out {name} {seed}")
    found: dict[str, Pair] = {}
    for _ in range(count * 400):
        pair = TASKS[name].draw(rng)
        if pair.held_out:
            found.setdefault(pair.key, pair)
        if len(found) == count:
            break
    return list(found.values())
