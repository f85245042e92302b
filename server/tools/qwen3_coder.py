"""Qwen3-Coder: `<tool_call><function=f><parameter=a>1</parameter></function></tool_call>`."""

from server.tools.syntax import Syntax
from server.tools.tagged_values import Header, Parameters

QWEN3_CODER = Syntax(
    "<function=",
    around=("<tool_call>", "</tool_call>"),
    header=Header(">"),
    parameters=Parameters(
        begin="<parameter=",
        key=Header(">"),
        end="</parameter>",
        call_end="</function>",
        is_padded=True,
    ),
)
