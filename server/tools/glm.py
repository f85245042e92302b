"""GLM: `<tool_call>f<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>`."""

from server.tools.syntax import Syntax
from server.tools.tagged_values import Header, Parameters

GLM = Syntax(
    "<tool_call>",
    header=Header(""),
    parameters=Parameters(
        begin="<arg_key>",
        key=Header("<arg_value>", r"\s*(?P<name>[^<>]*[^<>\s])\s*</arg_key>\s*"),
        end="</arg_value>",
        call_end="</tool_call>",
        untyped_is_json=True,
    ),
)
