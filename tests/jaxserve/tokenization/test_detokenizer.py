"""Streamed text equals decoded text, and never holds half a character."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.errors import ValidationError
from jaxserve.tokenization import IncrementalDetokenizer, Tokenizer

KINDS = ["byte_level", "sentencepiece", "metaspace", "word_level"]
TEXTS = st.text(
    st.one_of(
        st.characters(codec="utf-8"),
        st.sampled_from("你好世界🙂🚀👨‍👩‍👧é \n▁Hello"),
    ),
    max_size=30,
)


@pytest.fixture(scope="module")
def tokenizers(byte_level, sentencepiece, metaspace, word_level):
    return dict(zip(KINDS, (byte_level, sentencepiece, metaspace, word_level)))


def stream(tokenizer, ids, prompt=(), **options):
    detokenizer = IncrementalDetokenizer(tokenizer, prompt, **options)
    return [*map(detokenizer.append, ids), detokenizer.finish()]


@given(data=st.data(), skip=st.booleans())
@settings(max_examples=150, deadline=None)
def test_random_byte_level_ids(tokenizers, data, skip):
    tokenizer = tokenizers["byte_level"]
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 2), max_size=40))
    pieces = stream(tokenizer, ids, skip_special_tokens=skip)
    assert "".join(pieces) == tokenizer.decode(ids, skip_special_tokens=skip)


@given(data=st.data(), skip=st.booleans(), kind=st.sampled_from(KINDS[1:]))
@settings(max_examples=150, deadline=None)
def test_random_ids_of_other_kinds(tokenizers, data, skip, kind):
    tokenizer = tokenizers[kind]
    tokens = tokenizer.convert_ids_to_tokens(range(tokenizer.vocab_size))
    # Lone bytes from 0x80 on are broken UTF-8, where `decode` gives up the whole run of bytes.
    whole = [i for i, token in enumerate(tokens) if not re.match("<0x[89A-F]", token)]
    ids = data.draw(st.lists(st.sampled_from([*whole, tokenizer.vocab_size]), max_size=30))
    pieces = stream(tokenizer, ids, skip_special_tokens=skip)
    assert "".join(pieces) == tokenizer.decode(ids, skip_special_tokens=skip)


@given(text=TEXTS, kind=st.sampled_from(KINDS))
@settings(max_examples=200, deadline=None)
def test_encoded_texts(tokenizers, text, kind):
    tokenizer = tokenizers[kind]
    ids = tokenizer.encode(text, add_special_tokens=False)
    pieces = stream(tokenizer, ids)
    assert "".join(pieces) == tokenizer.decode(ids, skip_special_tokens=True)
    assert "\ufffd" in text or "\ufffd" not in "".join(pieces)


@given(prompt=TEXTS.filter(bool), text=TEXTS, kind=st.sampled_from(KINDS[:3]))
@settings(max_examples=150, deadline=None)
def test_text_continues_the_prompt(tokenizers, prompt, text, kind):
    tokenizer = tokenizers[kind]
    before = tokenizer.encode(prompt, add_special_tokens=False)
    ids = tokenizer.encode(text, add_special_tokens=False)
    if kind == "sentencepiece" and len(tokenizer.decode(before)) == 0:
        return  # the space that is dropped at the start may be the output's
    whole = tokenizer.decode([*before, *ids], skip_special_tokens=True)
    continued = "".join(stream(tokenizer, ids, before))
    assert tokenizer.decode(before, skip_special_tokens=True) + continued == whole


def test_first_word_after_a_prompt_keeps_its_space(sentencepiece):
    ids = sentencepiece.encode("world", add_special_tokens=False)
    assert "".join(stream(sentencepiece, ids)) == "world"
    prompt = sentencepiece.encode("Hello", add_special_tokens=False)
    assert "".join(stream(sentencepiece, ids, prompt)) == " world"


@pytest.mark.parametrize("kind", ["byte_level", "sentencepiece"])
def test_a_character_comes_out_with_its_last_byte(kind, request):
    tokenizer = request.getfixturevalue(kind)
    ids = tokenizer.encode("𓀀", add_special_tokens=False)[-4:]
    assert stream(tokenizer, ids, ids[:0]) == ["", "", "", "𓀀", ""]
    # A character that the prompt began.
    assert stream(tokenizer, ids[2:], ids[:2]) == ["", "𓀀", ""]
    assert stream(tokenizer, [], ids[:2]) == [""]


@pytest.mark.parametrize("kind", ["byte_level", "sentencepiece"])
def test_broken_bytes_become_replacement_characters(kind, request):
    tokenizer = request.getfixturevalue(kind)
    ids = tokenizer.encode("𓀀", add_special_tokens=False)[-4:]
    letter = tokenizer.encode("o", add_special_tokens=False)[-1:]
    text = "o"
    assert stream(tokenizer, ids[:3], letter) == ["", "", "", "\ufffd"]
    assert stream(tokenizer, ids[:2] + letter, letter)[-2:] == ["\ufffd" + text, ""]
    assert stream(tokenizer, ids[-1:] * 3, letter) == ["\ufffd"] * 3 + [""]
    assert stream(tokenizer, ids + ids[-1:], letter) == ["", "", "", "𓀀", "\ufffd", ""]


def test_spaces_between_added_tokens(word_level):
    ids = [3, 2, 2, 4]
    options = {"skip_special_tokens": False}
    assert "".join(stream(word_level, ids, **options)) == "a </s> </s> dog"
    options["spaces_between_special_tokens"] = False
    assert "".join(stream(word_level, ids, **options)) == "a </s></s> dog"


def test_a_decoder_that_looks_at_neighbours_is_refused(tmp_path):
    from tokenizers import Tokenizer as RustTokenizer
    from tokenizers import decoders, models

    from tests.jaxserve.tokenization.conftest import save

    backend = RustTokenizer(models.BPE({"a</w>": 0, "<s>": 1, "</s>": 2, "<unk>": 3}, []))
    backend.decoder = decoders.BPEDecoder()
    with pytest.raises(ValidationError, match="BPEDecoder"):
        Tokenizer(save(backend, tmp_path))


def test_what_is_held_back_does_not_grow(byte_level):
    # Lone continuation bytes never become a character: the hardest case for window methods.
    ids = byte_level.encode("🙂", add_special_tokens=False)[-1:]
    broken = next(i for i in range(300) if byte_level.byte_table[i] == b"\x80")
    for token in (ids[0], broken):
        detokenizer = IncrementalDetokenizer(byte_level, [])
        for _ in range(1000):
            detokenizer.append(token)
            assert len(detokenizer._utf8.getstate()[0]) < 4
