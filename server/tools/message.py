"""One choice of a chat completion: its text becomes thoughts, content and calls."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from server.tools.deltas import CallArguments, CallBegin, Content, Delta, Reasoning
from server.tools.reader import Reader


@dataclass(eq=False, slots=True)
class MessageReader:
    """Reads the text of one choice, whole or in pieces, by the same steps.

    Args:
        reasoning: tells thoughts from the answer, and calls where one notation has both; None:
            there are no thoughts.
        tools: finds calls in the answer; None: there are none.
        parallel: False: calls behind the first are left out.
        tells_reasoning: False: thoughts are left out.

    Attributes:
        num_calls: calls that were found.
    """

    reasoning: Reader | None
    tools: Reader | None
    parallel: bool
    tells_reasoning: bool
    num_calls: int = 0

    def feed(self, text: str, *, last: bool, cut: bool = False) -> dict[str, Any]:
        """What more text says, as the `delta` of a chunk.

        Args:
            text: more of it.
            last: no more comes.
            cut: it ends before the model has ended it.
        """
        delta: dict[str, Any] = {}
        for found in self.find(text, last=last, cut=cut):
            self._tell(delta, found)
        return delta

    def find(self, text: str, *, last: bool, cut: bool = False) -> list[Delta]:
        """What more text says that the client is told, in its order; arguments as of `feed`."""
        found = self._answer(self._thought(text, last, cut), last, cut)
        told = [delta for delta in found if self._is_told(delta)]
        self.num_calls += sum(isinstance(delta, CallBegin) for delta in told)
        return told

    def new_call_id(self) -> str:
        """An id for a call that was found."""
        finder = self.tools or self.reasoning
        assert finder is not None
        return finder.new_id()

    def message(self, text: str, *, cut: bool = False) -> dict[str, Any]:
        """What a whole text says, as fields of a message; `cut` as of `feed`."""
        delta = self.feed(text, last=True, cut=cut)
        calls = [{k: v for k, v in c.items() if k != "index"} for c in delta.get("tool_calls", ())]
        content = delta.get("content", None if calls or "reasoning" in delta else "")
        message: dict[str, Any] = {"content": content}
        if self.reasoning is not None:
            message["reasoning"] = delta.get("reasoning")
        return message | ({"tool_calls": calls} if calls else {})

    def _thought(self, text: str, last: bool, cut: bool) -> list[Delta]:
        if self.reasoning is None:
            return [Content(text)] if text else []
        found = self.reasoning.feed(text)
        return found + self.reasoning.finish(cut=cut) if last else found

    def _answer(self, deltas: list[Delta], last: bool, cut: bool) -> list[Delta]:
        if self.tools is None:
            return deltas
        found: list[Delta] = []
        for delta in deltas:
            found += self.tools.feed(delta.text) if isinstance(delta, Content) else [delta]
        return found + self.tools.finish(cut=cut) if last else found

    def _tell(self, delta: dict[str, Any], found: Delta) -> None:
        match found:
            case Content(text):
                delta["content"] = delta.get("content", "") + text
            case Reasoning(text):
                delta["reasoning"] = delta.get("reasoning", "") + text
            case CallBegin(index, name):
                call = {"index": index, "id": self.new_call_id(), "type": "function"}
                function = {"name": name, "arguments": ""}
                delta.setdefault("tool_calls", []).append(call | {"function": function})
            case CallArguments(index, text):
                calls = delta.setdefault("tool_calls", [])
                if not calls or calls[-1]["index"] != index:
                    calls.append({"index": index, "function": {"arguments": ""}})
                calls[-1]["function"]["arguments"] += text

    def _is_told(self, found: Delta) -> bool:
        match found:
            case Content():
                return True
            case Reasoning():
                return self.tells_reasoning
            case CallBegin(index) | CallArguments(index):
                return self.parallel or index == 0
