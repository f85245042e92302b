"""Programs as people write them for vLLM's offline API, with the bundled model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from checkpoints import bundled_model_path
from jaxserve import LLM, EngineArgs, SamplingParams
from jaxserve.outputs import RequestOutput
from jaxserve.utils.argparse_utils import FlexibleArgumentParser
from jaxserve.utils.print_utils import print_embeddings

pytestmark = pytest.mark.slow  # each starts an engine

MODEL = str(bundled_model_path())
FLAGS = ["--enforce-eager", "--max-num-seqs", "4", "--max_num_batched_tokens=64"]
SMALL: dict[str, Any] = {"enforce_eager": True, "max_num_seqs": 4, "max_num_batched_tokens": 64}
GREEDY = SamplingParams(temperature=0.0, max_tokens=8)


def parsed(flags: list[str], **defaults: Any) -> dict[str, Any]:
    """Settings of an LLM and what a program adds to its parser."""
    parser = FlexibleArgumentParser()
    EngineArgs.add_cli_args(parser)
    parser.set_defaults(model=MODEL, **defaults)
    group = parser.add_argument_group("Sampling parameters")
    group.add_argument("--max-tokens", type=int)
    group.add_argument("--chat-template-path", type=str)
    return vars(parser.parse_args(flags))


def test_a_program_with_flags_completes_and_chats(tmp_path: Path, capsys: Any) -> None:
    template = tmp_path / "template.jinja"
    template.write_text("{% for m in messages %}{{ m['content'] }}{% endfor %} =")
    args = parsed([*FLAGS, "--max-tokens", "6", f"--chat-template-path={template}"])
    max_tokens, path = args.pop("max_tokens"), args.pop("chat_template_path")
    with LLM(**args) as llm:
        params = llm.get_default_sampling_params()
        params.max_tokens, params.temperature = max_tokens, 0.0
        (completed,) = llm.generate("2 + 2 =", params)
        assert isinstance(completed, RequestOutput) and completed.prompt == "2 + 2 ="
        conversation = [
            {"role": "system", "content": "You are a calculator."},
            {"role": "user", "content": "What is 2 + 2?"},
        ]
        answers = llm.chat([conversation] * 3, params, use_tqdm=True)
        assert len({answer.outputs[0].text for answer in answers}) == 1
        (own,) = llm.chat(
            [{"role": "user", "content": "2 + 2"}], params, chat_template=Path(path).read_text()
        )
        assert own.prompt == "2 + 2 =" and own.outputs[0].text
        labels = [llm.get_tokenizer().encode(word)[-1] for word in (" yes", " no")]
        scoring = SamplingParams(temperature=0.0, max_tokens=1, logprob_token_ids=labels)
        (scored,) = llm.generate("Is 4 even?", scoring, use_tqdm=False)
        (position,) = scored.outputs[0].logprobs or ()
        assert set(labels) <= position.keys() and len(position) <= 3
    assert "3/3" in capsys.readouterr().err


def test_a_program_embeds(capsys: Any) -> None:
    args = parsed(FLAGS, runner="pooling")
    args.pop("max_tokens"), args.pop("chat_template_path")
    with LLM(**args) as llm:
        for output in llm.embed(["one two", "three"]):
            print_embeddings(output.outputs.embedding)
    assert capsys.readouterr().out.count("size=") == 2


def test_a_program_computes_a_long_beginning_once() -> None:
    table = "\n".join(f"| {row} | name {row} | {row * 3} |" for row in range(300))
    overrides = {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 2048,
        },
        "max_model_len": 8192,
    }
    with LLM(MODEL, hf_overrides=overrides, enable_prefix_caching=True, **SMALL) as llm:
        assert llm.config.scheduler.max_model_len == 8192
        (first,) = llm.generate(table + "\nWhich is name 7?", sampling_params=GREEDY)
        (second,) = llm.generate(table + "\nWhich is name 8?", sampling_params=GREEDY)
    assert len(first.prompt_token_ids) > 2048 and not first.num_cached_tokens
    assert second.num_cached_tokens > 2048


def test_a_program_gives_embeddings_of_torch() -> None:
    table = AutoModelForCausalLM.from_pretrained(MODEL).get_input_embeddings()
    with LLM(MODEL, enable_prompt_embeds=True, **SMALL) as llm:
        ids = llm.get_tokenizer().encode("2 + 2 =")
        embeds = table(torch.tensor([ids])).squeeze(0)
        assert embeds.requires_grad
        outputs = llm.generate([{"prompt_embeds": embeds}, "2 + 2 ="], GREEDY)
    assert outputs[0].outputs[0].token_ids == outputs[1].outputs[0].token_ids
