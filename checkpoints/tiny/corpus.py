"""Documents, packing and batches: the stream of text that the bundled model is trained on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
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
_WAITING = 16  # conversations to choose from when a row has space left


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
    """Token ids of a conversation as the chat template renders it; answers are to be learnt.

    What belongs before a pair is not added: see `encode_question`.
    """

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


def encode_question(tokenizer: Tokenizer, pair: Pair) -> Document:
    """A pair in the conversation that it needs, of which its own answer alone counts."""
    begin = len(encode_conversation(tokenizer, list(pair.before), pair.system).ids)
    whole = encode_conversation(tokenizer, [*pair.before, pair], pair.system)
    return Document(whole.ids, [n and at >= begin for at, n in enumerate(whole.learn)])


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
    """Packed batches from the training side of the split only; seed and step decide each of them.

    No batch depends on those before it, so a run that is resumed reads what it would have read.
    """

    def __init__(self, tokenizer: Tokenizer, seed: int):
        self._tokenizer = tokenizer
        self._seed = seed
        self._docs = [item for item in load_docstrings() if not item.held_out]
        self._texts = [encode_text(tokenizer, item.document) for item in self._docs]

    def batch(
        self, step: int, rows: int, length: int, late: bool = False, tools: float = 0.0
    ) -> Batch:
        """The batch of a step; what conversations leave free in a row is filled with plain text.

        ``late`` draws tasks by their late shares; ``tools`` is the share of conversations with
        tools.
        """
        rng = Random(f"stream {self._seed} {step}")

        def draw() -> Document:
            if tools and rng.random() < tools:
                pair = training_pair(rng, late, with_tools=True)
                return encode_conversation(self._tokenizer, [*pair.before, pair], pair.system)
            return self._conversation(rng, length, late)

        packer = _Packer(rng, self._texts, draw)
        # One row in 24 is plain text, so that the model also reads long stretches of it.
        table = np.array(
            [
                packer.plain(length + 1) if rng.random() < 1 / 24 else packer.row(length + 1)
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

    def _conversation(self, rng: Random, length: int, late: bool) -> Document:
        """A conversation of one turn in rows of 64, of up to the whole row in long rows."""
        if rng.random() < 0.02:
            item = rng.choice(self._docs)
            question = rng.choice(_DOC_QUESTIONS).format(item.name)
            pairs = [Pair("python_docs", question, item.summary, item.name)]
        else:
            more = 0.0 if length < 128 else 0.3 if length < 512 else 1 - 64 / length
            turns = 1
            while rng.random() < more and turns < length // 40:
                turns += 1
            pairs = [training_pair(rng, late) for _ in range(turns)]
        system = rng.choice(words.SYSTEM_PROMPTS) if rng.random() < 0.1 else ""
        return encode_conversation(self._tokenizer, pairs, system)


class _Packer:
    """Fills rows with whole conversations, and what is left of a row with documentation."""

    def __init__(self, rng: Random, texts: list[Document], draw: Callable[[], Document]):
        self._rng = rng
        self._texts = texts
        self._draw = draw
        self._filler: list[tuple[int, bool]] = []
        self._waiting: list[Document] = []

    def plain(self, count: int, number: int = 0) -> list[tuple[int, bool, int]]:
        """The next ``count`` tokens of the endless shuffled documentation, as one document."""
        while len(self._filler) < count:
            text = self._rng.choice(self._texts)
            self._filler += list(zip(text.ids, text.learn))
        taken, self._filler = self._filler[:count], self._filler[count:]
        return [(token, learn, number) for token, learn in taken]

    def row(self, length: int) -> list[tuple[int, bool, int]]:
        """A row that begins with the conversation that has waited longest."""
        row: list[tuple[int, bool, int]] = []
        number = 0
        while document := self._next(length - len(row), length, first=not row):
            row += [(t, n, number) for t, n in zip(document.ids, document.learn)]
            number += 1
        return row + self.plain(length - len(row), number)

    def _next(self, free: int, length: int, first: bool) -> Document | None:
        """The oldest (``first``) or the longest waiting conversation of at most ``free`` tokens."""
        while len(self._waiting) < _WAITING:
            document = self._draw()
            if len(document.ids) <= length:
                self._waiting.append(document)
        fitting = [document for document in self._waiting if len(document.ids) <= free]
        if not fitting:
            return None
        chosen = fitting[0] if first else max(fitting, key=lambda document: len(document.ids))
        self._waiting.remove(chosen)
        return chosen
