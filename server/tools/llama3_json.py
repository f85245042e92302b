"""Llama 3: the text is `{"name": ..., "parameters": {...}}`, or several with `;` between them."""

from server.tools.syntax import Syntax

LLAMA3_JSON = Syntax("<|python_tag|>", separator=";", starts_bare=True)
