"""Logits processors of callers: pure JAX functions, each a feature of its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.errors import ValidationError
from jaxserve.execution.features.feature import (
    NO_OPTIONS,
    Facts,
    Feature,
    Need,
    Rows,
    TakenStep,
    Tokens,
)
from jaxserve.execution.layout import array, arrays
from jaxserve.params.logits_processor import FIELD, JaxProcessor
from jaxserve.request.request import Request

if TYPE_CHECKING:
    from jaxserve.execution.step_shape import StepShape

_ROW_FIELDS = ["token", "position", "prompt_len", "history", "keys", "args", "taps", "own"]
PASSES = 4.0  # over [M, V]: read and written, and what most functions do between


@partial(jax.tree_util.register_dataclass, meta_fields=["logits_of"], data_fields=_ROW_FIELDS)
@dataclass(frozen=True)
class ProcessorRows:
    """What a logits processor knows of its M rows.

    Attributes:
        token: int32[M], the last token before the one that is drawn; -1 where a prompt has an
            embedding.
        position: int32[M], its position in the sequence, from 0.
        prompt_len: int32[M], tokens of the prompt.
        history: int32[M, L], token ids by position; what lies behind `position` means nothing.
        keys: typed keys [M] of random numbers: of the request's seed and the position, and others
            than those the sampler draws with.
        args: the processor's arguments by name, of each row: [M] or [M, N].
        taps: by site the residual stream [M, E] at the token before, see `JaxProcessor.reads`.
        own: bool[M], whether the row asks for the processor.
        logits_of: residual stream [N, E] behind any layer -> float32 logits [N, V], by the model's
            last norm and head.
    """

    token: jax.Array
    position: jax.Array
    prompt_len: jax.Array
    history: jax.Array
    keys: jax.Array
    args: Mapping[str, jax.Array]
    taps: Mapping[str, jax.Array]
    own: jax.Array
    logits_of: Any

    @property
    def generated(self) -> jax.Array:
        """int32[M]: tokens that were generated before the one that is drawn."""
        return self.position + 1 - self.prompt_len


class Processing(Feature):
    """One `JaxProcessor` in the step; `processor_feature` makes the subclass of one.

    The state of a row lies in a place of its own on the device from the request's first token to
    its end, so a request that loses its slot for a while finds it again.

    Attributes:
        processor: what it runs.
        everywhere: whether requests have it that do not ask for it.
    """

    processor: ClassVar[JaxProcessor]
    everywhere: ClassVar[bool] = False
    _SALT = 0x6C6F6769  # keeps its random numbers apart from the sampler's

    def __init__(self, facts: Facts, options: Mapping[str, Any] = NO_OPTIONS):
        super().__init__(facts, options)
        # more than there are slots: those that were preempted keep theirs
        self._num_places = 2 * max(facts.max_num_seqs, 1)
        self._free = [*range(self._num_places)]
        self._places: dict[str, tuple[int, int]] = {}  # sequence -> place, first position
        num_layers = None if facts.model is None else facts.model.num_layers
        self._reads = {
            _layer_of(self.processor, site, num_layers): site for site in self.processor.reads
        }
        self._check(facts)

    def _check(self, facts: Facts) -> None:
        """Raises ValidationError unless the function gives what it is given."""
        given = self.abstract(facts.vocab_size, facts.hidden_size)
        try:
            found = jax.eval_shape(self.processor.function, *given)
            kinds = jax.tree.map(_kind, found)
        except Exception as error:  # the function is the caller's: whatever it raises is told
            said = f"{type(error).__name__}: {error}"
            allowed = f"a function of (logits, rows, state) that can be traced ({said})"
            raise ValidationError(f"{FIELD}.{self.processor.name}", "...", allowed) from error
        wanted = _kind(given[0]), jax.tree.map(_kind, given[2])
        if not isinstance(found, tuple) or kinds != wanted:
            allowed = f"a function that returns (logits, state) as {wanted}"
            raise ValidationError(f"{FIELD}.{self.processor.name}", kinds, allowed)

    def abstract(self, vocab_size: int, hidden_size: int, rows: int = 3) -> tuple[Any, ...]:
        """What the function is given, as shapes and types: logits, rows, state."""

        def ints(*shape: int) -> Any:
            return jax.ShapeDtypeStruct((rows, *shape), jnp.int32)

        def logits_of(x: jax.Array) -> jax.Array:
            return jnp.zeros((x.shape[0], vocab_size), jnp.float32) + x.sum(1, keepdims=True) * 0

        args: dict[str, Any] = {}
        for name, default in self.processor.args.items():
            like = np.asarray(default)
            kind = jnp.int32 if like.dtype.kind == "i" else jnp.float32
            args[name] = jax.ShapeDtypeStruct((rows, *like.shape), kind)
        key = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), rows))
        stream: Any = jax.ShapeDtypeStruct((rows, hidden_size), jnp.float32)
        own: Any = jax.ShapeDtypeStruct((rows,), jnp.bool_)
        view = ProcessorRows(
            *(ints(), ints(), ints(), ints(8)),
            keys=key,
            args=args,
            taps=dict.fromkeys(self.processor.reads, stream),
            own=own,
            logits_of=logits_of,
        )
        logits = jax.ShapeDtypeStruct((rows, vocab_size), jnp.float32)
        state = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct((rows, *np.shape(x)), np.asarray(x).dtype),
            self.processor.state,
        )
        return logits, view, state

    # -- the engine's side

    def given(self, request: Request) -> dict[str, Any] | None:
        """The request's arguments; None: it goes without the processor.

        Raises:
            ValidationError: arguments that it has not, or a beam search where all requests have it.
        """
        if request.asked.pooling is not None:
            return None  # its one token means nothing
        asked = self.asked_of(request)
        if request.is_beam:
            if self.everywhere:
                allowed = "none of the engine's where beams are searched"
                raise ValidationError(FIELD, self.processor.name, allowed)
            return None
        if asked is None or asked is True:
            asked = {} if self.everywhere or asked else None
        if asked is None or asked is False:
            return None
        return self.processor.checked(asked)

    def own(self, request: Request) -> None:
        self.given(request)  # refuses values before the request is queued

    def need(self, request: Request) -> Need:
        return Need.NEVER if self.given(request) is None else Need.ALWAYS

    def row_of(self, request: Request) -> Any:
        args = self.given(request)
        assert self.row is not None
        if args is None:
            args = self.processor.checked({})
            return self.row(own=0, place=0, begin=0, **_columns(args))
        place, begin = self._place(request)
        return self.row(own=1, place=place, begin=begin, **_columns(args))

    def _place(self, request: Request) -> tuple[int, int]:
        found = self._places.get(request.request_id)
        if found is None:
            if not self._free:
                allowed = f"at most {self._num_places} requests that run or were preempted"
                raise ValidationError(FIELD, self.processor.name, allowed)
            found = self._free.pop(), request.num_tokens - 1
            self._places[request.request_id] = found
        return found

    def took(self, step: TakenStep) -> None:
        for entry in step.seen.ends:
            self.ended(step.seen.requests[entry].request_id)

    def ended(self, sequence_id: str) -> None:
        found = self._places.pop(sequence_id, None)
        if found is not None:
            self._free.append(found[0])

    # -- the traced side

    def state(self) -> Any:
        def kept(x: Any) -> Any:
            return jax.ShapeDtypeStruct((self._num_places, *np.shape(x)), np.asarray(x).dtype)

        first = self.processor.state
        return jax.tree.map(kept, first) if jax.tree.leaves(first) else None

    def layer(self, tokens: Tokens, layer: int, x: jax.Array) -> jax.Array:
        if layer in self._reads:
            tokens.kept[self._reads[layer]] = x
        return x

    def adjust(
        self, inputs: Any, rows: Rows, logits: jax.Array, state: Any
    ) -> tuple[jax.Array, Any]:
        row = rows.values[self.name]
        drawn = rows.values["sampling"]
        own = row.own > 0
        seeds = jnp.stack([drawn.seed_high, drawn.seed_low], axis=1)
        keys = jax.random.wrap_key_data(seeds, impl="threefry2x32")
        fold = jax.vmap(jax.random.fold_in)
        keys = fold(fold(keys, rows.position), jnp.full_like(rows.position, self._SALT))
        history = rows.history[rows.slot]
        view = ProcessorRows(
            jnp.take_along_axis(history, rows.position[:, None], axis=1)[:, 0],
            rows.position,
            rows.prompt_len,
            history,
            keys=keys,
            args=_args(self.processor.args, row),
            taps=rows.kept.get(self.name, {}),
            own=own,
            logits_of=rows.logits_of,
        )
        begins = rows.position == row.begin

        def before(first: Any, kept: jax.Array) -> jax.Array:
            is_first = begins.reshape(-1, *[1] * np.ndim(first))
            return jnp.where(is_first, jnp.asarray(first), kept[row.place])

        first = self.processor.state
        has_state = state is not None
        held = jax.tree.map(before, first, state) if has_state else None
        changed, after = self.processor.function(logits, view, held)
        if _kind(changed) != _kind(logits) or jax.tree.map(_kind, after) != jax.tree.map(
            _kind, held
        ):
            raise TypeError(f"{self.processor.name} changes the shape or type of logits or state")
        changed = jnp.where(own[:, None], changed, logits)
        if has_state:
            # a row that is not its own names a place that does not exist
            places = jnp.where(own, row.place, self._num_places)
            state = jax.tree.map(lambda kept, x: kept.at[places].set(x, mode="drop"), state, after)
        return changed, state

    def cost(self, shape: StepShape) -> float:
        return PASSES * shape.num_special * self.facts.vocab_size


def processor_feature(
    processor: JaxProcessor, name: str, *, everywhere: bool = False, on_demand: bool = False
) -> type[Processing]:
    """The feature of a processor.

    Args:
        processor: what it runs.
        name: of the feature, and the key of its arguments in `extra_args`.
        everywhere: requests have it that do not ask for it.
        on_demand: see `Feature.on_demand`.
    """
    declared: dict[str, Any] = {"own": array(), "place": array(), "begin": array()}
    for key, value in _columns(processor.checked({})).items():
        declared[key] = array(dtype="int32" if isinstance(value, int) else "float32")  # by row
    notes = dict.fromkeys(declared, Any)
    row: type = arrays(type("ProcessorRow", (), {"__annotations__": notes, **declared}))
    kept = {
        "name": name,
        "row": row,
        "processor": processor,
        "everywhere": everywhere,
        "on_demand": on_demand,
        # what is kept of a traced step is of the code of these modules
        "__module__": getattr(processor.function, "__module__", __name__),
    }
    if not processor.reads:  # a hook of layers costs norms that are fused otherwise
        kept["layer"] = Feature.layer
    return type("Processing", (Processing,), kept)


def _columns(args: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments as scalars of a row."""
    found: dict[str, Any] = {}
    for name, value in args.items():
        if np.ndim(value) == 0:
            found[f"{name}_"] = value
        else:
            found |= {f"{name}_{i}": one.item() for i, one in enumerate(value)}
    return found


def _args(defaults: Mapping[str, Any], row: Any) -> dict[str, jax.Array]:
    """The arguments of all rows, [M] or [M, N]."""
    return {
        name: getattr(row, f"{name}_")
        if np.ndim(default) == 0
        else jnp.stack([getattr(row, f"{name}_{i}") for i in range(len(default))], axis=1)
        for name, default in defaults.items()
    }


def _layer_of(processor: JaxProcessor, site: str, num_layers: int | None) -> int:
    """The layer of a site that a processor reads."""
    parts = site.split(".")
    is_site = len(parts) == 3 and parts[0] == "layers" and parts[2] == "residual"
    most = num_layers or 0
    if not is_site or not parts[1].isdecimal() or not 0 <= int(parts[1]) < most:
        allowed = f"layers.0.residual to layers.{most - 1}.residual"
        raise ValidationError(f"{FIELD}.{processor.name}.reads", site, allowed)
    return int(parts[1])


def _kind(one: Any) -> str:
    return f"{one.dtype}{[*one.shape]}"
