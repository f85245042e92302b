"""Phi-4-mini: `functools[{"name": ..., "arguments": {...}}, ...]`."""

from server.tools.syntax import Syntax

PHI4_MINI = Syntax("functools[")
