"""Results as JSON and as Markdown."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any


def as_json(result: Any) -> str:
    """A result's dataclass as indented JSON."""
    return json.dumps(asdict(result), indent=2)


def as_markdown(result: Any) -> str:
    """A result's dataclass as tables: its numbers, then one for each of its collections."""
    values = asdict(result)
    plain = {k: v for k, v in values.items() if not isinstance(v, Mapping | list)}
    shown = [(k, _shown(v)) for k, v in plain.items()]
    tables = [_table(("name", "value"), shown)]
    for name, value in values.items():
        if isinstance(value, list) and value:
            rows = [(str(i), _shown(item)) for i, item in enumerate(value)]
            tables.append(_table(("layer", name), rows))
        elif isinstance(value, Mapping):
            columns = list(next(iter(value.values())))
            rows = [(k, *(_shown(v[c]) for c in columns)) for k, v in value.items()]
            tables.append(_table((name, *columns), rows))
    return "\n\n".join(tables)


def _table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    lines = [head, tuple("---" for _ in head), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _shown(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.6g}" if isinstance(value, float) else str(value)
