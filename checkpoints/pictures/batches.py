"""Batches of pictures with questions, in arrays."""

from __future__ import annotations

from collections.abc import Iterable
from random import Random
from typing import NamedTuple

import numpy as np
from tokenizers import Tokenizer

from checkpoints.pictures.questions import Question
from checkpoints.pictures.scene import COLOURS, DIGITS, SHAPES, Scene, draw
from checkpoints.pictures.tokenizer import IMAGE, PATCH, PATCHES, SIDE
from checkpoints.tiny.tokenizer import ASSISTANT_ID, BOS_ID, END_ID, PAD_ID, USER_ID

FIRST = 2  # where the image begins: behind the begin token and that of the user's turn
# what the tower learns to say of a patch, 0 where there is nothing
SHAPE_CLASSES = {name: i for i, name in enumerate((*SHAPES, *DIGITS), 1)}
COLOUR_CLASSES = {name: i for i, name in enumerate(COLOURS, 1)}
_GRID = SIDE // PATCH
# of shape, colour, row and column; the last two keep places easy to read behind the tower
PATCH_CLASSES = (1 + len(SHAPE_CLASSES), 1 + len(COLOUR_CLASSES), 1 + _GRID, 1 + _GRID)


class Batch(NamedTuple):
    """B pictures, each with its questions in a row of L tokens behind it.

    Attributes:
        pixels: float32[B, 3, side, side], -1 to 1.
        patches: int64[B, patches, 4], classes of the thing whose centre is in a patch, see
            `PATCH_CLASSES`.
        tokens: int64[B, L].
        positions: int64[B, L].
        turns: int64[B, L], which question a token belongs to; 0 is what comes before the first.
        is_chat: bool[B], whether questions see those before them.
        learnt: bool[B, L], whether a token is the answer's.
    """

    pixels: np.ndarray
    patches: np.ndarray
    tokens: np.ndarray
    positions: np.ndarray
    turns: np.ndarray
    is_chat: np.ndarray
    learnt: np.ndarray


def pixels_of(pictures: np.ndarray) -> np.ndarray:
    """uint8[B, side, side, 3] -> float32[B, 3, side, side], as the image processor has them."""
    return np.ascontiguousarray(pictures.transpose(0, 3, 1, 2), np.float32) / 127.5 - 1


def patches_of(scene: Scene) -> np.ndarray:
    """The classes of what is in each, int64[patches, 4]."""
    found = np.zeros((_GRID, _GRID, len(PATCH_CLASSES)), np.int64)
    for thing in scene.things:
        row, column = int(thing.y * _GRID), int(thing.x * _GRID)
        kinds = SHAPE_CLASSES[thing.shape], COLOUR_CLASSES[thing.colour]
        found[row, column] = *kinds, 1 + row, 1 + column
    return found.reshape(PATCHES, len(PATCH_CLASSES))


class RowEncoder:
    """Makes rows of questions. A conversation is as the chat template has it."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._known: dict[str, list[int]] = {}
        image = tokenizer.token_to_id(IMAGE)
        self._begin = [BOS_ID, USER_ID, *[image] * PATCHES]

    def _ids(self, text: str) -> list[int]:
        if text not in self._known:
            self._known[text] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return self._known[text]

    def row(self, asked: list[Question], is_chat: bool) -> np.ndarray:
        """Tokens, positions, turns and whether they are learnt: int64[4, L].

        Without ``is_chat`` each question is the first: its positions go on from the image's.
        """
        found = [(id, at, 0, 0) for at, id in enumerate(self._begin)]
        for turn, question in enumerate(asked, 1):
            prompt = [*self._ids(question.prompt), END_ID, ASSISTANT_ID]
            if is_chat and turn > 1:
                prompt.insert(0, USER_ID)
            answer = [*self._ids(question.answer), END_ID]
            at = len(found) if is_chat else len(self._begin)
            for place, id in enumerate(prompt + answer):
                found.append((id, at + place, turn, int(place >= len(prompt))))
        return np.array(found, np.int64).T

    def batch(self, asked: Iterable[tuple[Scene, list[Question]]], chat: list[bool]) -> Batch:
        """The batch of pictures with their questions; ``chat`` says for each how they are asked."""
        scenes, lists = zip(*asked)
        rows = [self.row(each, is_chat) for each, is_chat in zip(lists, chat)]
        length = max(row.shape[1] for row in rows)
        table = np.zeros((4, len(rows), length), np.int64)
        table[0] = PAD_ID
        for i, row in enumerate(rows):
            table[:, i, : row.shape[1]] = row
        return Batch(
            pixels=pixels_of(np.stack([draw(scene, SIDE) for scene in scenes])),
            patches=np.stack([patches_of(scene) for scene in scenes]),
            tokens=table[0],
            positions=table[1],
            turns=table[2],
            is_chat=np.array(chat),
            learnt=table[3].astype(bool),
        )


def chats(seed: str, count: int, share: float) -> list[bool]:
    """Which of so many pictures have a conversation."""
    rng = Random(seed)
    return [rng.random() < share for _ in range(count)]
