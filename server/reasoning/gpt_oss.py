"""gpt-oss: thoughts are messages in a channel of their own, before and between others."""

from __future__ import annotations

from server.reasoning.tags import Tags
from server.tools.gpt_oss import CHANNEL, MESSAGE, START, HarmonyReader
from server.tools.reader import Reader

_FINAL = f"{CHANNEL}final"


class Harmony(Tags):
    """A constraint begins behind the header of the final message: all before is free."""

    def reader(self, prompt: str) -> Reader:
        return HarmonyReader(has_calls=False)


HARMONY = Harmony(
    begin=f"{CHANNEL}analysis{MESSAGE}",
    end=f"<|end|>{START}assistant{_FINAL}{MESSAGE}",
    other_ends=tuple(f"{_FINAL}{kind}{MESSAGE}" for kind in ("", " json", " <|constrain|>json")),
    starts_open=True,
)
