"""The byte-level BPE tokenizer of the bundled model and its chat template."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

PAD, BOS, END = "<|pad|>", "<|begin|>", "<|end|>"
ROLES = {"system": "<|system|>", "user": "<|user|>", "assistant": "<|assistant|>"}
SPECIAL_TOKENS = [PAD, BOS, END, *ROLES.values()]
PAD_ID, BOS_ID, END_ID, SYSTEM_ID, USER_ID, ASSISTANT_ID = range(6)

# Tools are listed as their calls are written (Hermes' notation), so that a call copies its line.
# A description stands first: what a tool is for is then known where its name is read.
# `tests/checkpoints/tiny/test_tool_text.py` holds this to `tool_text.py`.
_TOOL_LINES = r"""
{%- macro line(tool) -%}
  {%- set function = tool['function'] if tool['function'] is mapping else tool -%}
  {%- set schema = function['parameters'] if function['parameters'] is mapping else {} -%}
  {%- set fields = schema['properties'] if schema['properties'] is mapping else {} -%}
  {%- set needed = schema['required'] if schema['required'] is sequence else fields -%}
  {%- if function['description'] is string and function['description'] | trim -%}
    {{- (function['description'] | trim).split('\n')[0][:80] | trim ~ ' ' -}}
  {%- endif -%}
  {{- '{"name": ' ~ (function['name'] | string | tojson) ~ ', "arguments": {' -}}
  {%- for name, field in fields.items() -%}
    {{- (', ' if not loop.first else '') ~ (name | tojson) ~ ': ' -}}
    {{- field['type'] if field is mapping and field['type'] is string else 'any' -}}
    {{- '?' if name not in needed else '' -}}
  {%- endfor -%}
  {{- '}}' -}}
{%- endmacro -%}
{%- set listing -%}
  {%- if tools -%}
    {{- 'Tools:' -}}
    {%- for tool in tools -%}{{- '\n' ~ line(tool) -}}{%- endfor -%}
  {%- endif -%}
{%- endset -%}
"""
_MESSAGES = r"""
{{- bos_token -}}
{%- if listing and messages[0]['role'] != 'system' -%}
  {{- '<|system|>' ~ listing ~ '<|end|>' -}}
{%- endif -%}
{%- for message in messages -%}
  {%- if message['role'] == 'tool' -%}
    {{- '<|user|>' if loop.first or loop.previtem['role'] != 'tool' else '\n' -}}
    {{- '<tool_response> ' ~ (message['content'] | trim) ~ ' </tool_response>' -}}
    {{- '<|end|>' if loop.last or loop.nextitem['role'] != 'tool' else '' -}}
  {%- elif message['role'] in ['system', 'user', 'assistant'] -%}
    {{- '<|' ~ message['role'] ~ '|>' -}}
    {%- set text = message['content'] | trim -%}
    {%- if message['role'] == 'assistant' and message['tool_calls'] -%}
      {%- set text = message['content'] | trim if message['content'] else '' -%}
      {{- text -}}
      {%- for call in message['tool_calls'] -%}
        {%- set function = call['function'] if call['function'] is mapping else call -%}
        {%- set given = function['arguments'] -%}
        {{- '\n' if text or not loop.first else '' -}}
        {{- '<tool_call>\n{"name": ' ~ (function['name'] | string | tojson) -}}
        {{- ', "arguments": ' ~ (given if given is string else given | tojson) -}}
        {{- '}\n</tool_call>' -}}
      {%- endfor -%}
    {%- else -%}
      {{- text -}}
    {%- endif -%}
    {%- if listing and loop.first and message['role'] == 'system' -%}
      {{- ('\n\n' if text else '') ~ listing -}}
    {%- endif -%}
    {{- '<|end|>' -}}
  {%- else -%}
    {%- set role = message['role'] -%}
    {{- raise_exception('the role must be system, user, assistant or tool, not ' ~ role) -}}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}
"""


def _joined(text: str) -> str:
    """A template without the line breaks and indents that are there to read it."""
    return "".join(line.strip() for line in text.splitlines())


CHAT_TEMPLATE = _joined(_TOOL_LINES + _MESSAGES)


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Train a byte-level BPE on ``texts``; every digit is a token of its own.

    Each text gets the begin token in front when it is encoded with special tokens.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.Split(
                Regex(r"'(?:s|t|re|ve|m|ll|d)| ?\p{L}+| ?[^\s\p{L}\p{N}]+|\p{N}|\s+(?!\S)|\s+"),
                behavior="isolated",
            ),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A",
        pair=f"{BOS} $A $B",
        special_tokens=[(BOS, tokenizer.token_to_id(BOS))],
    )
    return tokenizer


def save_tokenizer(
    tokenizer: Tokenizer, folder: Path, max_length: int, chat_template: str | None = CHAT_TEMPLATE
) -> None:
    """Write ``tokenizer.json`` and ``tokenizer_config.json`` for transformers' AutoTokenizer.

    Args:
        chat_template: None where a file of its own has it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": END,
        "pad_token": PAD,
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_length,
    }
    if chat_template is not None:
        config["chat_template"] = chat_template
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
