"""Which parsers read the answers of a server, and of one of its requests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from jaxserve.errors import ValidationError
from jaxserve.params.structured_outputs_params import Thoughts
from server.protocol.tools import AUTO, NONE, REQUIRED, AskedTools
from server.reasoning.registry import REASONING_PARSERS
from server.reasoning.tags import Tags
from server.reasoning.thought_counter import ThoughtCounter
from server.tools.demanded_calls import ArgumentsParser, ListParser
from server.tools.gpt_oss import HarmonyReader
from server.tools.message import MessageReader
from server.tools.reader import Reader
from server.tools.registry import TOOL_PARSERS, tool_parser


@dataclass(frozen=True, slots=True)
class Parsers:
    """What a server was started with.

    Attributes:
        tools: the notation of calls that the model knows, a name of TOOL_PARSERS.
        is_auto: the model may decide whether it calls a tool.
        reasoning: how the model marks its thoughts, a name of REASONING_PARSERS.

    Raises:
        ValidationError: names the flag that needs another.
    """

    tools: str | None = None
    is_auto: bool = False
    reasoning: str | None = None

    def __post_init__(self) -> None:
        for name, given, known in (
            ("tool_call_parser", self.tools, TOOL_PARSERS),
            ("reasoning_parser", self.reasoning, REASONING_PARSERS),
        ):
            if given is not None and given not in known:
                raise ValidationError(name, given, f"one of {', '.join(known)}")
        if self.is_auto and self.tools is None:
            raise ValidationError("enable_auto_tool_choice", True, "only with tool_call_parser")

    def check(self, asked: AskedTools) -> None:
        """Refuse what nothing here would read. Raises ValidationError."""
        if asked.choice == AUTO and not self.is_auto:
            raise ValidationError(
                "tool_choice",
                AUTO,
                "none, required or a function: this server was started without "
                "--enable-auto-tool-choice and --tool-call-parser",
            )

    def reads(self, asked: AskedTools) -> bool:
        """Whether a request's answers are read at all."""
        return self.reasoning is not None or asked.choice != NONE

    def reads_special_tokens(self, asked: AskedTools) -> bool:
        """Whether the model's own notation is read, which may have special tokens."""
        return self.reasoning is not None or asked.choice == AUTO

    def reader(
        self, asked: AskedTools, prompt_end: str, *, thinks: bool, tells_reasoning: bool
    ) -> MessageReader:
        """The reader of one choice.

        Args:
            asked: what the request says of tools.
            prompt_end: the last tokens of the prompt as text.
            thinks: False: the text is constrained and begins at once, so it has no thoughts.
            tells_reasoning: whether the client is told of thoughts.
        """
        tags, tools = self._tags(prompt_end), self._tool_parser(asked)
        reasoning = tags.reader(prompt_end) if tags is not None and thinks else None
        if isinstance(reasoning, HarmonyReader) and isinstance(tools, HarmonyReader):
            reasoning, tools = tools, None  # which tells both
        return MessageReader(
            reasoning,
            tools,
            parallel=asked.parallel,
            tells_reasoning=tells_reasoning and reasoning is not None,
        )

    def thoughts(self, prompt_end: str) -> Thoughts | None:
        """What comes before a constrained answer; None: nothing, it begins at once.

        Args:
            prompt_end: the last tokens of the prompt as text.
        """
        tags = self._tags(prompt_end)
        return None if tags is None else tags.thoughts(prompt_end)

    def counter(
        self, prompt_end: str, token_text: Callable[[int], str], *, thinks: bool
    ) -> ThoughtCounter | None:
        """What counts thoughts of one choice; None: there are none. Arguments: see `reader`."""
        tags = self._tags(prompt_end)
        if tags is None or not thinks:
            return None
        return ThoughtCounter(tags, tags.are_open(prompt_end), token_text)

    def _tags(self, prompt_end: str) -> Tags | None:
        """How thoughts are marked; None: there are none, or the prompt has closed them."""
        if self.reasoning is None:
            return None
        tags = REASONING_PARSERS[self.reasoning]
        return None if tags.are_closed(prompt_end) else tags

    def _tool_parser(self, asked: AskedTools) -> Reader | None:
        if asked.name is not None:
            return ArgumentsParser(asked.name)
        if asked.choice == REQUIRED:
            return ListParser()
        if asked.choice == AUTO:
            assert self.tools is not None
            return tool_parser(self.tools, asked.tools)
        return None
