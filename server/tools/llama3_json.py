"""Llama 3: `{"name": ..., "parameters": {...}}`, several with `;` between them."""

from server.tools.syntax import Syntax

LLAMA3_JSON = Syntax("<|python_tag|>", separator=";", is_bare=True)
