"""Flags of commands, made from the declarations of settings; values as people write them."""

from __future__ import annotations

import argparse
import json
import re
import sys
from typing import Any

from jaxserve.config.settings import (
    Integer,
    Integers,
    Number,
    OneOf,
    PowerOfTwo,
    Setting,
    Switch,
    Texts,
    defaults_of,
    settings_of,
)

_INTEGER = re.compile(r"(\d+(?:\.\d+)?)([kKmMgG]?)")
CLASSES = ("MODULE:CLASS", "MODULE:NAME")
# vLLM's
SHORT = {
    "tensor_parallel_size": "-tp",
    "pipeline_parallel_size": "-pp",
    "data_parallel_size": "-dp",
    "quantization": "-q",
}
_FACTORS = {"": 1, "k": 1000, "K": 1024, "m": 10**6, "M": 2**20, "g": 10**9, "G": 2**30}


def integer(text: str) -> int:
    """A number for people: 4096, 4k = 4000, 4K = 4096, 25.6k = 25600.

    Raises:
        argparse.ArgumentTypeError: not such a number.
    """
    match = _INTEGER.fullmatch(text)
    value = float(match[1]) * _FACTORS[match[2]] if match else 0.5
    if match is not None and not match[2] and "." not in text:
        return int(match[1])
    if not value.is_integer():
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number such as 4096, 4k or 4K")
    return int(value)


def json_object(text: str) -> dict[str, Any]:
    """A JSON object.

    Raises:
        argparse.ArgumentTypeError: it is none.
    """
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no JSON ({error})") from error
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is no JSON object")
    return value


def signed(text: str) -> int:
    """A number for people, below zero as well: for what has bounds of its own.

    Raises:
        argparse.ArgumentTypeError: not such a number.
    """
    return -integer(text[1:]) if text.startswith("-") else integer(text)


def limit(text: str) -> int | None:
    """A number for people, or none.

    Raises:
        argparse.ArgumentTypeError: neither.
    """
    return None if text == "none" else signed(text)


def named(text: str) -> str | None:
    """A name, or none."""
    return None if text == "none" else text


def number(text: str) -> float | None:
    """A number, or none.

    Raises:
        argparse.ArgumentTypeError: neither.
    """
    try:
        return None if text == "none" else float(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no number, nor none") from error


def add_flag(
    group: Any,
    kind: type,
    name: str,
    *,
    short: str | None = None,
    unset: bool = False,
    alias: str | None = None,
) -> None:
    """The flag of one setting, with its dashes for underscores.

    Args:
        group: parser or group of arguments.
        kind: the dataclass that declares the setting.
        name: of its field.
        short: another name of the flag.
        unset: whether the flag, where it is not given, is None and not the setting's default.
        alias: a name that the flag and its value have instead, so that both may be compared.
    """
    item: Setting = settings_of(kind)[name]
    default = None if unset or alias else defaults_of(kind)[name]
    flag = "--" + name.replace("_", "-")
    how: dict[str, Any] = {"default": default, "help": help_of(item, default)}
    if alias is not None:
        how["help"], flag = f"another name of {flag}", "--" + alias.replace("_", "-")
    flags = [flag, *([short] if short else [])]
    metavar = item.rule.metavar
    match item.rule:
        case Switch():
            group.add_argument(*flags, action=argparse.BooleanOptionalAction, **how)
            return
        case OneOf(names) if item.optional:
            words = (*names, "none")  # over that of a file
            how |= {"type": named, "metavar": "{" + ",".join(words) + "}"}
            group.add_argument(*flags, choices=(*names, None), **how)
            return
        case OneOf(names):
            group.add_argument(*flags, choices=names, **how)
            return
        case Integer() | PowerOfTwo():
            how["type"] = limit if item.optional else signed
        case Integers(count):
            how |= {"type": signed, "nargs": count}
        case Number():
            how["type"] = number if item.optional else float
        case Texts():
            how["action"] = "append"
        case _ if metavar in (*CLASSES, "DOMAIN"):
            how["nargs"] = "+"
        case _ if metavar == "JSON":
            how["type"] = json_object
    group.add_argument(*flags, metavar=metavar, **how)


def help_of(item: Setting, default: Any) -> str:
    """What a flag's help says: the declaration's text, and the default where it is a value."""
    text = item.text[0].lower() + item.text[1:] if item.text[1:2].islower() else item.text
    text = text.rstrip(".").replace("%", "%%")
    match default:
        case None:
            return text
        case True | False:
            shown = "on" if default else "off"
        case tuple():
            shown = " ".join(map(str, default))
        case int() if default >= 2**16 and default % 2**10 == 0:
            shown = f"{default >> 20}M" if default % 2**20 == 0 else f"{default >> 10}K"
        case float():
            shown = f"{default:g}"
        case _:
            shown = str(default)
    return f"{text} (default: {shown})"


class FlexibleArgumentParser(argparse.ArgumentParser):
    """A parser for which --max_num_seqs is --max-num-seqs, and --hf-overrides.rope.factor 2 is
    --hf-overrides '{"rope": {"factor": 2}}'."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As argparse's, with dashes for underscores in names of flags, and objects for dots."""
        words = sys.argv[1:] if args is None else list(args)
        try:
            words = _undotted([_dashed(word) for word in words])
        except TypeError as error:
            self.error(str(error))
        return super().parse_known_args(words, namespace)


def _dashed(word: str) -> str:
    name, mark, value = word.partition("=")
    head, dot, keys = name.partition(".")
    return head.replace("_", "-") + dot + keys + mark + value if word.startswith("--") else word


def _undotted(words: list[str]) -> list[str]:
    """Flags with dots in their names as one flag each, with a JSON object for its value.

    Raises:
        TypeError: a flag has a value, and keys beside it.
    """
    kept: list[str] = []
    objects: dict[str, dict[str, Any]] = {}
    for place, word in enumerate(words):
        name, is_joined, text = word.partition("=")
        if not _is_dotted(name):
            if not place or not _is_dotted(words[place - 1]) or word.startswith("--"):
                kept.append(word)  # the rest are values
            continue
        if not is_joined:
            following = words[place + 1] if place + 1 < len(words) else "--"
            text = "true" if following.startswith("--") else following
        flag, *keys, last = name.split(".")
        if flag not in objects:
            objects[flag] = {}
            kept.append(flag)
        inner: Any = objects[flag]
        for key in keys:
            inner = inner.setdefault(key, {}) if isinstance(inner, dict) else None
        if not isinstance(inner, dict) or last in inner:
            raise TypeError(f"{name}: it is there already, or what it is a key of has a value")
        inner[last] = _json(text)
    for flag in objects:
        if sum(word.partition("=")[0] == flag for word in kept) > 1:
            raise TypeError(f"{flag}: as one JSON object, or by keys with dots, not both")
    return [f"{word}={json.dumps(objects[word])}" if word in objects else word for word in kept]


def _is_dotted(name: str) -> bool:
    flag, *keys = name.split(".")
    return flag.startswith("--") and "=" not in name and bool(keys) and all(keys)


def _json(text: str) -> Any:
    """JSON where it is some, else the text."""
    try:
        return json.loads(text)
    except ValueError:
        return text
