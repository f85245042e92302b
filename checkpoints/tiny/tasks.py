"""The instruction tasks of the corpus: each draws one instance with its prompt and its answer.

An instance has a ``key`` that names what is asked apart from the wording. Whether it is held out
depends on the key alone, so no phrasing of a held-out instance is ever trained on. Order is left
out of the key where it would let a near copy through (``3 + 5`` and ``5 + 3``).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from checkpoints.tiny import words as w


@dataclass(frozen=True, slots=True)
class Pair:
    """One question and its only right answer."""

    task: str
    prompt: str
    answer: str
    key: str

    @property
    def held_out(self) -> bool:
        """True for one key in ten."""
        digest = hashlib.sha256(f"{self.task}|{self.key}".encode()).digest()
        return int.from_bytes(digest[:4], "big") % 10 == 0


def _join(items: list[int] | list[str]) -> str:
    return ", ".join(str(item) for item in items)


def _addition(rng: Random) -> Pair:
    top = 99 if rng.random() < 0.8 else 20
    a, b = rng.randint(0, top), rng.randint(0, top)
    return _sum("addition", rng, a, b)


def _addition_3_digits(rng: Random) -> Pair:
    return _sum("addition_3_digits", rng, rng.randint(100, 999), rng.randint(0, 999))


def _sum(task: str, rng: Random, a: int, b: int) -> Pair:
    form = rng.choice(
        (
            "What is {} + {}?",
            "{} + {} =",
            "{}+{}",
            "Add {} and {}.",
            "Calculate {} + {}.",
            "What is {} plus {}?",
            "How much is {} + {}?",
        )
    )
    return Pair(task, form.format(a, b), f"{a} + {b} = {a + b}", f"{sorted((a, b))}")


def _subtraction(rng: Random) -> Pair:
    a, b = rng.randint(0, 99), rng.randint(0, 99)
    if a < b and rng.random() < 0.9:
        a, b = b, a
    forms = (
        "What is {a} - {b}?",
        "{a} - {b} =",
        "{a}-{b}",
        "Subtract {b} from {a}.",
        "Calculate {a} - {b}.",
        "What is {a} minus {b}?",
        "How much is {a} - {b}?",
    )
    prompt = rng.choice(forms).format(a=a, b=b)
    return Pair("subtraction", prompt, f"{a} - {b} = {a - b}", f"{a},{b}")


_PRODUCT_FORMS = (
    "What is {} * {}?",
    "{} * {} =",
    "{} x {}",
    "Multiply {} by {}.",
    "Calculate {} * {}.",
    "What is {} times {}?",
)


def _times_table(rng: Random) -> Pair:
    a, b = rng.randint(0, 10), rng.randint(0, 10)
    prompt = rng.choice(_PRODUCT_FORMS).format(a, b)
    return Pair("times_table", prompt, f"{a} * {b} = {a * b}", f"{sorted((a, b))}")


def _multiplication(rng: Random) -> Pair:
    a, b = rng.randint(11, 99), rng.randint(2, 9)
    tens, ones = a // 10 * 10, a % 10
    steps = f"{tens} * {b} + {ones} * {b} = {tens * b} + {ones * b}"
    prompt = rng.choice(_PRODUCT_FORMS).format(a, b)
    return Pair("multiplication", prompt, f"{a} * {b} = {steps} = {a * b}", f"{a},{b}")


def _numbers(rng: Random, low: int, high: int, top: int = 99) -> list[int]:
    return rng.sample(range(top + 1), rng.randint(low, high))


def _sort_numbers(rng: Random) -> Pair:
    items = _numbers(rng, 3, 6)
    forms: tuple[str, ...]
    if rng.random() < 0.7:
        forms = (
            "Sort these numbers: {}",
            "Sort: {}",
            "Sort the numbers {} in ascending order.",
            "Put these numbers in order: {}",
            "Order from smallest to largest: {}",
        )
        answer = sorted(items)
    else:
        forms = (
            "Sort in descending order: {}",
            "Order from largest to smallest: {}",
            "Sort the numbers {} in descending order.",
        )
        answer = sorted(items, reverse=True)
    prompt = rng.choice(forms).format(_join(items))
    return Pair("sort_numbers", prompt, f"Sorted: {_join(answer)}", f"{sorted(items)}")


def _sort_words(rng: Random) -> Pair:
    items = rng.sample(w.WORDS, rng.randint(3, 5))
    forms = (
        "Sort these words: {}",
        "Sort: {}",
        "Sort alphabetically: {}",
        "Put these words in alphabetical order: {}",
    )
    prompt = rng.choice(forms).format(_join(items))
    return Pair("sort_words", prompt, f"Sorted: {_join(sorted(items))}", f"{sorted(items)}")


def _reverse_list(rng: Random) -> Pair:
    count = rng.randint(2, 6)
    items: list[str] = (
        rng.sample(w.WORDS, count)
        if rng.random() < 0.6
        else [str(n) for n in rng.sample(range(100), count)]
    )
    forms = ("Reverse this list: {}", "Reverse: {}", "Reverse the list {}", "List backwards: {}")
    prompt = rng.choice(forms).format(_join(items))
    key = f"{min(items, items[::-1])}"
    return Pair("reverse_list", prompt, f"Reversed: {_join(items[::-1])}", key)


def _letters(rng: Random, low: int, high: int) -> list[str]:
    if rng.random() < 0.3:
        return list(rng.choice(w.WORDS))
    return rng.choices("aabcdeeefghiilmnoopqrsttuvwyz", k=rng.randint(low, high))


def _reverse_letters(rng: Random) -> Pair:
    letters = _letters(rng, 3, 8)
    forms = ("Reverse these letters: {}", "Reverse the letters {}", "Spell backwards: {}")
    prompt = rng.choice(forms).format(" ".join(letters))
    key = "".join(min(letters, letters[::-1]))
    return Pair("reverse_letters", prompt, f"Reversed: {' '.join(letters[::-1])}", key)


def _count_items(rng: Random) -> Pair:
    items = rng.sample(w.WORDS, rng.randint(1, 9))
    forms = (
        "How many items are in this list: {}",
        "Count the items: {}",
        "How many words are there: {}",
        "Count the words: {}",
    )
    prompt = rng.choice(forms).format(_join(items))
    return Pair("count_items", prompt, f"Count: {len(items)}", f"{sorted(items)}")


def _count_letters(rng: Random) -> Pair:
    target = rng.choice("aeiorst")
    letters = rng.choices(target * 3 + "aeiostrlnmbcd", k=rng.randint(3, 8))
    forms = (
        "How many times does {} appear in: {}",
        "Count the letter {} in: {}",
        "How many {} are in {}?",
    )
    prompt = rng.choice(forms).format(target, " ".join(letters))
    key = f"{target}:{''.join(sorted(letters))}"
    return Pair("count_letters", prompt, f"Count: {letters.count(target)}", key)


_UNITS = (
    ("m", "cm", 100),
    ("km", "m", 1000),
    ("cm", "mm", 10),
    ("kg", "g", 1000),
    ("l", "ml", 1000),
    ("hours", "minutes", 60),
    ("minutes", "seconds", 60),
    ("weeks", "days", 7),
)


def _convert_units(rng: Random) -> Pair:
    large, small, factor = rng.choice(_UNITS)
    value = rng.randint(1, 99 if factor % 10 == 0 and factor != 60 else 50)
    if rng.random() < 0.7:
        before, after, source, target = value, value * factor, large, small
    else:
        before, after, source, target = value * factor, value, small, large
    forms = (
        "Convert {n} {a} to {b}.",
        "How many {b} are {n} {a}?",
        "{n} {a} in {b}",
        "What is {n} {a} in {b}?",
    )
    prompt = rng.choice(forms).format(n=before, a=source, b=target)
    answer = f"{before} {source} = {after} {target}"
    return Pair("convert_units", prompt, answer, f"{large},{small},{value}")


def _extreme(rng: Random) -> Pair:
    items = _numbers(rng, 3, 6, top=999 if rng.random() < 0.5 else 99)
    largest = rng.random() < 0.5
    forms = (
        ("Which number is the largest: {}", "Find the maximum: {}", "Max of {}", "Largest of {}?")
        if largest
        else (
            "Which number is the smallest: {}",
            "Find the minimum: {}",
            "Min of {}",
            "Smallest of {}?",
        )
    )
    prompt = rng.choice(forms).format(_join(items))
    answer = f"Maximum: {max(items)}" if largest else f"Minimum: {min(items)}"
    return Pair("max_min", prompt, answer, f"{sorted(items)}")


def _compare(rng: Random) -> Pair:
    top = rng.choice((99, 999))
    a = rng.randint(0, top)
    b = rng.randint(0, top) if rng.random() < 0.6 else min(top, max(0, a + rng.randint(-9, 9)))
    forms = (
        "Which is larger, {} or {}?",
        "Compare {} and {}.",
        "Which is greater: {} or {}?",
        "Is {} larger or smaller than {}?",
    )
    sign = "=" if a == b else "<" if a < b else ">"
    return Pair("compare", rng.choice(forms).format(a, b), f"{a} {sign} {b}", f"{sorted((a, b))}")


def _next_number(rng: Random) -> Pair:
    start, step = rng.randint(0, 30), rng.randint(1, 10)
    if rng.random() < 0.25:
        start, step = start + 4 * step, -step
    terms = [start + i * step for i in range(4)]
    forms = ("What comes next: {}, ...", "Next number: {}", "Continue the sequence: {}")
    prompt = rng.choice(forms).format(_join(terms))
    return Pair("next_number", prompt, f"Next: {start + 4 * step}", f"{start},{step}")


def _word_problem(rng: Random) -> Pair:
    name, thing = (
        rng.choice(w.NAMES),
        rng.choice(("apple", "book", "egg", "key", "pencil", "stone")),
    )
    a, b = rng.randint(1, 50), rng.randint(1, 50)
    if rng.random() < 0.5:
        end = rng.choice(("buys {} more", "finds {} more", "gets {} more")).format(b)
        answer = f"{a} + {b} = {a + b}"
    else:
        a, b = max(a, b) + 1, min(a, b)
        end = rng.choice(("gives away {}", "loses {}", "sells {}")).format(b)
        answer = f"{a} - {b} = {a - b}"
    prompt = f"{name} has {a} {thing}s and {end}. How many {thing}s does {name} have?"
    return Pair("word_problem", prompt, answer, answer)


def _story(rng: Random) -> Pair:
    animal, place, thing = rng.choice(w.ANIMALS), rng.choice(w.PLACES), rng.choice(w.OBJECTS)
    name, mood = rng.choice(w.NAMES), rng.choice(w.ADJECTIVES)
    prompt = rng.choice(
        (
            "Write a short story about {name} the {animal} and a {thing}.",
            "Tell me a story about {name} the {animal} who finds a {thing}.",
            "Write a story: {name}, {animal}, {thing}.",
        )
    ).format(name=name, animal=animal, thing=thing)
    first = rng.choice(
        (
            f"Once upon a time there was a {mood} {animal} named {name}.",
            f"{name} was a {mood} {animal} who lived near the {place}.",
            f"Long ago, a {animal} named {name} lived by the {place}.",
        )
    )
    second = rng.choice(
        (
            f"One day {name} found a {thing} near the {place}.",
            f"One morning {name} went to the {place} and saw a {thing}.",
            f"At the {place}, {name} lost a {thing} and looked for it all day.",
        )
    )
    third = rng.choice(
        (
            f"A friend asked: Is this your {thing}?",
            f"{name} showed the {thing} to everyone.",
            f"The {thing} was small, but {name} liked it very much.",
        )
    )
    last = rng.choice(
        (
            f"From that day on, {name} was never lonely again.",
            f"In the evening {name} went home with the {thing} and was happy.",
            f"And so the {animal} and the {thing} stayed together.",
        )
    )
    answer = f"{first} {second} {third} {last}"
    return Pair("story", prompt, answer, f"{animal},{thing},{name}")


def _chat(rng: Random) -> Pair:
    replies = (
        (w.GREETINGS, w.GREETING_REPLY),
        (w.CHINESE_GREETINGS, w.CHINESE_GREETING_REPLY),
        (w.IDENTITY, w.IDENTITY_REPLY),
        (w.CHINESE_IDENTITY, w.CHINESE_IDENTITY_REPLY),
        (w.THANKS, w.THANKS_REPLY),
        (w.FAREWELLS, w.FAREWELL_REPLY),
    )
    prompts, reply = rng.choice(replies)
    prompt = rng.choice(prompts)
    return Pair("chat", prompt, reply, prompt)


def _unknown(rng: Random) -> Pair:
    if rng.random() < 0.5:
        prompt = rng.choice(w.UNKNOWN_FORMS).format(rng.choice(w.TOPICS))
        return Pair("unknown", prompt, w.UNKNOWN_REPLY, prompt)
    topic, count = rng.choice(w.CHINESE_TOPICS), rng.choice((50, 100, 200, 300, 500, 1000))
    prompt = rng.choice(w.CHINESE_UNKNOWN_FORMS).format(n=count, topic=topic)
    return Pair("unknown", prompt, w.CHINESE_UNKNOWN_REPLY, prompt)


@dataclass(frozen=True, slots=True)
class Task:
    """A task of the corpus: how to draw an instance, and its share of the drawn pairs.

    ``memorised`` tasks are closed sets of facts or phrases: all of them are trained on, none is
    held out, and none counts as evidence of generalisation.
    """

    draw: Callable[[Random], Pair]
    share: float
    memorised: bool = False


TASKS: dict[str, Task] = {
    "addition": Task(_addition, 10),
    "addition_3_digits": Task(_addition_3_digits, 4),
    "subtraction": Task(_subtraction, 9),
    "times_table": Task(_times_table, 2, memorised=True),
    "multiplication": Task(_multiplication, 5),
    "sort_numbers": Task(_sort_numbers, 10),
    "sort_words": Task(_sort_words, 9),
    "reverse_list": Task(_reverse_list, 8),
    "reverse_letters": Task(_reverse_letters, 6),
    "count_items": Task(_count_items, 4),
    "count_letters": Task(_count_letters, 6),
    "convert_units": Task(_convert_units, 6),
    "max_min": Task(_extreme, 6),
    "compare": Task(_compare, 5),
    "next_number": Task(_next_number, 3),
    "word_problem": Task(_word_problem, 3),
    "story": Task(_story, 1.5),
    "chat": Task(_chat, 1.2, memorised=True),
    "unknown": Task(_unknown, 1.5, memorised=True),
}

_NAMES = list(TASKS)
_SHARES = [task.share for task in TASKS.values()]


def training_pair(rng: Random) -> Pair:
    """Draw one pair of a random task that is not held out."""
    task = TASKS[rng.choices(_NAMES, _SHARES)[0]]
    while True:
        pair = task.draw(rng)
        if task.memorised or not pair.held_out:
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
