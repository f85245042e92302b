"""gpt-oss: Harmony, in which an answer is messages in channels, to the user or to functions."""

from __future__ import annotations

import re
from functools import partial

from server.tools.json_text import Take
from server.tools.reader import Reader, Steps
from server.tools.tagged_values import MAX_HEADER

START, CHANNEL, MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
RECIPIENT = "to="
ENDS = ("<|end|>", "<|call|>", "<|return|>")
TAGS = (START, CHANNEL, *ENDS)
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(rf"{RECIPIENT}(functions\.)?([^\s<]+)")
_NO_FUNCTIONS = ("assistant", "python", "browser", "container")  # what else messages are sent to


class HarmonyReader(Reader):
    """Reads messages: thoughts are in the channel `analysis`, calls are sent to functions.

    Args:
        has_calls: whether calls are told; False: they are dropped.
    """

    def __init__(self, has_calls: bool = True):
        self._has_calls = has_calls
        self._takers = set[Take]()  # of the messages so far
        super().__init__()

    def read(self) -> Steps:
        # the template has written who speaks
        space = yield from self.skip_space()
        missed = yield from self.expect(RECIPIENT)
        tag: str | None = RECIPIENT
        if missed is not None:
            self.say(space)
            tag = yield from self.until(TAGS, self.say, held=missed)
        while tag is not None:
            take: Take = self.say
            if tag not in ENDS:
                header = [tag]
                end = yield from self.until((MESSAGE, *ENDS), header.append, most=MAX_HEADER)
                if end == MESSAGE:
                    take = self._begin_message("".join(header))
                else:
                    self.say("".join(header))
            tag = yield from self.until(TAGS, take)

    def _begin_message(self, header: str) -> Take:
        """What takes the text of a message."""
        found, to = _CHANNEL.search(header), _RECIPIENT.search(header)
        channel = found[1] if found else ""
        if to and (to[1] or to[2] not in _NO_FUNCTIONS):
            return partial(self.add_arguments, self.begin_call(to[2])) if self._has_calls else _drop
        if to and channel != "analysis":
            return _drop
        take = self.think if channel == "analysis" else self.say
        if take in self._takers:
            take("\n")
        self._takers.add(take)
        return take


def _drop(char: str) -> None:
    """A message to something that is no function."""
