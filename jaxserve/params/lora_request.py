"""The request of an adapter, as scripts written for vLLM make it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from jaxserve.errors import ValidationError


@dataclass(frozen=True, slots=True)
class LoRARequest:
    """An adapter: its name, a number above 0, and its folder."""

    lora_name: str
    lora_int_id: int
    lora_path: str = ""


def refuse_adapter(lora_request: Any) -> None:
    """Raises ValidationError unless there is none: engines have no adapters yet."""
    if lora_request is not None:
        raise ValidationError("lora_request", lora_request, "None: there are no adapters yet")
