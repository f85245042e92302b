"""Request fields of the OpenAI and vLLM APIs that jaxserve knows but does not support.

A field whose value asks for nothing (null, false, the neutral value) is accepted, because clients
send such defaults; any other value is refused by name. Nothing that would change the output is
ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxserve.errors import ValidationError

# field -> the values, besides null, that ask for nothing
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    # OpenAI
    "audio": (),
    "best_of": (1,),
    "function_call": ("none",),
    "functions": (),
    "modalities": (["text"],),
    "prediction": (),
    "reasoning_effort": (),
    "response_format": ({"type": "text"},),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": (),
    "verbosity": (),
    "web_search_options": (),
    # vLLM
    "cache_salt": (),
    "chat_template": (),
    "documents": (),
    "ec_transfer_params": (),
    "guided_choice": (),
    "guided_decoding_backend": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_whitespace_pattern": (),
    "kv_transfer_params": (),
    "length_penalty": (1.0, 1),
    "logprob_token_ids": (),
    "lora_request": (),
    "media_io_kwargs": (),
    "mm_processor_kwargs": (),
    "prompt_embeds": (),
    "repetition_detection": (),
    "return_prompt_text": (False,),
    "return_weight_versions": (False,),
    "stream_interval": (1,),
    "structured_outputs": (),
    "thinking_token_budget": (-1,),
    "truncate_prompt_tokens": (),
    "truncation_side": (),
    "use_beam_search": (False,),
    "vllm_xargs": ({},),
    "watermarking": (),
}


def check_unsupported(fields: Mapping[str, Any]) -> None:
    """Refuse each field that asks for something that jaxserve does not do.

    Raises:
        ValidationError: names the first such field, its value and what is allowed.
    """
    for name, value in fields.items():
        neutral = _NEUTRAL.get(name)
        if neutral is None or value is None:
            continue
        if not any(type(value) is type(one) and value == one for one in neutral):
            allowed = " or ".join(["null", *(repr(one) for one in neutral)])
            raise ValidationError(name, value, f"this server accepts only {allowed}")
