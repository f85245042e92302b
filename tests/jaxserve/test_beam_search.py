"""Beam searches through the whole engine find what transformers' find, whatever runs beside."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from checkpoints import bundled_model_path
from jaxserve import LLM, BeamSearchParams, SamplingParams
from jaxserve.errors import ValidationError
from tests.jaxserve import oracle
from tests.tiny_models import VOCAB_SIZE

# enough ends that some sequences stop early
EOS = [2, 11, 31, 57, 83, 101, 150, 171]
MAX_TOKENS = 24
SEARCHES: list[dict[str, Any]] = [
    {"beam_width": 1},
    {"beam_width": 2},
    {"beam_width": 4, "early_stopping": True},
    {"beam_width": 4, "length_penalty": 0.0, "early_stopping": "never"},
    {"beam_width": 4, "length_penalty": 2.0, "early_stopping": "never"},
    {"beam_width": 3, "length_penalty": -1.0},
    {"beam_width": 3, "ignore_eos": True},
    {"beam_width": 8, "length_penalty": 0.5},
]


@pytest.fixture(scope="module")
def folder(model_folder):
    return model_folder("llama_gqa", num_hidden_layers=1, eos_token_id=EOS)


@pytest.fixture(scope="module")
def model(folder):
    return oracle.load(folder)


@pytest.fixture(scope="module")
def llm(folder, make_llm) -> LLM:
    return make_llm(folder, max_num_seqs=12, max_num_batched_tokens=64, max_logprobs=64)


def searched(
    model: LlamaForCausalLM, prompt: list[int], params: BeamSearchParams
) -> list[tuple[list[int], float]]:
    """Sequences and scores, by transformers."""
    width = params.beam_width
    options: dict[str, Any] = {}
    if width > 1:
        options = {
            "length_penalty": params.length_penalty,
            "early_stopping": params.early_stopping,
            "num_return_sequences": width,
        }
    eos = None if params.ignore_eos else model.config.eos_token_id
    found = model.generate(
        torch.tensor([prompt]),
        num_beams=width,
        do_sample=False,
        max_new_tokens=params.max_tokens,
        eos_token_id=eos,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_scores=True,
        **options,
    )
    ends = set() if eos is None else {eos} if isinstance(eos, int) else set(eos)
    cut = []
    for tokens in found.sequences.tolist():
        length = next(
            (at for at in range(len(prompt), len(tokens)) if tokens[at] in ends), len(tokens) - 1
        )
        cut.append(tokens[: length + 1])
    if width > 1:
        return [*zip(cut, found.sequences_scores.tolist())]
    steps = model.compute_transition_scores(found.sequences, found.scores, normalize_logits=True)
    length = len(cut[0]) - len(prompt)
    total = float(steps[0, :length].sum())
    return [(cut[0], total / length**params.length_penalty)]


def check(output, expected, prompt: list[int], params: BeamSearchParams) -> None:
    assert [s.tokens for s in output.sequences] == [tokens for tokens, _ in expected]
    for sequence, (tokens, score) in zip(output.sequences, expected):
        length = len(tokens) - len(prompt)
        assert sequence.cum_logprob / length**params.length_penalty == pytest.approx(
            score, abs=1e-3
        )


@pytest.mark.parametrize("search", SEARCHES, ids=str)
def test_sequences_and_scores_equal_transformers(search, model, llm) -> None:
    params = BeamSearchParams(max_tokens=MAX_TOKENS, **search)
    prompts = oracle.prompts(3, VOCAB_SIZE, 30)
    for output, prompt in zip(llm.beam_search(prompts, params), prompts, strict=True):
        check(output, searched(model, prompt, params), prompt, params)


@pytest.mark.slow
def test_searches_and_others_share_steps_and_pages(folder, model, make_llm) -> None:
    """With so few pages and slots that beams are preempted, and next to ordinary requests."""
    small = make_llm(folder, max_num_seqs=6, num_pages=26, max_logprobs=64)
    prompts = oracle.prompts(6, VOCAB_SIZE, 40, seed=5)
    wide = BeamSearchParams(8, 30, ignore_eos=True)
    client, found = small.client, {}
    sampled = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
    for number, prompt in enumerate(prompts):
        params = wide if number % 2 else sampled
        client.add(client.prepare(prompt, params, str(number)))
    while client.has_work:
        found |= {output.request_id: output for output in client.outputs() if output.finished}
    assert small.stats().num_preemptions > 0 and small.stats().page_usage == 0.0
    for number, prompt in enumerate(prompts):
        outputs = found[str(number)].outputs
        if number % 2:
            expected = [tokens[len(prompt) :] for tokens, _ in searched(model, prompt, wide)]
            assert [one.token_ids for one in outputs] == expected
        else:
            assert outputs[0].token_ids == oracle.greedy(model, prompt, 60)
    small.client.engine.scheduler.check_integrity()


@pytest.mark.slow
def test_searches_that_may_shrink_give_beams_up_for_want_of_pages(folder, model, make_llm) -> None:
    small = make_llm(folder, max_num_seqs=12, num_pages=26, max_logprobs=64)
    prompts = oracle.prompts(3, VOCAB_SIZE, 40, seed=5)
    params = BeamSearchParams(8, 30, ignore_eos=True, shrink_under_pressure=True)
    outputs = small.beam_search(prompts, params)
    assert small.memory_report()["beam_shrinks"] == small.stats().num_beam_shrinks > 0
    for output, prompt in zip(outputs, prompts, strict=True):
        best, _ = searched(model, prompt, params)[0]
        scored = [sequence.cum_logprob for sequence in output.sequences]
        assert len(scored) == 8 and scored == sorted(scored, reverse=True)
        assert all(len(sequence.tokens) == len(best) for sequence in output.sequences)
    before = small.stats().num_beam_shrinks
    alone = small.beam_search(prompts[:1], BeamSearchParams(2, 4, shrink_under_pressure=True))
    check(
        alone[0],
        searched(model, prompts[0], BeamSearchParams(2, 4)),
        prompts[0],
        BeamSearchParams(2, 4),
    )
    assert small.stats().num_beam_shrinks == before, "pages are not short: nothing is given up"
    small.client.engine.scheduler.check_integrity()


def test_a_search_ends_with_its_request(llm) -> None:
    client = llm.client
    prompt = oracle.prompts(1, VOCAB_SIZE, 30)[0]
    client.add(client.prepare(prompt, BeamSearchParams(4, 50, ignore_eos=True), "a"))
    for _ in range(5):
        assert not client.outputs()
    assert llm.stats().num_running == 4
    last = client.abort("a")
    assert last is not None and [one.finish_reason for one in last.outputs] == ["abort"] * 4
    while client.has_work:
        client.outputs()
    assert llm.stats().page_usage == 0.0 and not client.engine.scheduler.has_unfinished


def test_parameters_may_change_while_a_search_runs(llm) -> None:
    params = BeamSearchParams(beam_width=2, max_tokens=3)
    group = llm.client.prepare([5, 6], params, "mine").group
    params.beam_width = 5
    assert group.beams is not None and group.beams.beam_width == 2


def test_too_wide_a_search_is_refused_by_name(llm) -> None:
    with pytest.raises(ValidationError, match=r"beam_width.*1 to 56.*max_logprobs=64"):
        llm.beam_search([[5]], BeamSearchParams(57, 4))
    llm.beam_search([[5]], BeamSearchParams(12, 2))


@pytest.mark.parametrize(
    "wrong",
    [
        {"beam_width": 0},
        {"beam_width": 2.0},
        {"max_tokens": 0},
        {"length_penalty": float("nan")},
        {"early_stopping": "maybe"},
        {"ignore_eos": 1},
        {"shrink_under_pressure": "yes"},
    ],
    ids=str,
)
def test_parameters_are_checked(wrong) -> None:
    (name,) = wrong
    with pytest.raises(ValidationError, match=name):
        BeamSearchParams(**({"beam_width": 2, "max_tokens": 4} | wrong))


@pytest.mark.slow
@pytest.mark.parametrize("width", [4])
def test_the_bundled_model_finds_what_transformers_finds(width: int, make_llm) -> None:
    folder = bundled_model_path()
    llm = make_llm(folder, dtype="float32", skip_tokenizer_init=False, max_num_seqs=16)
    model, tokenizer = oracle.load(folder), llm.get_tokenizer()
    params = BeamSearchParams(width, 20, include_stop_str_in_output=True)
    asked = ["Add 17 and 25.", "Sort 5, 3 and 9."]
    prompts = [tokenizer.encode("What is")]
    for question in asked:
        message = {"role": "user", "content": question}
        text = tokenizer.apply_chat_template([message], add_generation_prompt=True)
        prompts.append(tokenizer.encode(text, add_special_tokens=False))
    outputs = llm.beam_search(prompts, params)
    for output, prompt in zip(outputs, prompts, strict=True):
        check(output, searched(model, prompt, params), prompt, params)
        for sequence in output.sequences:
            assert sequence.text == tokenizer.decode(sequence.tokens)
    ends = {sequence.finish_reason for output in outputs for sequence in output.sequences}
    hidden = llm.beam_search(prompts, BeamSearchParams(width, 20))
    for output, other in zip(outputs, hidden):
        for mine, its in zip(output.sequences, other.sequences):
            shown = its.tokens[:-1] if its.finish_reason == "stop" else its.tokens
            assert mine.tokens == its.tokens and its.text == tokenizer.decode(shown)
    assert ends == {"stop", "length"}
