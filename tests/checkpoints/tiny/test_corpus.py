"""Documents and batches: what is learnt, what is masked, what is held out."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
from tokenizers import Tokenizer

from checkpoints.tiny.corpus import Stream, encode_conversation, encode_text
from checkpoints.tiny.docstrings import load_docstrings
from checkpoints.tiny.tasks import training_pair
from checkpoints.tiny.tokenizer import BOS_ID, END_ID
from tests.checkpoints.tiny.bundled import FOLDER


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(FOLDER / "tokenizer.json"))


def test_only_answers_are_learnt(tokenizer: Tokenizer) -> None:
    rng = Random(2)
    pairs = [training_pair(rng) for _ in range(3)]
    document = encode_conversation(tokenizer, pairs, "Answer briefly.")
    learnt = [token for token, learn in zip(document.ids, document.learn) if learn]
    text = tokenizer.decode(learnt, skip_special_tokens=False)
    assert text == "".join(f"{pair.answer}<|end|>" for pair in pairs)


def test_text_ends_with_the_end_token(tokenizer: Tokenizer) -> None:
    document = encode_text(tokenizer, "def f(x)\nReturn x.")
    assert document.ids[-1] == END_ID
    assert document.learn == [False] + [True] * (len(document.ids) - 1)


@pytest.mark.slow
@pytest.mark.parametrize(("rows", "length"), [(16, 64), (16, 128), (4, 512)])
def test_batches_are_full_and_shifted(tokenizer: Tokenizer, rows: int, length: int) -> None:
    stream = Stream(tokenizer, 0)
    for step in range(5):
        batch = stream.batch(step, rows, length)
        assert batch.tokens.shape == batch.targets.shape == batch.weights.shape == (rows, length)
        assert (batch.tokens[:, 1:] == batch.targets[:, :-1]).all()
        assert (np.diff(batch.documents, axis=1) >= 0).all()
        # The first token of a document is never a target that counts.
        starts = np.diff(batch.documents, axis=1) == 1
        assert (batch.weights[:, :-1][starts] == 0).all()
        assert 0.3 < batch.weights.mean() < 0.95


@pytest.mark.slow
def test_seed_and_step_decide_a_batch(tokenizer: Tokenizer) -> None:
    first, second, other = Stream(tokenizer, 5), Stream(tokenizer, 5), Stream(tokenizer, 6)
    wanted = [first.batch(step, 4, 128).tokens for step in range(3)]
    for step in (2, 0, 1):
        assert (wanted[step] == second.batch(step, 4, 128).tokens).all()
        assert (wanted[step] != other.batch(step, 4, 128).tokens).any()
    assert (wanted[0] != wanted[1]).any()


@pytest.mark.slow
def test_long_rows_hold_long_conversations(tokenizer: Tokenizer) -> None:
    def longest(length: int) -> int:
        documents = Stream(tokenizer, 0).batch(0, 8192 // length, length).documents
        return max(np.bincount(row).max() for row in documents if row[-1])

    assert longest(64) <= 64 < longest(128) <= 128 < 1000 < longest(2048)


def test_docstrings_come_from_the_standard_library() -> None:
    items = load_docstrings()
    names = {item.name for item in items}
    assert {"json", "heapq.nsmallest", "str.split", "textwrap.dedent"} <= names
    assert len(items) > 3000
    assert len({item.text for item in items}) == len(items)
    held = [item for item in items if item.held_out]
    assert 0.01 < len(held) / len(items) < 0.06


def test_held_out_docstrings_are_never_streamed(tokenizer: Tokenizer) -> None:
    def opening(text: str) -> tuple[int, ...]:
        return tuple(encode_text(tokenizer, text).ids[:40])

    held = {opening(item.document) for item in load_docstrings() if item.held_out}
    stream, starts = Stream(tokenizer, 0), set()
    for step in range(60):
        batch = stream.batch(step, 16, 128)
        for row in batch.tokens:
            for at in np.flatnonzero(row == BOS_ID):
                starts.add(tuple(row[at : at + 40].tolist()))
    assert len(starts) > 1000
    assert not held & starts
