"""Tags that are special tokens of a model's tokenizer reach the parser."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer as RustTokenizer
from tokenizers import decoders, models, pre_tokenizers, trainers

from jaxserve.tokenization import IncrementalDetokenizer, Tokenizer
from server.protocol.tools import asked_tools
from server.tools.choice import Parsers

TOOL = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {}}}}}
TEXTS = {
    "deepseek_v3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n"
    '{"a": "b"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    "glm45": "<tool_call>f<arg_key>a</arg_key><arg_value>b</arg_value></tool_call>",
    "mistral": '[TOOL_CALLS]f[ARGS]{"a": "b"}',
    "openai": '<|channel|>commentary to=functions.f<|constrain|>json<|message|>{"a": "b"}<|call|>',
}
TAGS = "<｜tool▁calls▁begin｜> <｜tool▁call▁begin｜> <｜tool▁sep｜> <｜tool▁call▁end｜> <tool_call>"
TAGS += " <｜tool▁calls▁end｜> </tool_call> <arg_key> </arg_key> <arg_value> </arg_value> <|call|>"
TAGS += " [TOOL_CALLS] [ARGS] <|channel|> <|constrain|> <|message|>"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder: Path = tmp_path_factory.mktemp("special")
    backend = RustTokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=TAGS.split(),
        initial_alphabet=alphabet,
        show_progress=False,
    )
    backend.train_from_iterator(["a"], trainer)
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text("{}")
    return Tokenizer(folder)


@pytest.mark.parametrize("name", TEXTS)
def test_special_tokens_are_read(name: str, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(TEXTS[name], add_special_tokens=False)
    assert tokenizer.special_ids & set(ids)
    parsers, asked = Parsers(name, True), asked_tools([TOOL], "auto", None)
    skipped = not parsers.reads_special_tokens(asked)
    shown = IncrementalDetokenizer(tokenizer, skip_special_tokens=skipped)
    reader = parsers.reader(asked, "", thinks=True, tells_reasoning=True)
    deltas = [reader.feed(shown.append(token), last=False) for token in ids]
    deltas.append(reader.feed(shown.finish(), last=True))
    calls = [call["function"] for delta in deltas for call in delta.get("tool_calls", ())]
    assert [one["name"] for one in calls if "name" in one] == ["f"]
    assert json.loads("".join(one["arguments"] for one in calls)) == {"a": "b"}
    assert not any(delta.get("content") for delta in deltas)
