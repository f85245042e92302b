"""Captures and interventions: what requests look at inside the model, and change there."""

from __future__ import annotations

import fnmatch
import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxserve.errors import ValidationError
from jaxserve.execution.features.feature import (
    NO_OPTIONS,
    Facts,
    Feature,
    Host,
    Need,
    TakenStep,
    Tokens,
)
from jaxserve.execution.layout import array, arrays
from jaxserve.models.config import ModelConfig
from jaxserve.params.probes import Capture, Intervention
from jaxserve.request.request import Request

EMBEDDING, HIDDEN, LOGITS = "embedding", "hidden", "logits"
MOST_CHANGES = 64  # of all requests that run or wait
# what a layer's projections give and take: site -> its hook, the projection's name
_OF_LAYER = {
    "residual": ("layer", ""),
    "attention.qkv": ("linear", "qkv"),
    "attention.heads": ("operand", "output"),
    "attention.output": ("linear", "output"),
    "mlp.hidden": ("operand", "down"),
    "mlp.output": ("linear", "down"),
}
PARTS = {of: part for part, of in _OF_LAYER.items()}
_HOOKS = {EMBEDDING: "embed", HIDDEN: "see_last", LOGITS: "see_last"}
WEIGHTS = "attention.weights"  # no site: they follow from a layer's queries and keys


def sites_of(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Names of the sites of a model, in the order of its computation, and the shape for a token."""
    hidden, heads = (config.hidden_size,), (config.num_heads, config.head_dim)
    groups = config.num_heads // config.num_kv_heads
    dense = getattr(config, "dense_layers", range(config.num_layers))  # experts have no sites
    found: dict[str, tuple[int, ...]] = {EMBEDDING: hidden}
    for layer in range(config.num_layers):
        name = f"layers.{layer}."
        found[name + "attention.qkv"] = (config.num_kv_heads, groups + 2, config.head_dim)
        found[name + "attention.heads"] = heads
        found[name + "attention.output"] = hidden
        if layer in dense:
            found[name + "mlp.hidden"] = (config.intermediate_size,)
            found[name + "mlp.output"] = hidden
        found[name + "residual"] = hidden
    return found | {HIDDEN: hidden, LOGITS: (config.vocab_size,)}


def weight_sites(config: ModelConfig) -> tuple[str, ...]:
    """Names of the weights of attention of every layer."""
    return tuple(f"layers.{layer}.{WEIGHTS}" for layer in range(config.num_layers))


def part_of(site: str) -> str:
    """A site without its layer: "residual" of "layers.3.residual"."""
    return site.split(".", 2)[2] if site.startswith("layers.") else site


def matching(
    patterns: Iterable[str], config: ModelConfig, field_name: str, more: Sequence[str] = ()
) -> tuple[str, ...]:
    """The sites that patterns name, in the model's order.

    Args:
        patterns: names, in which * stands for any part.
        config: of the model.
        field_name: for errors.
        more: sites beside those of the model.

    Raises:
        ValidationError: a pattern names none.
    """
    known, found = [*sites_of(config), *more], set[str]()
    for pattern in patterns:
        some = [site for site in known if fnmatch.fnmatchcase(site, pattern)]
        if not some:
            allowed = f"a site of the model: {', '.join(_shown_sites(config))}"
            raise ValidationError(field_name, pattern, allowed)
        found.update(some)
    return tuple(site for site in known if site in found)


def _shown_sites(config: ModelConfig) -> list[str]:
    parts = dict.fromkeys(part_of(s) for s in sites_of(config) if s.startswith("layers."))
    most = config.num_layers - 1
    return [EMBEDDING, *(f"layers.0.{p} to layers.{most}.{p}" for p in parts), HIDDEN, LOGITS]


class Change(NamedTuple):
    """An intervention on positions start .. stop - 1, its arrays flat float32[W]."""

    site: str
    start: int
    stop: int
    multiply: np.ndarray
    add: np.ndarray


def changes_of(given: Intervention, config: ModelConfig) -> list[Change]:
    """What an intervention does, with arrays of its site's shape.

    Raises:
        ValidationError: an unknown site or head, an array of another shape.
    """
    name = f"interventions.{given.kind}"
    known = sites_of(config)
    if given.site.endswith(WEIGHTS):
        allowed = "a site that kernels have: queries and keys are in attention.qkv"
        raise ValidationError(name, given.site, allowed)
    if given.site not in known or given.site in (HIDDEN, LOGITS):
        allowed = f"a site of the model: {', '.join(_shown_sites(config)[:-2])}"
        raise ValidationError(name, given.site, allowed)
    shape = known[given.site]
    width, add = math.prod(shape), given.add
    multiply = np.full(shape, given.multiply, np.float32)
    if given.head is not None:
        if not 0 <= given.head < shape[0]:
            raise ValidationError(f"{name}.head", given.head, f"a head, 0 to {shape[0] - 1}")
        multiply[:] = 1.0
        multiply[given.head] = given.multiply
    if add is None:
        add = np.zeros(shape, np.float32)
    if add.shape == shape:
        flat = (add * np.float32(given.scale)).reshape(width)
        return [Change(given.site, given.start, given.stop, multiply.reshape(width), flat)]
    if given.multiply != 0.0 or add.shape[1:] != shape:
        own = f"float32{[*shape]}" + ("" if given.multiply else f" or [tokens, {shape}]")
        raise ValidationError(name, f"an array of shape {[*add.shape]}", f"{own} at {given.site}")
    count = min(len(add), given.stop - given.start)
    at = [given.start + offset for offset in range(count)]
    flat_rows = add.reshape(len(add), width)
    return [
        Change(given.site, p, p + 1, multiply.reshape(width), row) for p, row in zip(at, flat_rows)
    ]


@dataclass(frozen=True, eq=False)
class Probe:
    """What one request captures and changes.

    Attributes:
        sites: whose arrays are set aside.
        capture: how; None: nothing is.
        weights: names of attention weights, which follow from sites.
        wanted: of the sites, those that were asked for themselves.
        changes: in the order in which they act.
    """

    sites: tuple[str, ...] = ()
    capture: Capture | None = None
    weights: tuple[str, ...] = ()
    wanted: tuple[str, ...] = ()
    changes: tuple[Change, ...] = ()

    @property
    def key(self) -> str:
        """What keys and values depend on."""
        if not self.changes:
            return ""
        digest = hashlib.blake2b(digest_size=16)
        for site, start, stop, *values in self.changes:
            digest.update(f"{site} {start} {stop}".encode())
            for one in values:
                digest.update(one.tobytes())
        return digest.hexdigest()


@dataclass
class _Found:
    """Arrays of one sequence: by site, in the order of the positions."""

    parts: dict[str, list[Any]] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)  # tokens that they have


@arrays
class OwnerRow:
    """The number of a token's sequence, from 1; 0: nothing of it is looked at."""

    owner: Any = array()


class Probing(Feature):
    """Some sites that are captured, and kinds of sites that may be changed; see `probe_feature`.

    Which layers, positions and requests are changed, and how, lies in an array on the device, so a
    program serves all changes of its kinds of sites.

    Attributes:
        sites: that are captured.
        parts: kinds of sites that may be changed, see `part_of`.
    """

    on_demand = True
    special = False
    token_row = OwnerRow
    sites: ClassVar[frozenset[str]] = frozenset()
    parts: ClassVar[frozenset[str]] = frozenset()

    def __init__(self, facts: Facts, options: Mapping[str, Any] = NO_OPTIONS):
        super().__init__(facts, options)
        assert facts.model is not None
        known = sites_of(facts.model)
        self._ids = {site: number for number, site in enumerate(known)}
        widths = [math.prod(shape) for site, shape in known.items() if part_of(site) in self.parts]
        self._width = max(widths, default=0)
        self._shapes = known
        self._owners: dict[str, int] = {}  # by sequence
        self._changes: dict[str, tuple[Change, ...]] = {}
        self._found: dict[str, _Found] = {}
        self._count = 0
        self._host: Host | None = None

    # -- the engine's side

    def serve(self, host: Host) -> None:
        self._host = host

    def probe_of(self, request: Request) -> Probe | None:
        """What a request asks for."""
        asked = self.asked_of(request)
        if asked is not None and not isinstance(asked, Probe):
            raise ValidationError(f"extra_args.{self.name}", asked, "none: generate has `capture`")
        return asked

    def own(self, request: Request) -> None:
        probe = self.probe_of(request)
        if probe is None:
            return
        name = request.request_id
        if probe.changes:
            live = sum(map(len, self._changes.values()))
            if live + len(probe.changes) > MOST_CHANGES:
                allowed = f"at most {MOST_CHANGES} changes of all requests at a time"
                raise ValidationError("interventions", live + len(probe.changes), allowed)
        self._count += 1
        self._owners[name] = self._count
        if probe.capture is not None:
            self._found[name] = _Found()
        if probe.changes:
            self._changes[name] = probe.changes
            self._write()

    def _write(self) -> None:
        """Have the changes of all live sequences on the device."""
        table = jax.tree.map(lambda s: np.zeros(s.shape, s.dtype), self.state())
        place = 0
        for name, changes in self._changes.items():
            for one in changes:
                table["owner"][place] = self._owners[name]
                table["site"][place] = self._ids[one.site]
                table["start"][place], table["stop"][place] = one.start, one.stop
                table["multiply"][place, : len(one.add)] = one.multiply
                table["add"][place, : len(one.add)] = one.add
                place += 1
        table["count"] = np.full_like(table["count"], place)
        assert self._host is not None
        self._host.put_state(self.name, table)

    def need(self, request: Request) -> Need:
        return Need.NEVER if self.probe_of(request) is None else Need.ALWAYS

    def token_row_of(self, request: Request) -> OwnerRow:
        return OwnerRow(self._owners.get(request.request_id, 0))

    def cache_key(self, request: Request) -> str:
        probe = self.probe_of(request)
        return "" if probe is None else probe.key

    def took(self, step: TakenStep) -> None:
        if self._found:
            for site in self.sites - {LOGITS}:
                taken = step.step.set_aside(self.name, site)
                if taken is not None:
                    self._take(site, *taken)
            taken = step.step.set_aside(self.name, LOGITS)
            if taken is not None:
                self._take_logits(taken[0], step)
        for entry in step.seen.ends:
            self._forget(step.seen.requests[entry].request_id)

    def _take(self, site: str, values: jax.Array, computed: Sequence[Any]) -> None:
        for request, start, length, place in computed:
            found, probe = self._found.get(request.request_id), self.probe_of(request)
            if found is None or probe is None or site not in probe.sites:
                continue
            known = found.counts.get(site, 0)
            new = start + length - known  # what is computed again is known
            if start <= known and new > 0:
                rows = range(place + length - new, place + length)
                found.parts.setdefault(site, []).append(self._rows(values, rows, probe, site))
                found.counts[site] = known + new

    def _take_logits(self, values: jax.Array, step: TakenStep) -> None:
        rows = step.step.step.packed.rows
        for entry, request in enumerate(step.seen.requests):
            found, probe = self._found.get(request.request_id), self.probe_of(request)
            if found is None or probe is None or LOGITS not in probe.sites:
                continue
            row = rows[step.seen.samples[entry]]
            part = self._rows(values, range(row, row + 1), probe, LOGITS)
            found.parts.setdefault(LOGITS, []).append(part)
            found.counts[LOGITS] = found.counts.get(LOGITS, 0) + 1

    def _rows(self, values: jax.Array, rows: range, probe: Probe, site: str) -> Any:
        """Some rows of an array, as the request wants them."""
        assert probe.capture is not None
        kind = probe.capture.dtype
        shape = (len(rows), *self._shapes[site])
        if probe.capture.device:
            some = jnp.take(values, np.arange(rows.start, rows.stop), axis=0)
            return (some if kind is None else some.astype(kind)).reshape(shape)
        part = np.asarray(values)[rows.start : rows.stop].reshape(shape)
        return part.copy() if kind is None else part.astype(jnp.dtype(kind))

    def take(self, sequence_id: str, num_tokens: int, num_output: int) -> dict[str, Any]:
        """The arrays of a sequence that has ended, by site: [tokens, *shape].

        Args:
            sequence_id: whose.
            num_tokens: of prompt and output; nothing is computed of the last one.
            num_output: of the output, each of which has logits.
        """
        found = self._found.pop(sequence_id, _Found())
        joined = {}
        for site in self._ids:
            parts = found.parts.get(site)
            if parts:
                join = np.concatenate if isinstance(parts[0], np.ndarray) else jnp.concatenate
                most = num_output if site == LOGITS else num_tokens - 1
                joined[site] = join(parts)[:most]
        return joined

    def clear(self) -> None:
        """Drop what was captured and not taken; nothing runs."""
        self._found.clear()

    def _forget(self, sequence_id: str) -> None:
        self._owners.pop(sequence_id, None)
        self._changes.pop(sequence_id, None)  # no row of the device has its number any more

    def ended(self, sequence_id: str) -> None:
        self._forget(sequence_id)
        self._found.pop(sequence_id, None)

    # -- the traced side

    def state(self) -> Any:
        if not self.parts:
            return None

        def table(*shape: int, dtype: Any = jnp.int32) -> Any:
            return jax.ShapeDtypeStruct(shape, dtype)

        most = MOST_CHANGES
        values = table(most, self._width, dtype=jnp.float32)
        whole = {name: table(most) for name in ("owner", "site", "start", "stop")}
        return {"count": table(), **whole, "multiply": values, "add": values}

    def _at(self, tokens: Tokens, site: str, x: jax.Array) -> jax.Array:
        """What a site has after all changes, captured if it is to be."""
        if part_of(site) in self.parts and site in self._ids:
            x = self._changed(tokens, self._ids[site], x)
        if site in self.sites:
            tokens.tap(site, x)
        return x

    def _changed(self, tokens: Tokens, site: int, x: jax.Array) -> jax.Array:
        table, owner, position = tokens.state, tokens.values.owner, tokens.position
        flat = x.reshape(len(x), -1).astype(jnp.float32)
        width = flat.shape[1]

        def one(i: jax.Array, flat: jax.Array) -> jax.Array:
            hit = (table["site"][i] == site) & (table["owner"][i] == owner)
            hit &= (table["start"][i] <= position) & (position < table["stop"][i])
            multiply, add = table["multiply"][i, :width], table["add"][i, :width]
            changed = jnp.where(multiply == 0, add, flat * multiply + add)
            return jnp.where(hit[:, None], changed, flat)

        flat = lax.fori_loop(0, table["count"], one, flat)
        return flat.astype(x.dtype).reshape(x.shape)

    def embed(self, tokens: Tokens, x: jax.Array) -> jax.Array:
        return self._at(tokens, EMBEDDING, x)

    def linear(
        self, tokens: Tokens, name: str, layer: int, x: jax.Array, y: jax.Array
    ) -> jax.Array:
        part = PARTS.get(("linear", name))
        return y if part is None else self._at(tokens, f"layers.{layer}.{part}", y)

    def operand(self, tokens: Tokens, name: str, layer: int, x: jax.Array) -> jax.Array:
        return self._at(tokens, f"layers.{layer}.{PARTS['operand', name]}", x)

    def layer(self, tokens: Tokens, layer: int, x: jax.Array) -> jax.Array:
        return self._at(tokens, f"layers.{layer}.residual", x)

    def see_last(self, tokens: Tokens, hidden: jax.Array, logits: jax.Array) -> None:
        for site, values in ((HIDDEN, hidden), (LOGITS, logits)):
            if site in self.sites:
                tokens.tap(site, values)


def probe_feature(name: str, sites: frozenset[str], parts: frozenset[str]) -> type[Probing]:
    """The feature that captures some sites and changes some kinds of sites.

    It has no hook but those that it needs: each keeps norms out of fused kernels.
    """
    used = {part_of(site) for site in sites} | parts
    hooks = {_HOOKS[p] if p in _HOOKS else _OF_LAYER[p][0] for p in used}
    every = ("embed", "linear", "operand", "layer", "see_last")
    left_out = {hook: getattr(Feature, hook) for hook in every if hook not in hooks}
    return type("Probing", (Probing,), {"name": name, "sites": sites, "parts": parts, **left_out})
