"""Tasks on lists of numbers, words and letters: sort, reverse, count, largest and smallest."""

from __future__ import annotations

from itertools import accumulate
from random import Random

from checkpoints.tiny import words as w
from checkpoints.tiny.pair import Pair, join, listed, phrase


def _numbers(rng: Random, low: int, high: int, top: int = 99) -> list[int]:
    return rng.sample(range(top + 1), rng.randint(low, high))


def sort_numbers(rng: Random) -> Pair:
    """Three to six numbers, ascending or descending; sometimes all of them are digits."""
    items = _numbers(rng, 3, 6, top=9 if rng.random() < 0.1 else 99)
    forms: tuple[str, ...]
    if rng.random() < 0.7:
        forms = (
            "Sort these numbers: {}",
            "Sort: {}",
            "Sort {}",
            "Sort the numbers {}.",
            "Sort the numbers {} in ascending order.",
            "Put these numbers in order: {}",
            "Order from smallest to largest: {}",
        )
        answer = sorted(items)
    else:
        forms = (
            "Sort in descending order: {}",
            "Sort {} in descending order.",
            "Order from largest to smallest: {}",
            "Sort the numbers {} in descending order.",
        )
        answer = sorted(items, reverse=True)
    prompt = phrase(rng, forms).format(listed(rng, items))
    return Pair("sort_numbers", prompt, f"Sorted: {join(answer)}", f"{sorted(items)}")


def sort_words(rng: Random) -> Pair:
    """Three to five words in alphabetical order."""
    items = rng.sample(w.WORDS, rng.randint(3, 5))
    forms = (
        "Sort these words: {}",
        "Sort: {}",
        "Sort {}",
        "Sort the words {}.",
        "Sort alphabetically: {}",
        "Put these words in alphabetical order: {}",
    )
    prompt = phrase(rng, forms).format(listed(rng, items))
    return Pair("sort_words", prompt, f"Sorted: {join(sorted(items))}", f"{sorted(items)}")


def reverse_list(rng: Random) -> Pair:
    """Two to six words or numbers in the opposite order."""
    count = rng.randint(2, 6)
    items: list[str] = (
        rng.sample(w.WORDS, count)
        if rng.random() < 0.6
        else [str(n) for n in rng.sample(range(100), count)]
    )
    forms = (
        "Reverse this list: {}",
        "Reverse: {}",
        "Reverse {}",
        "Reverse the list {}",
        "List backwards: {}",
    )
    prompt = phrase(rng, forms).format(listed(rng, items))
    key = f"{min(items, items[::-1])}"
    return Pair("reverse_list", prompt, f"Reversed: {join(items[::-1])}", key)


def _letters(rng: Random, low: int, high: int) -> list[str]:
    if rng.random() < 0.3:
        return list(rng.choice(w.WORDS))
    return rng.choices("aabcdeeefghiilmnoopqrsttuvwyz", k=rng.randint(low, high))


def reverse_letters(rng: Random) -> Pair:
    """Three to eight single letters in the opposite order."""
    letters = _letters(rng, 3, 8)
    forms = ("Reverse these letters: {}", "Reverse the letters {}", "Spell backwards: {}")
    prompt = phrase(rng, forms).format(" ".join(letters))
    key = "".join(min(letters, letters[::-1]))
    return Pair("reverse_letters", prompt, f"Reversed: {' '.join(letters[::-1])}", key)


def count_items(rng: Random) -> Pair:
    """How many words a list has, one to nine."""
    items = rng.sample(w.WORDS, rng.randint(1, 9))
    forms = (
        "How many items are in this list: {}",
        "Count the items: {}",
        "How many words are there: {}",
        "Count the words: {}",
    )
    prompt = phrase(rng, forms).format(listed(rng, items))
    return Pair("count_items", prompt, f"Count: {len(items)}", f"{sorted(items)}")


def count_letters(rng: Random) -> Pair:
    """How often a letter occurs among three to eight letters, with the count after each."""
    target = rng.choice("aeiorst")
    letters = rng.choices(target * 3 + "aeiostrlnmbcd", k=rng.randint(3, 8))
    forms = (
        "How many times does {} appear in: {}",
        "Count the letter {} in: {}",
        "How many {} are in {}?",
    )
    prompt = phrase(rng, forms).format(target, " ".join(letters))
    key = f"{target}:{''.join(sorted(letters))}"
    counts = [letters[: at + 1].count(target) for at in range(len(letters))]
    steps = " ".join(f"{letter}{count}" for letter, count in zip(letters, counts))
    return Pair("count_letters", prompt, f"Count: {steps} = {counts[-1]}", key)


def extreme(rng: Random) -> Pair:
    """Largest or smallest of three to six numbers: of the one so far and each next one."""
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
    prompt = phrase(rng, forms).format(listed(rng, items))
    found = list(accumulate(items, max if largest else min))
    steps = [f"{a}, {b}: {c}" for a, b, c in zip(found, items[1:], found[1:])]
    answer = f"{'; '.join(steps)}. {'Maximum' if largest else 'Minimum'}: {found[-1]}"
    return Pair("max_min", prompt, answer, f"{sorted(items)}")
