"""Constrained requests through the engine: the same tokens whatever the engine does meanwhile."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest

from checkpoints import bundled_model_path
from jaxserve import LLM, BeamSearchParams, SamplingParams, StructuredOutputsParams
from jaxserve.client.input_processor import PreparedRequest
from jaxserve.errors import ValidationError
from jaxserve.grammars import forced_tokens
from jaxserve.params.structured_outputs_params import Thoughts

pytestmark = pytest.mark.slow

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "kind": {"enum": ["alpha", "alphabet", "beta"]},
        "numbers": {"type": "array", "items": {"type": "integer", "maximum": 99}, "maxItems": 3},
    },
    "required": ["name", "kind", "numbers"],
    "additionalProperties": False,
}
CONSTRAINTS: list[dict[str, Any] | None] = [
    {"json": SCHEMA},
    {"json_object": True},
    {"regex": "[a-c]{3}-[0-9]{2}"},
    {"choice": ["yes", "no", "maybe so"]},
    {"grammar": 'root ::= "a" [0-9]+ "b"'},
    {"structural_tag": {"structures": [{"begin": "<f>", "schema": SCHEMA}], "triggers": ["<f"]}},
    None,
    None,
]
PROMPT = "What is the sum of two and three?"


@pytest.fixture(scope="module")
def llm(make_llm) -> LLM:
    return make(make_llm)


def make(make_llm: Any, **settings: Any) -> LLM:
    made: LLM = make_llm(bundled_model_path(), skip_tokenizer_init=False, **settings)
    return made


def sampling(place: int, asked: dict[str, Any] | None, **more: Any) -> SamplingParams:
    constraint = None if asked is None else StructuredOutputsParams(**asked)
    values = {"seed": place, "max_tokens": 60} | more
    return SamplingParams(structured_outputs=constraint, **values)


def generate(llm: LLM, **more: Any) -> list[tuple[list[int], str | None]]:
    params = [sampling(place, asked, **more) for place, asked in enumerate(CONSTRAINTS)]
    outputs = llm.generate([PROMPT] * len(params), params, use_tqdm=False)
    assert not llm.client.has_work
    return [(one.outputs[0].token_ids, one.outputs[0].finish_reason) for one in outputs]


@pytest.fixture(scope="module")
def expected(llm: LLM) -> list[tuple[list[int], str | None]]:
    return generate(llm)


def test_texts_hold_to_their_constraints(llm: LLM, expected) -> None:
    texts = [llm.get_tokenizer().decode(tokens[:-1]) for tokens, _ in expected]
    jsonschema.validate(json.loads(texts[0]), SCHEMA)
    reasons = [reason for _, reason in expected]
    assert texts[1].startswith("{")  # a string in it may be longer than the text
    assert reasons[1] == "length" or isinstance(json.loads(texts[1]), dict)
    assert texts[3] in ("yes", "no", "maybe so")
    assert [reasons[0], *reasons[2:4]] == ["stop"] * 3


@pytest.mark.parametrize(
    "settings",
    [
        {"overlap": False},
        {"max_num_seqs": 8},
        {"num_pages": 14, "max_model_len": 96},
        {"enable_prefix_caching": False},
    ],
    ids=str,
)
def test_tokens_do_not_depend_on_the_engine(make_llm, expected, settings) -> None:
    llm = make(make_llm, **settings)
    assert generate(llm) == expected
    if "num_pages" in settings:
        assert llm.client.stats().num_preemptions > 0
    llm.close()


def steps_of_one(llm: LLM) -> int:
    """Steps of the first request alone."""
    before = llm.client.stats().num_steps
    llm.generate([PROMPT], [sampling(0, CONSTRAINTS[0])], use_tqdm=False)
    return llm.client.stats().num_steps - before


def test_forced_tokens_change_nothing(llm: LLM, expected, monkeypatch) -> None:
    fewer = steps_of_one(llm)
    monkeypatch.setattr(forced_tokens, "MIN_FORCED", 10**6)
    assert generate(llm) == expected
    assert steps_of_one(llm) > fewer
    monkeypatch.undo()
    # with log-probabilities each token is sampled
    assert generate(llm, logprobs=1) == expected


def test_every_sequence_has_its_own_state(llm: LLM) -> None:
    params = sampling(7, {"regex": "[a-z]{1,12}-[0-9]{3}"}, n=6, temperature=1.5)
    (output,) = llm.generate([PROMPT], params, use_tqdm=False)
    texts = [one.text for one in output.outputs]
    assert len(set(texts)) > 2, texts
    for text in texts:
        word, number = text.split("-")
        assert 1 <= len(word) <= 12 and len(number) == 3 and number.isdigit()


def test_max_tokens_may_cut_what_is_forced(llm: LLM) -> None:
    text = "a text that has no choice at all"
    whole = llm.generate([PROMPT], sampling(0, {"choice": [text]}), use_tqdm=False)[0].outputs[0]
    assert whole.text == text and whole.finish_reason == "stop"
    for most in range(1, len(whole.token_ids)):
        params = sampling(0, {"choice": [text]}, max_tokens=most)
        cut = llm.generate([PROMPT], params, use_tqdm=False)[0].outputs[0]
        assert cut.token_ids == whole.token_ids[:most] and cut.finish_reason == "length"


def test_aborted_while_it_is_compiled_and_while_it_runs(llm: LLM) -> None:
    client = llm.client

    def prepared(number: int) -> PreparedRequest:
        params = sampling(0, {"regex": f"[a-z]{{100}}{number}"}, max_tokens=120)
        return client.prepare(PROMPT, params, f"aborted-{number}")

    client.add(prepared(1))
    client.abort("aborted-1")
    client.add(prepared(2))
    for _ in range(20):
        client.outputs()
    client.abort("aborted-2")
    while client.has_work:
        assert not client.outputs()
    client.engine.scheduler.check_integrity()
    assert client.stats().num_running == 0


def test_a_grammar_that_fails_in_the_engine_ends_its_request(llm: LLM) -> None:
    prepared = llm.client.prepare(PROMPT, sampling(0, {"regex": "[a-z]+"}), "broken")
    object.__setattr__(prepared.group, "grammar", '{"grammars": [{"lark_grammar": "start: x"}]}')
    llm.client.add(prepared)
    outputs: list[Any] = []
    while llm.client.has_work:
        outputs += llm.client.outputs()
    last = outputs[-1].outputs[0]
    assert (last.finish_reason, last.stop_reason) == ("error", "grammar_not_compiled")
    assert not last.text


def test_what_cannot_be_compiled_is_refused_by_name(llm: LLM, make_llm) -> None:
    for asked, field in [({"json": {"not": {}}}, "json"), ({"regex": "(?=a)"}, "regex")]:
        with pytest.raises(ValidationError) as caught:
            llm.generate([PROMPT], sampling(0, asked), use_tqdm=False)
        assert caught.value.field == f"structured_outputs.{field}"
    bare = make_llm(bundled_model_path())
    with pytest.raises(ValidationError, match="skip_tokenizer_init"):
        bare.generate([[5]], sampling(0, {"regex": "a"}), use_tqdm=False)
    bare.close()


def test_other_masks_go_with_a_constraint(llm: LLM) -> None:
    def run(asked: dict[str, Any], **more: Any) -> Any:
        (output,) = llm.generate([PROMPT], sampling(3, asked, **more), use_tqdm=False)
        return output.outputs[0]

    tokenizer = llm.get_tokenizer()
    letters = {"regex": "[ab]{1,30}"}
    ids = [t for t in range(tokenizer.vocab_size) if set(tokenizer.token_text(t)) == {"a"}]
    only = run(letters, allowed_token_ids=ids)
    assert only.finish_reason == "stop" and set(only.text) == {"a"} and len(only.text) == 30
    long = run(letters, min_tokens=8)
    assert len(long.token_ids) > 8 or len(long.text) == 30
    goes_on = run(letters, ignore_eos=True)
    assert goes_on.finish_reason == "stop" and len(goes_on.text) == 30
    words = run({"choice": ["yes", "no"]}, bad_words=["yes"])
    assert words.finish_reason == "stop" and words.text == "no"
    short = run({"choice": ["yes"]}, min_tokens=20)
    assert short.finish_reason == "stop" and short.text == "yes"
    nothing = run({"regex": "b"}, allowed_token_ids=ids)
    assert (nothing.finish_reason, nothing.stop_reason) == ("error", "grammar")


def test_the_text_comes_behind_the_thoughts(llm: LLM) -> None:
    asked = {"choice": ["yes", "no"], "thoughts": Thoughts("<think>", ".", True)}
    (output,) = llm.generate([PROMPT], sampling(5, asked, n=3, temperature=1.0), use_tqdm=False)
    for one in output.outputs:
        thoughts, _, text = one.text.partition(".")
        assert one.finish_reason == "length" or text.strip() in ("yes", "no"), one
        assert thoughts or text
    assert any(one.finish_reason == "stop" for one in output.outputs)


def beams(llm: LLM, width: int, most: int = 60, **asked: Any) -> list[tuple[str, float]]:
    """Texts and scores of a search, of which every pair is in order."""
    params = BeamSearchParams(width, most, structured_outputs=StructuredOutputsParams(**asked))
    (output,) = llm.beam_search([PROMPT], params)
    llm.client.engine.scheduler.check_integrity()
    found = [
        (str(one.text).partition(PROMPT)[2], one.cum_logprob)
        for one in output.sequences
        if one.finish_reason == "stop"
    ]
    assert len(found) == len(output.sequences)
    return found


@pytest.mark.parametrize("settings", [{}, {"max_num_seqs": 3}], ids=["", "few slots"])
def test_every_beam_holds_to_the_constraint(llm: LLM, make_llm, settings) -> None:
    searching = make(make_llm, **settings) if settings else llm
    texts = [text for text, _ in beams(searching, 5, json=SCHEMA)]
    assert len(set(texts)) == 5
    for text in texts:
        jsonschema.validate(json.loads(text), SCHEMA)
    for text, _ in beams(searching, 4, regex="[a-c]{3}-[0-9]{2}"):
        assert len(text) == 6 and set(text[:3]) <= set("abc") and text[4:].isdigit()


def test_a_search_of_one_beam_is_greedy(llm: LLM) -> None:
    for asked in CONSTRAINTS[:5]:
        assert asked is not None
        params = sampling(0, asked, temperature=0.0)
        greedy = llm.generate([PROMPT], params, use_tqdm=False)[0].outputs[0]
        constraint = StructuredOutputsParams(**asked)
        search = BeamSearchParams(1, 60, structured_outputs=constraint)
        (found,) = llm.beam_search([PROMPT], search)[0].sequences
        assert found.tokens[-len(greedy.token_ids) :] == greedy.token_ids, asked


def test_the_most_likely_of_all_choices_are_found(llm: LLM) -> None:
    """Each choice is one text, whose score is the sum of what the model says of its tokens."""
    choices = ["yes", "no", "maybe so", "three", "five"]
    found = beams(llm, 8, choice=choices)  # wider than there are texts
    assert sorted({text for text, _ in found}) == sorted(choices)
    assert len(found) <= 8
    asked = SamplingParams(
        temperature=0.0, logprobs=0, structured_outputs=StructuredOutputsParams(choice=["no"])
    )
    alone = llm.generate([PROMPT], asked, use_tqdm=False)[0].outputs[0]
    score = max(score for text, score in found if text == "no")
    assert score >= alone.cumulative_logprob - 1e-3


def test_a_search_with_a_constraint_that_cannot_be_met_is_refused(llm: LLM) -> None:
    with pytest.raises(ValidationError, match=r"structured_outputs\.regex"):
        beams(llm, 2, regex="(a")


def test_a_search_beside_others_changes_nothing(llm: LLM, expected) -> None:
    client = llm.client
    search = BeamSearchParams(4, 40, structured_outputs=StructuredOutputsParams(json=SCHEMA))
    client.add(client.prepare(PROMPT, search, "search"))
    for place, asked in enumerate(CONSTRAINTS):
        client.add(client.prepare(PROMPT, sampling(place, asked), f"beside-{place}"))
    ended = {}
    while client.has_work:
        ended |= {one.request_id: one.outputs for one in client.outputs() if one.finished}
    beside = [ended[f"beside-{place}"][0] for place in range(len(CONSTRAINTS))]
    assert [(one.token_ids, one.finish_reason) for one in beside] == expected
    for one in ended["search"]:
        jsonschema.validate(json.loads(one.text), SCHEMA)


def thinking(llm: LLM, budget: int | None, **more: Any) -> list[list[int]]:
    values = {"seed": 5, "max_tokens": 40, "temperature": 1.0, "ignore_eos": True} | more
    thoughts = Thoughts("<think>", "</think>", is_open=True)
    params = SamplingParams(thinking_token_budget=budget, thoughts=thoughts, **values)
    (output,) = llm.generate([PROMPT], params, use_tqdm=False)
    assert not llm.client.has_work
    return [one.token_ids for one in output.outputs]


@pytest.mark.parametrize("budget", [0, 1, 2, 7])
def test_thoughts_end_at_their_budget(llm: LLM, budget: int) -> None:
    end = llm.get_tokenizer().encode("</think>", add_special_tokens=False)
    free = thinking(llm, -1, n=3)
    for bound, own in zip(thinking(llm, budget, n=3), free, strict=True):
        assert bound[:budget] == own[:budget]
        assert bound[budget : budget + len(end)] == end
        assert len(bound) == 40
    (scored,) = thinking(llm, budget, logprobs=1)
    assert scored[budget : budget + len(end)] == end


def test_thoughts_that_end_before_are_left_alone(llm: LLM) -> None:
    assert thinking(llm, 40) == thinking(llm, None)
    params = sampling(3, {"choice": ["yes", "no"]}, temperature=1.0)
    open_ = Thoughts("<think>", "</think>", is_open=True)
    params.structured_outputs = StructuredOutputsParams(choice=["yes", "no"], thoughts=open_)
    params.thinking_token_budget = 5
    (output,) = llm.generate([PROMPT], params, use_tqdm=False)
    assert output.outputs[0].text.partition("</think>")[2] in ("yes", "no")
    assert output.outputs[0].finish_reason == "stop"


def test_a_budget_needs_tags(llm: LLM) -> None:
    with pytest.raises(ValidationError, match="thinking_token_budget"):
        llm.generate([PROMPT], SamplingParams(thinking_token_budget=3), use_tqdm=False)


def test_budgets_do_not_depend_on_the_engine(llm: LLM, make_llm) -> None:
    one_by_one = make(make_llm, overlap=False)
    for budget in (1, 5):
        assert thinking(one_by_one, budget, n=3) == thinking(llm, budget, n=3)
    one_by_one.close()
