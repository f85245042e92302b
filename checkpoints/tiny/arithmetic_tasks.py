"""Tasks on numbers: sums, products, units, comparison, sequences and word problems."""

from __future__ import annotations

from random import Random

from checkpoints.tiny import words as w
from checkpoints.tiny.pair import Pair, listed, phrase


def addition(rng: Random) -> Pair:
    """Sum of two numbers of one or two digits."""
    top = rng.choices((99, 20, 9), (8, 1, 1))[0]
    a, b = rng.randint(0, top), rng.randint(0, top)
    return _sum("addition", rng, a, b)


def addition_3_digits(rng: Random) -> Pair:
    """Sum where at least one number has three digits."""
    return _sum("addition_3_digits", rng, rng.randint(100, 999), rng.randint(0, 999))


def _sum(task: str, rng: Random, a: int, b: int) -> Pair:
    forms = (
        "What is {} + {}?",
        "What is {}+{}?",
        "{} + {} =",
        "{} + {}",
        "{}+{}",
        "Add {} and {}.",
        "Calculate {} + {}.",
        "What is {} plus {}?",
        "How much is {} + {}?",
    )
    return Pair(task, phrase(rng, forms).format(a, b), f"{a} + {b} = {a + b}", f"{sorted((a, b))}")


def subtraction(rng: Random) -> Pair:
    """Difference of two numbers up to 99; a negative one follows from the swapped numbers."""
    a, b = rng.randint(0, 99), rng.randint(0, 99)
    forms = (
        "What is {a} - {b}?",
        "What is {a}-{b}?",
        "{a} - {b} =",
        "{a} - {b}",
        "{a}-{b}",
        "Subtract {b} from {a}.",
        "Calculate {a} - {b}.",
        "What is {a} minus {b}?",
        "How much is {a} - {b}?",
    )
    prompt = phrase(rng, forms).format(a=a, b=b)
    answer = f"{a} - {b} = {a - b}"
    if a < b:
        answer = f"{a} - {b} = -({b} - {a}), {b} - {a} = {b - a}, so {answer}"
    return Pair("subtraction", prompt, answer, f"{a},{b}")


_PRODUCT_FORMS = (
    "What is {} * {}?",
    "{} * {} =",
    "{} x {}",
    "Multiply {} by {}.",
    "Calculate {} * {}.",
    "What is {} times {}?",
    "What is {}*{}?",
)


def times_table(rng: Random) -> Pair:
    """Product of two numbers up to 10."""
    a, b = rng.randint(0, 10), rng.randint(0, 10)
    prompt = phrase(rng, _PRODUCT_FORMS).format(a, b)
    return Pair("times_table", prompt, f"{a} * {b} = {a * b}", f"{sorted((a, b))}")


def multiplication(rng: Random) -> Pair:
    """Product of two digits and one digit, with the partial products written out."""
    a, b = rng.randint(11, 99), rng.randint(2, 9)
    tens, ones = a // 10 * 10, a % 10
    steps = f"{tens} * {b} + {ones} * {b} = {tens * b} + {ones * b}"
    prompt = phrase(rng, _PRODUCT_FORMS).format(a, b)
    return Pair("multiplication", prompt, f"{a} * {b} = {steps} = {a * b}", f"{a},{b}")


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


def convert_units(rng: Random) -> Pair:
    """Conversion between a unit and a smaller one of the same kind.

    Where the factor is 60 or 7, the parts of tens and ones are written out first, both ways.
    """
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
    prompt = phrase(rng, forms).format(n=before, a=source, b=target)
    tens, ones = value // 10 * 10, value % 10
    steps = ""
    if factor in (60, 7) and tens and ones:
        steps = f"{tens * factor} + {ones * factor} {small} = "
    answer = f"{before} {source} = {steps}{after} {target}"
    return Pair("convert_units", prompt, answer, f"{large},{small},{value}")


def compare(rng: Random) -> Pair:
    """The sign between two numbers, found digit by digit."""
    top = rng.choice((99, 999))
    a = rng.randint(0, top)
    b = rng.randint(0, top) if rng.random() < 0.6 else min(top, max(0, a + rng.randint(-9, 9)))
    forms = (
        "Which is larger, {} or {}?",
        "Compare {} and {}.",
        "Which is greater: {} or {}?",
        "Is {} larger or smaller than {}?",
    )
    width = len(str(max(a, b)))
    steps = []
    for first, second in zip(str(a).zfill(width), str(b).zfill(width)):
        sign = _sign(int(first), int(second))
        steps.append(f"{first} {sign} {second}")
        if sign != "=":
            break
    answer = f"{', '.join(steps)}, so {a} {_sign(a, b)} {b}"
    return Pair("compare", phrase(rng, forms).format(a, b), answer, f"{sorted((a, b))}")


def _sign(a: int, b: int) -> str:
    return "=" if a == b else "<" if a < b else ">"


def next_number(rng: Random) -> Pair:
    """The term after four terms of an arithmetic progression, with the difference written out."""
    start, step = rng.randint(0, 50), rng.randint(1, 12)
    if rng.random() < 0.25:
        start, step = start + 4 * step, -step
    terms = [start + i * step for i in range(4)]
    forms = (
        "What comes next: {}, ...",
        "What comes next? {}",
        "Next number: {}",
        "Continue the sequence: {}",
        "Continue {}",
    )
    prompt = phrase(rng, forms).format(listed(rng, terms))
    low, high = sorted(terms[2:])
    sign = "+" if step > 0 else "-"
    answer = (
        f"Next: {high} - {low} = {abs(step)}, {terms[3]} {sign} {abs(step)} = {start + 4 * step}"
    )
    return Pair("next_number", prompt, answer, f"{start},{step}")


def word_problem(rng: Random) -> Pair:
    """A one-sentence story that asks for a sum or a difference."""
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
