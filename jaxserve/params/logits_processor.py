"""Logits processors: what changes logits before a token is drawn, as callers write it.

Three kinds are told apart by what they are given. A pure JAX function `(logits, rows, state)` is
traced into the compiled step. A plain callable `(output_token_ids, logits)`, or with the prompt's
ids before them, gets one row as NumPy array on the host in every step, which is slow. A class of
vLLM's (`LogitsProcessor` of its V1 engine) gets the rows of a step as a torch tensor.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jaxserve.config.named_object import object_of_name
from jaxserve.errors import ValidationError

FIELD = "logits_processors"
HOST_PROCESSORS = "host_processors"  # the feature that runs those on the host
TRACED = ("logits", "rows", "state")  # the parameters of a pure JAX function
VLLM_METHODS = ("apply", "update_state", "is_argmax_invariant")
ALLOWED = (
    "functions (logits, rows, state) in JAX, callables (output_token_ids, logits) or "
    "(prompt_token_ids, output_token_ids, logits) on NumPy rows, or module:name of one"
)
MOST_NUMBERS = 256  # of one argument that is an array

Value = int | float | np.ndarray


@dataclass(eq=False)
class JaxProcessor:
    """A pure JAX function that changes the logits of the rows that ask for it.

    The function is called as `function(logits, rows, state) -> (logits, state)` while a step is
    traced: logits float32[M, V], rows a `ProcessorRows`, state a pytree of arrays [M, ...]. Rows
    that do not ask for it are given to it as well, and keep their logits whatever it does.

    Attributes:
        function: the function.
        args: argument -> its default: an integer, a float, or an array [N] of one of these.
        state: pytree of NumPy arrays, a row's state before its first token; None: it has none.
        reads: sites of the model that it reads, as `layers.3.residual`, see `ProcessorRows.taps`.
    """

    function: Callable[..., Any]
    args: Mapping[str, Value] = field(default_factory=dict)
    state: Any = None
    reads: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        functools.update_wrapper(self, self.function, updated=())  # found by its name
        args: dict[str, Value] = {}
        for name, default in self.args.items():
            array = np.asarray(default, _kind(f"{FIELD}.{self.name}.{name}", default))
            args[name] = array if array.ndim else array.item()
        self.args = args

    @property
    def name(self) -> str:
        """The function's own."""
        return str(getattr(self.function, "__name__", type(self.function).__name__))

    def __call__(self, logits: Any, rows: Any, state: Any) -> Any:
        return self.function(logits, rows, state)

    def with_args(self, **given: Any) -> AskedProcessor:
        """The processor with some arguments of one request.

        Raises:
            ValidationError: an argument that it has not, or of another type or length.
        """
        return AskedProcessor(self, self.checked(given))

    def checked(self, given: Any) -> dict[str, Value]:
        """Arguments by name, all of them.

        Args:
            given: some of them; an array may be shorter than its default, whose end it has then.

        Raises:
            ValidationError: as `with_args`.
        """
        field_name = f"{FIELD}.{self.name}"
        if not isinstance(given, Mapping):
            raise ValidationError(field_name, given, "a mapping of arguments")
        for name in given:
            if name not in self.args:
                known = ", ".join(self.args) or "none"
                raise ValidationError(f"{field_name}.{name}", given[name], f"one of {known}")
        return {
            name: _as_default(f"{field_name}.{name}", given[name], default)
            if name in given
            else default
            for name, default in self.args.items()
        }


@dataclass(frozen=True)
class AskedProcessor:
    """A `JaxProcessor` with the arguments of one request."""

    processor: JaxProcessor
    args: dict[str, Value]

    @property
    def name(self) -> str:
        return self.processor.name


@dataclass(frozen=True, eq=False)
class HostProcessor:
    """A callable that changes one row of logits on the host.

    Attributes:
        function: given token ids, and float32[V] that it may change; returns float32[V].
        reads_prompt: whether the prompt's ids come first.
    """

    function: Callable[..., Any]
    reads_prompt: bool

    @property
    def name(self) -> str:
        return str(getattr(self.function, "__name__", type(self.function).__name__))

    def apply(self, prompt: Sequence[int], output: Sequence[int], row: np.ndarray) -> np.ndarray:
        """The row after the callable, which gets copies of what is given.

        Args:
            prompt: token ids.
            output: token ids so far.
            row: logits float32[V].

        Raises:
            ValidationError: it returned another shape or dtype. What it raises itself passes.
        """
        ids = [list(prompt), list(output)] if self.reads_prompt else [list(output)]
        after = np.asarray(self.function(*ids, row.copy()))
        if after.shape != row.shape or after.dtype != row.dtype:
            allowed = f"a callable that returns {row.dtype}{[*row.shape]}"
            said = f"{after.dtype}{[*after.shape]}"
            raise ValidationError(f"{FIELD}.{self.name}", said, allowed)
        return after


Processor = JaxProcessor | AskedProcessor | HostProcessor | type


def logits_processor(
    function: Callable[..., Any] | None = None,
    *,
    args: Mapping[str, Value] | None = None,
    state: Any = None,
    reads: Sequence[str] = (),
) -> Any:
    """Make a pure JAX function a logits processor with arguments, state or sites that it reads.

        @logits_processor(args={"delta": 2.0})
        def watermark(logits, rows, state): ...

    Args:
        function: see `JaxProcessor`.
        args: its arguments and their defaults, which each request may give.
        state: of a row before its first token, NumPy arrays.
        reads: sites of the residual stream that it reads.

    Raises:
        ValidationError: a default that is no number and no array [N] of numbers.
    """
    if function is None:
        return functools.partial(logits_processor, args=args, state=state, reads=reads)
    return JaxProcessor(function, dict(args or {}), state, tuple(reads))


def as_processor(given: Any, field_name: str = FIELD) -> Processor:
    """A processor of any kind; raises ValidationError for what is none."""
    if isinstance(given, str):
        if ":" not in given:
            raise ValidationError(field_name, given, ALLOWED)
        return as_processor(object_of_name(field_name, given, "a logits processor", object))
    if isinstance(given, JaxProcessor | AskedProcessor | HostProcessor):
        return given
    if isinstance(given, type):
        lacks = [name for name in VLLM_METHODS if not callable(getattr(given, name, None))]
        if lacks:
            allowed = f"{ALLOWED}, or a class of vLLM's with {', '.join(VLLM_METHODS)}"
            raise ValidationError(field_name, given, allowed)
        return given
    if not callable(given):
        raise ValidationError(field_name, given, ALLOWED)
    names = _positional(given)
    if names == TRACED:
        return JaxProcessor(given)
    if names is None or len(names) not in (2, 3):
        raise ValidationError(field_name, given, ALLOWED)
    return HostProcessor(given, len(names) == 3)


def _positional(function: Any) -> tuple[str, ...] | None:
    """Names of the parameters that must be given; None: it has no signature."""
    try:
        found = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return None
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return tuple(p.name for p in found if p.kind in kinds and p.default is p.empty)


def _kind(field_name: str, value: Any) -> np.dtype:
    """int32 or float32, by the type of a default."""
    name = field_name.rpartition(".")[2]
    array = np.asarray(value)
    is_fit = array.dtype.kind in "if" and array.ndim <= 1 and 0 < array.size <= MOST_NUMBERS
    if not is_fit or isinstance(value, bool) or not re.fullmatch(r"[A-Za-z]\w*", name):
        allowed = f"an integer, a float or an array [N] of such, N at most {MOST_NUMBERS}"
        raise ValidationError(field_name, value, allowed)
    return np.dtype(np.int32 if array.dtype.kind == "i" else np.float32)


def _as_default(field_name: str, given: Any, default: Value) -> Value:
    """A value of an argument, with the type and length of its default."""
    kind, like = _kind(field_name, default), np.asarray(default)
    what = "integers" if kind == np.int32 else "numbers"
    one = what[:-1].replace("integer", "an integer").replace("number", "a number")
    allowed = f"a list of at most {like.size} {what}" if like.ndim else one
    try:
        array = np.asarray(given)
    except ValueError as error:  # a list of lists of several lengths
        raise ValidationError(field_name, given, allowed) from error
    kinds = "i" if kind == np.int32 else "if"
    is_empty = array.size == 0 and like.ndim == 1  # its type says nothing
    if array.ndim != like.ndim or array.size > like.size:
        raise ValidationError(field_name, given, allowed)
    if not is_empty and (array.dtype.kind not in kinds or isinstance(given, bool)):
        raise ValidationError(field_name, given, allowed)
    if kind == np.int32 and array.size and np.any(np.abs(array) >= 2**31):
        raise ValidationError(field_name, given, f"{allowed} of 32 bits")
    if kind == np.float32 and not np.all(np.isfinite(array)):
        raise ValidationError(field_name, given, f"{allowed}, all of them finite")
    if like.ndim == 0:
        return array.astype(kind).item()
    return np.concatenate([array.astype(kind), like[array.size :].astype(kind)])
