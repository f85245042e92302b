"""DeepSeek: V3 and R1 write arguments as a block of code, V3.1 bare, V3.2 as tagged values."""

from server.tools.syntax import Syntax
from server.tools.tagged_values import Header, Parameters

_BEGIN, _END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
_AROUND = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
_SEPARATOR = "<｜tool▁sep｜>"

V3 = Syntax(
    _BEGIN,
    around=(*_AROUND, _END, f"```{_END}"),
    header=Header("{", rf"[^<]*{_SEPARATOR}(?P<name>[^\s<]+)\s*```json\s*"),
)
V31 = Syntax(
    _BEGIN, around=(*_AROUND, _END), header=Header("{", rf"(?P<name>[^\s<]+){_SEPARATOR}\s*")
)
V32 = Syntax(
    '<｜DSML｜invoke name="',
    around=("<｜DSML｜function_calls>", "</｜DSML｜function_calls>"),
    header=Header('">'),
    parameters=Parameters(
        begin='<｜DSML｜parameter name="',
        key=Header(">", r'(?P<name>[^"]+)"(\s+string="(?P<is_text>true|false)")?'),
        end="</｜DSML｜parameter>",
        call_end="</｜DSML｜invoke>",
        wrappers=("arguments", "input"),
    ),
)
