"""docs/settings.md: every setting of the engine and every sampling parameter, from its declaration.

`python -m jaxserve.jobs.settings_page` prints the page.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from jaxserve.config.engine_config import CACHE, MODEL, PROGRAMS, SCHEDULER, SERVER, EngineConfig
from jaxserve.config.settings import Setting, defaults_of, settings_of
from jaxserve.config.vllm_arguments import ANY, ARGUMENTS
from jaxserve.params.sampling_params import CLIENT, SamplingParams
from jaxserve.params.sampling_params import SCHEDULER as REQUEST

HEAD = """# Settings and parameters

Made from the declarations in `jaxserve/config/engine_config.py` and
`jaxserve/params/sampling_params.py` by

```bash
python -m jaxserve.jobs.settings_page
```

## Settings of the engine

Fields of `EngineConfig`, keyword arguments of `LLM` and flags of the commands: `max_num_seqs=64` is
`--max-num-seqs 64`; switches have a `--no-` form. None means: choose from the model and the device.
"""
PARAMETERS = """
## Sampling parameters

Fields of `SamplingParams` and, but for `detokenize` and `output_kind`, of the bodies of
`/v1/completions` and `/v1/chat/completions`. They are read by the client, by the scheduler, or by a
file of `jaxserve/execution/features/`.
"""
OTHERS = """
## Arguments of vLLM's `LLM` and `EngineArgs`

Those that are settings above mean the same. The others are passed over with a log line, because
they ask for what is so anyway or have no meaning here, or refused by name. A value that asks for
nothing (None, False, empty) is never refused. `scheduler_cls` is another name of
`scheduling_policy`, and `swap_space` of `kv_offloading_size`: beside another value of that setting
they are refused.
"""
_TITLES = {
    MODEL: "Model",
    CACHE: "KV cache",
    SCHEDULER: "Scheduler",
    PROGRAMS: "Programs",
    SERVER: "Queue and server",
}


def page() -> str:
    """The whole page."""
    parts = [HEAD]
    items = settings_of(EngineConfig)
    for reader, title in _TITLES.items():
        read = {name: item for name, item in items.items() if item.reader == reader}
        rows = _rows(EngineConfig, read, _flag)
        parts.append(
            f"\n### {title}\n\n" + _table(("setting", "default", "allowed", "meaning"), rows)
        )
    parts.append(PARAMETERS + "\n")
    rows = _rows(SamplingParams, settings_of(SamplingParams), lambda name, item: f"`{name}`")
    readers = [_reader(item) for item in settings_of(SamplingParams).values()]
    rows = [(*row, reader) for row, reader in zip(rows, readers, strict=True)]
    parts.append(_table(("parameter", "default", "allowed", "meaning", "read by"), rows))
    parts.append(OTHERS + "\n")
    others = sorted(ARGUMENTS.items())
    rows = [
        (f"`{name}`", _neutral(one.passes), one.instead)
        for name, one in others
        if one.passes is not None
    ]
    parts.append(_table(("passed over", "with the values", "others are refused because"), rows))
    rows = [(f"`{name}`", one.instead) for name, one in others if one.passes is None]
    parts.append("\n" + _table(("refused", "because, or instead"), rows))
    return "".join(parts)


def _neutral(allowed: Any) -> str:
    return "any" if allowed == ANY else ", ".join(f"`{value!r}`" for value in allowed)


def _rows(
    kind: type, items: dict[str, Setting], first: Callable[[str, Setting], str]
) -> list[tuple[str, ...]]:
    defaults = defaults_of(kind)
    return [
        (
            first(name, item),
            _shown(defaults.get(name, dataclasses.MISSING)),
            item.rule.allowed + (", or none" if item.optional else ""),
            item.text,
        )
        for name, item in items.items()
    ]


def _flag(name: str, item: Setting) -> str:
    return f"`{name}`" + ("" if item.flag else " (no flag)")


def _reader(item: Setting) -> str:
    return item.reader if item.reader in (CLIENT, REQUEST) else f"`features/{item.reader}.py`"


def _shown(default: Any) -> str:
    if default is dataclasses.MISSING:
        return "needed"
    if default in ((), []):
        return "empty"
    if default is None:
        return "none"
    if isinstance(default, bool):
        return "on" if default else "off"
    return str(default)


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [head, tuple("---" for _ in head), *rows]
    return "".join(
        "| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |\n" for row in lines
    )


if __name__ == "__main__":
    print(page(), end="")
