"""Arguments of vLLM's `LLM` and `EngineArgs` that are no settings here: passed over, or refused.

The table is `vllm_arguments.json`, with the version of vLLM that it was read from. Every argument
is a setting of `EngineConfig`, a setting under another name (`RENAMED`), or a row of that table.
"""

from __future__ import annotations

import argparse
import json
import logging
from collections.abc import Mapping
from importlib.resources import files
from typing import Any, NamedTuple

from jaxserve.config.engine_config import EngineConfig
from jaxserve.config.settings import defaults_of
from jaxserve.errors import ValidationError

logger = logging.getLogger(__name__)

ANY = "any"
UNASKED: tuple[Any, ...] = (None, False, {}, [], "")  # of what is refused

# the classes of a scheduler are policies
RENAMED = {"scheduler_cls": "scheduling_policy", "swap_space": "kv_offloading_size"}
OF_HOSTS = ("nnodes", "node_rank", "master_addr", "master_port")


class Argument(NamedTuple):
    """An argument without a setting.

    Attributes:
        default: vLLM's, which every argument may have.
        passes: the values that are passed over, or ANY; None: the argument is refused.
        instead: why it is refused, or why other values are, or what to do instead.
        switch: its flag takes no value, though its default is none.
    """

    default: Any
    passes: Any = None
    instead: str = ""
    switch: bool = False


def read_arguments(package: str, file: str) -> dict[str, Argument]:
    """The arguments of a table in JSON, by name."""
    table = json.loads(files(package).joinpath(file).read_text())
    return {name: Argument(**fields) for name, fields in table["arguments"].items()}


ARGUMENTS = read_arguments("jaxserve.config", "vllm_arguments.json")


def add_vllm_flag(parser: Any, name: str, argument: Argument, **how: Any) -> None:
    """The flag of an argument: a switch, values, or one value in JSON or as text.

    Args:
        parser: parser or group of arguments.
        name: of the argument.
        argument: it.
        how: further arguments of `add_argument`, as `default`.

    Raises:
        argparse.ArgumentError: the parser has it already.
    """
    how["type"] = _value
    if argument.switch or isinstance(argument.default, bool):
        how |= {"action": argparse.BooleanOptionalAction}
        del how["type"]
    elif isinstance(argument.default, list):
        how["nargs"] = "+"
    parser.add_argument("--" + name.replace("_", "-"), **how)


def own_settings(
    given: Mapping[str, Any], arguments: Mapping[str, Argument] = ARGUMENTS
) -> dict[str, Any]:
    """The settings among some arguments; those that are passed over are one log line.

    Args:
        given: values by name.
        arguments: those that are no settings.

    Raises:
        ValidationError: an argument asks for what jaxserve does not do. `EngineConfig` refuses
            names that are in no table.
    """
    _check_experts(given)
    kept, passed = dict[str, Any](), []
    for name, value in _in_own_words(by_settings(given)).items():
        argument = arguments.get(name)
        if argument is None:
            kept[name] = value
        elif argument.passes is None:
            is_unasked = value in UNASKED and argument.default is not True
            if not (is_unasked or value is None or _same(value, argument.default)):
                raise ValidationError(name, value, f"nothing: {argument.instead}")
        elif argument.passes == ANY and not _is_of_kind(value, argument.default):
            raise ValidationError(name, value, "true or false")
        else:
            known = (argument.default, *argument.passes)
            if argument.passes != ANY and not any(_same(value, one) for one in known):
                shown = f"one of {', '.join(map(repr, argument.passes))}"
                why = f" ({argument.instead})" if argument.instead else ""
                raise ValidationError(name, value, shown + why)
            if value is not None and not _same(value, argument.default):
                passed.append(name)
    if passed:
        logger.info("arguments without a meaning here: %s", ", ".join(sorted(passed)))
    return kept


def by_settings(given: Mapping[str, Any]) -> dict[str, Any]:
    """Values by name, those of `RENAMED` under the names of their settings.

    Raises:
        ValidationError: a setting has one value by its name and another by the other name.
    """
    found = {name: value for name, value in given.items() if name not in RENAMED}
    for name, known in RENAMED.items():
        value = given.get(name)
        if value is None:
            continue
        if given.get(known) not in (None, value, defaults_of(EngineConfig)[known]):
            allowed = f"nothing beside {known}={given[known]!r}, which has the same meaning"
            raise ValidationError(name, value, allowed)
        found[known] = value
    return found


def _is_of_kind(value: Any, default: Any) -> bool:
    """Whether a value is a switch where the default is one."""
    return value is None or isinstance(value, bool) or not isinstance(default, bool)


def _check_experts(given: Mapping[str, Any]) -> None:
    """Raises ValidationError where several engines are to share their experts, as vLLM's do."""
    engines = given.get("data_parallel_size")
    if given.get("enable_expert_parallel") is True and engines not in (None, 1):
        why = f"each of data_parallel_size={engines} engines has all experts"
        raise ValidationError("enable_expert_parallel", True, f"False: {why}")


def _in_own_words(given: Mapping[str, Any]) -> dict[str, Any]:
    """What vLLM's scripts say by another setting, where the setting itself is not given.

    `runner="pooling"` or `convert="embed"` asks for embeddings, a `max_model_len` among
    `hf_overrides` for a context, `nnodes` for processes.
    """
    said = dict(given)
    # False is what flags say that were not given
    if given.get("runner") == "pooling" or given.get("convert") == "embed":
        said["enable_embeddings"] = True
    overrides = given.get("hf_overrides")
    if isinstance(overrides, Mapping) and "max_model_len" in overrides:
        rest = {name: value for name, value in overrides.items() if name != "max_model_len"}
        said["hf_overrides"] = rest or None
        if given.get("max_model_len") is None:
            said["max_model_len"] = overrides["max_model_len"]
    return said if given.get("nnodes") in (None, 1) else _on_hosts(said)


def _on_hosts(said: dict[str, Any]) -> dict[str, Any]:
    """The same with our names of vLLM's hosts: a process each, the first of them at master_addr."""
    words = {name: said.pop(name, None) for name in OF_HOSTS}
    host, port = (words[name] or ARGUMENTS[name].default for name in OF_HOSTS[2:])
    ours = {
        "num_processes": words["nnodes"],
        "process_id": words["node_rank"] or 0,
        "coordinator": f"[{host}]:{port}" if ":" in str(host) else f"{host}:{port}",
    }
    unasked = defaults_of(EngineConfig)
    return said | {k: v for k, v in ours.items() if said.get(k) in (None, unasked[k])}


def _value(text: str) -> Any:
    """JSON where it is some, else the text."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def _same(value: Any, allowed: Any) -> bool:
    return type(value) is type(allowed) and bool(value == allowed)
