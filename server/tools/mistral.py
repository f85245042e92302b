"""Mistral: `[TOOL_CALLS]` and, up to tokenizer v10, a list of objects; from v11 on `name{...}`.

In between there may be an id, which is dropped, and `[ARGS]`.
"""

from server.tools.syntax import Syntax
from server.tools.tagged_values import Header

MISTRAL = Syntax(
    "[TOOL_CALLS]",
    header=Header("{", r"\s*(?P<name>[^\s\[\]]+)\s*(\[CALL_ID\][^\[\]]*)?(\[ARGS\])?\s*"),
    id_size=9,  # its templates refuse others
)
