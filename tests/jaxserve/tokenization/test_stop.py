"""Stop strings are found wherever the text is split."""

from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.tokenization import StopChecker

LETTERS = st.text("ab", min_size=1, max_size=5)


def search(text, stop, include):
    """The oracle: the stop string that is complete first, the longest of several."""
    for end in range(1, len(text) + 1):
        found = [s for s in stop if text[:end].endswith(s)]
        if found:
            longest = max(found, key=len)
            return text[: end if include else end - len(longest)], longest
    return text, None


def run(checker, pieces):
    sent = []
    for piece in pieces:
        text, found = checker.feed(piece)
        sent.append(text)
        if found is not None:
            return sent, found
    return [*sent, checker.finish()], None


@given(
    pieces=st.lists(st.text("ab", max_size=6), max_size=8),
    stop=st.lists(LETTERS, max_size=4),
    include=st.booleans(),
)
@settings(max_examples=200, deadline=None)
def test_any_split_gives_what_a_search_of_the_whole_text_gives(pieces, stop, include):
    sent, found = run(StopChecker(stop, include), pieces)
    assert ("".join(sent), found) == search("".join(pieces), stop, include)


@given(pieces=st.lists(st.text("ab", max_size=4), max_size=8), stop=st.lists(LETTERS, min_size=1))
@settings(max_examples=300, deadline=None)
def test_what_is_held_back_is_no_more_than_the_beginning_of_a_stop_string(pieces, stop):
    checker = StopChecker(stop)
    sent = fed = ""
    for piece in pieces:
        text, found = checker.feed(piece)
        sent, fed = sent + text, fed + piece
        if found is not None:
            return
        longest = max((n for s in stop for n in range(len(s)) if fed.endswith(s[:n])), default=0)
        assert sent == fed[: len(fed) - longest]


def test_no_part_of_a_stop_string_is_sent():
    checker = StopChecker(["###"])
    assert checker.feed("end#") == ("end", None)
    assert checker.feed("#") == ("", None)
    assert checker.feed("x#") == ("##x", None)
    assert checker.feed("##rest") == ("", "###")


def test_held_text_comes_out_at_the_end():
    checker = StopChecker(["stop"])
    assert checker.feed("sto") == ("", None)
    assert checker.finish() == "sto"
    assert checker.finish() == ""


def test_included_stop_string_need_not_wait():
    checker = StopChecker(["stop"], include_stop_str_in_output=True)
    assert checker.feed("a st") == ("a st", None)
    assert checker.feed("op and more") == ("op", "stop")


def test_without_stop_strings_all_passes():
    assert StopChecker([]).feed("anything") == ("anything", None)
