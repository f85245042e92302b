"""Stories from templates, greetings, and the answer to what the model cannot know."""

from __future__ import annotations

from random import Random

from checkpoints.tiny import words as w
from checkpoints.tiny.pair import Pair


def story(rng: Random) -> Pair:
    """A story of four sentences from templates; many answers are right, so none is checked."""
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


def chat(rng: Random) -> Pair:
    """A greeting, a question about the model, thanks or a farewell."""
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


def unknown(rng: Random) -> Pair:
    """A question that the model cannot answer, in English or Chinese."""
    if rng.random() < 0.5:
        prompt = rng.choice(w.UNKNOWN_FORMS).format(rng.choice(w.TOPICS))
        return Pair("unknown", prompt, w.UNKNOWN_REPLY, prompt)
    topic, count = rng.choice(w.CHINESE_TOPICS), rng.choice((50, 100, 200, 300, 500, 1000))
    prompt = rng.choice(w.CHINESE_UNKNOWN_FORMS).format(n=count, topic=topic)
    return Pair("unknown", prompt, w.CHINESE_UNKNOWN_REPLY, prompt)
