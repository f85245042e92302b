"""Pictures and their questions: drawn where they are said to be, and answered right."""

from __future__ import annotations

from itertools import islice
from random import Random

import numpy as np

from checkpoints.pictures.batches import FIRST, RowEncoder
from checkpoints.pictures.questions import KINDS, NOTHING, Question, asked_pictures
from checkpoints.pictures.scene import DIGITS, MOST, Scene, Thing, draw, mask
from checkpoints.pictures.tokenizer import IMAGE, PATCHES, SIDE, make_tokenizer
from checkpoints.tiny.tokenizer import END_ID

SEED, COUNT = "a test", 120


def thing(shape: str, colour: str, x: float, y: float) -> Thing:
    return Thing(shape, colour, x, y, 0.12, 0, (200, 0, 0))


SCENE = Scene(
    (
        thing("circle", "red", 0.2, 0.2),
        thing("circle", "red", 0.75, 0.35),
        thing("square", "blue", 0.35, 0.75),
        thing("7", "orange", 0.8, 0.88),
    ),
    (240, 240, 240),
    0,
)
ANSWERS = {
    "How many red circles?": "2",
    "How many things are there?": "4",
    "How many green squares?": "0",
    "What colour is the square?": "blue",
    "What shape is blue?": "square",
    "Where is the orange 7?": "bottom right",
    "What is in the top left?": "red circle",
    "What is left of the blue square?": "red circle",
    "What is below the square?": "orange 7",
    "What is below the 7?": NOTHING,
    "Which digit is shown?": "7",
    "Is there a red circle?": "yes",
    "Is the square left of the 7?": "yes",
    "Is the square below the 7?": "no",
}


def asked_of(scene: Scene, tries: int = 12_000) -> dict[str, Question]:
    rng = Random(0)
    made = (make(scene, rng) for _ in range(tries // len(KINDS)) for make, _ in KINDS.values())
    return {one.prompt: one for one in made if one is not None}


def test_answers_are_what_the_scene_has() -> None:
    asked = asked_of(SCENE)
    assert {prompt: asked[prompt].answer for prompt in ANSWERS if prompt in asked} == ANSWERS
    assert {one.kind for one in asked.values()} == set(KINDS)
    # the right circle is neither left nor right of the 7, and two circles have one name
    assert "What is left of the 7?" not in asked and "Where is the red circle?" not in asked


def test_pictures_show_the_things_where_they_are() -> None:
    for scene, asked in islice(asked_pictures(SEED, 8), COUNT):
        assert 1 <= len(scene.things) <= MOST and 4 <= len(asked) <= 8
        picture = draw(scene, SIDE).astype(int)
        for one in scene.things:
            near = np.abs(picture - one.paint).max(-1) < 16  # four deviations of the noise
            assert near.sum() > (0.05 if one.is_digit else 0.2) * (2 * one.radius * SIDE) ** 2
            assert one.is_digit or near[int(one.y * SIDE), int(one.x * SIDE)]
    first, again = (next(asked_pictures(SEED, 8)) for _ in range(2))
    assert first == again and (draw(first[0], SIDE) == draw(again[0], SIDE)).all()


def test_digits_look_different() -> None:
    masks = np.stack([mask(digit, 24, 0) for digit in DIGITS])
    apart = np.abs(masks[:, None] - masks[None]).mean((2, 3))
    assert (apart + np.eye(10) > 0.04).all()


def test_rows_hold_the_questions_as_the_template_writes_them() -> None:
    tokenizer = make_tokenizer(0)
    rows = RowEncoder(tokenizer)
    (scene, asked) = next(asked_pictures(SEED, 3))
    batch = rows.batch([(scene, asked)] * 2, [False, True])
    image = tokenizer.token_to_id(IMAGE)
    assert (batch.tokens[:, FIRST : FIRST + PATCHES] == image).all()
    for row, is_chat in enumerate(batch.is_chat):
        for turn, question in enumerate(asked, 1):
            own = batch.turns[row] == turn
            learnt = own & batch.learnt[row]
            *answer, end = batch.tokens[row][learnt].tolist()
            assert end == END_ID and tokenizer.decode(answer) == question.answer
            text = tokenizer.decode(
                batch.tokens[row][own & ~learnt].tolist(), skip_special_tokens=False
            )
            start = "<|user|>" if is_chat and turn > 1 else ""
            assert text == f"{start}{question.prompt}<|end|><|assistant|>"
            first = batch.positions[row][own][0]
            assert first == (np.flatnonzero(own)[0] if is_chat else FIRST + PATCHES)
