"""Documents, packing and batches: the stream of text that the bundled model is trained on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from random import Random
from typing import NamedTuple

import numpy as np
from tokenizers import Tokenizer

from checkpoints.tiny import words
from checkpoints.tiny.docstrings import load_docstrings
from checkpoints.tiny.pair import Pair
from checkpoints.tiny.tasks import training_pair
from checkpoints.tiny.tokenizer import ASSISTANT_ID, BOS_ID, END_ID, SYSTEM_ID, USER_ID

_DOC_QUESTIONS = ("What does {} do?", "What is {} in Python?", "Explain {}", "Python docs: {}")


class Batch(NamedTuple):
    """Packed rows: all arrays are ``[rows, length]``; ``weights`` belong to ``targets``."""

    tokens: np.ndarray  # int32
    targets: np.ndarray  # int32
    documents: np.ndarray  # int32, numbers the documents of a row
    weights: np.ndarray  # float32, 1 where the target counts in the loss


@dataclass(frozen=True, slots=True)
class Document:
    """Token ids and, for each, whether the model should learn to write it."""

    ids: list[int]
    learn: list[bool]


def encode_conversation(tokenizer: Tokenizer, pairs: list[Pair], system: str = "") -> Document:
    """Token ids of a conversation as the chat template renders it; answers are to be learnt."""

    def encode(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False).ids)

    ids, learn = [BOS_ID], [False]
    if system:
        turn = [SYSTEM_ID, *encode(system), END_ID]
        ids += turn
        learn += [False] * len(turn)
    for pair in pairs:
        question = [USER_ID, *encode(pair.prompt), END_ID, ASSISTANT_ID]
        answer = [*encode(pair.answer), END_ID]
        ids += question + answer
        learn += [False] * len(question) + [True] * len(answer)
    return Document(ids, learn)


def encode_text(tokenizer: Tokenizer, text: str) -> Document:
    """Token ids of plain text, all of it to be learnt."""
    ids = [*tokenizer.encode(text).ids, END_ID]
    return Document(ids, [False] + [True] * (len(ids) - 1))


def tokenizer_texts(seed: int, pairs: int = 40_000) -> Iterator[str]:
    """The texts that the tokenizer is trained on: documentation and task pairs."""
    for item in load_docstrings():
        if not item.held_out:
            yield item.document
    rng = Random(f"tokenizer {seed}")
    for _ in range(pairs):
        pair = training_pair(rng)
        yield pair.prompt
        yield pair.answer


class Stream:
    """An endless seeded stream of packed batches, from the training side of the split only."""

    def __init__(self, tokenizer: Tokenizer, seed: int):
        self._tokenizer = tokenizer
        self._rng = Random(f"stream {seed}")
        self._docs = [item for item in load_docstrings() if not item.held_out]
        self._texts = [encode_text(tokenizer, item.document) for item in self._docs]
        self._filler: list[tuple[int, bool]] = []
        self._waiting: Document | None = None

    def _conversation(self, length: int) -> Document:
        rng = self._rng
        if rng.random() < 0.03:
            item = rng.choice(self._docs)
            question = rng.choice(_DOC_QUESTIONS).format(item.name)
            pairs = [Pair("python_docs", question, item.summary, item.name)]
        else:
            turns = 1
            while rng.random() < (0.15 if length <= 128 else 0.6) and turns < length // 40:
                turns += 1
            pairs = [training_pair(rng) for _ in range(turns)]
        system = rng.choice(words.SYSTEM_PROMPTS) if rng.random() < 0.1 else ""
        return encode_conversation(self._tokenizer, pairs, system)

    def _plain(self, count: int) -> list[tuple[int, bool]]:
        """The next ``count`` tokens of the endless shuffled documentation."""
        while len(self._filler) < count:
            text = self._rng.choice(self._texts)
            self._filler += list(zip(text.ids, text.learn))
        taken, self._filler = self._filler[:count], self._filler[count:]
        return taken

    def _row(self, length: int) -> list[tuple[int, bool, int]]:
        row: list[tuple[int, bool, int]] = []
        number = 0
        while len(row) < length:
            document = self._waiting or self._conversation(length)
            self._waiting = None
            if len(document.ids) > length:
                continue
            if len(row) + len(document.ids) > length:
                self._waiting = document
                row += [(t, n, number) for t, n in self._plain(length - len(row))]
                break
            row += [(t, n, number) for t, n in zip(document.ids, document.learn)]
            number += 1
        return row

    def batch(self, rows: int, length: int) -> Batch:
        """The next batch; what a conversation leaves free in a row is filled with plain text."""
        # One row in twelve is plain text, so that the model also reads long stretches of it.
        table = np.array(
            [
                [(t, n, 0) for t, n in self._plain(length + 1)]
                if self._rng.random() < 1 / 12
                else self._row(length + 1)
                for _ in range(rows)
            ],
            np.int32,
        )
        same = table[:, 1:, 2] == table[:, :-1, 2]
        return Batch(
            tokens=table[:, :-1, 0],
            targets=table[:, 1:, 0],
            documents=table[:, :-1, 2],
            weights=(table[:, 1:, 1] * same).astype(np.float32),
        )
