"""What requests of an `LLM` bring along for the step: logits processors, captures, interventions.

Each becomes a feature of the engine when a request first asks for it, with compiled programs of
their own; programs without it stay as they are.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxserve.client.engine_client import LocalClient
from jaxserve.client.input_processor import PreparedRequest
from jaxserve.config.deterministic import UNKNOWN
from jaxserve.errors import ValidationError
from jaxserve.execution.features import Feature
from jaxserve.execution.features.host_processors import HostProcessing
from jaxserve.execution.features.own_features import made
from jaxserve.execution.features.probes import (
    LOGITS,
    MOST_CHANGES,
    WEIGHTS,
    Change,
    Probe,
    Probing,
    changes_of,
    matching,
    part_of,
    probe_feature,
    sites_of,
    weight_sites,
)
from jaxserve.execution.features.processors import Processing, processor_feature
from jaxserve.models.config import ModelConfig
from jaxserve.models.plain_forward import attention_weights
from jaxserve.outputs import RequestOutput
from jaxserve.params.logits_processor import (
    FIELD,
    HOST_PROCESSORS,
    AskedProcessor,
    HostProcessor,
    JaxProcessor,
    Processor,
)
from jaxserve.params.probes import Capture, Intervention
from jaxserve.params.sampling_params import SamplingParams

logger = logging.getLogger(__name__)

MOST_FEATURES = 64  # that an engine is given while it serves


class Instruments:
    """The features of one LLM's requests.

    Args:
        client: of the LLM.
    """

    def __init__(self, client: LocalClient):
        self._client = client
        self._numbers = itertools.count(1)
        self._wanted: set[str] = set()  # by requests that may run
        self._tried: deque[Callable[..., Any]] = deque(maxlen=64)  # callables on the host

    def begin(self) -> None:
        """The requests of one call are prepared from here on."""
        if not self._client.has_work:
            self._wanted.clear()
            for one in self._features:
                if isinstance(one, Probing):
                    one.clear()

    def sites(self) -> dict[str, tuple[int, ...]]:
        """Names and shapes of the sites of the model."""
        return sites_of(self._model)

    def take_probes(
        self, params: Sequence[SamplingParams], capture: Any, interventions: Any
    ) -> None:
        """Have the captures and interventions of the requests of one call.

        Args:
            params: of each request.
            capture: `Capture` or names of sites, for all; or a list with one or None a request.
            interventions: a list of `Intervention`, for all; or a list of lists, one a request.

        Raises:
            ValidationError: an unknown site or head, an array of another shape, several completions
                of a request that captures.
        """
        if capture is None and not interventions:
            return
        captures = _one_each("capture", capture, len(params))
        changes = _one_each("interventions", interventions, len(params))
        probes = [self._probe(*given) for given in zip(captures, changes, strict=True)]
        sites = frozenset(site for probe in probes for site in probe.sites)
        parts = frozenset(part_of(c.site) for probe in probes for c in probe.changes)
        if not sites and not parts:
            return
        feature = self._probing(sites, parts)
        self._wanted.add(feature.name)
        for own, probe in zip(params, probes, strict=True):
            if not (probe.capture or probe.changes):
                continue
            if probe.capture is not None:
                if own.n != 1:
                    raise ValidationError("n", own.n, "1 with capture")
                own.skip_reading_prefix_cache = True  # what is found there is not computed
            own.extra_args = {**(own.extra_args or {}), feature.name: probe}

    def _probe(self, capture: Any, interventions: Any) -> Probe:
        if capture is not None and not isinstance(capture, Capture):
            capture = Capture(capture)
        wanted, weights = self._matching(capture)
        needed = {f"layers.{_layer_of(name)}.attention.qkv" for name in weights}
        sites = tuple(site for site in self.sites() if site in needed.union(wanted))
        if not isinstance(interventions, Sequence | None):
            interventions = [interventions]
        changes: list[Change] = []
        for one in interventions or ():
            if not isinstance(one, Intervention):
                allowed = "add_vector(...), patch(...) or ablate_head(...)"
                raise ValidationError("interventions", one, allowed)
            changes += changes_of(one, self._model)
        if len(changes) > MOST_CHANGES:
            raise ValidationError("interventions", len(changes), f"at most {MOST_CHANGES} changes")
        return Probe(sites, capture, weights, wanted, tuple(changes))

    def _matching(self, capture: Capture | None) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The sites that a capture names, and the attention weights."""
        given = () if capture is None else capture.sites
        named = [pattern for pattern in given if pattern.endswith(WEIGHTS)]
        if named and self._client.config.asked.tensor_parallel_size > 1:
            allowed = "sites of LLM.sites() where tensor_parallel_size is above 1"
            raise ValidationError("capture", named[0], allowed)
        every = weight_sites(self._model)
        others = [pattern for pattern in given if pattern not in named]
        return (
            matching(others, self._model, "capture"),
            matching(named, self._model, "capture", every),
        )

    def _probing(self, sites: frozenset[str], parts: frozenset[str]) -> Probing:
        """The feature with the fewest sites that has these, made if there is none."""
        fitting = [
            one
            for one in self._features
            if isinstance(one, Probing) and sites <= one.sites and parts <= one.parts
        ]
        if fitting:
            return min(fitting, key=lambda one: (len(one.sites), len(one.parts)))
        kind = probe_feature(f"probe@{next(self._numbers)}", sites, parts)
        feature = self.add(kind)
        assert isinstance(feature, Probing)
        return feature

    def check_bytes(self, prepared: Sequence[PreparedRequest]) -> None:
        """Raises ValidationError if captures of a call may need more than one of them allows."""
        total, most = 0, None
        known, own_size = self.sites(), jnp.dtype(self._client.config.model.dtype).itemsize
        for one in prepared:
            _, probe = self._probe_of(one)
            if probe is None or probe.capture is None:
                continue
            kind, group = probe.capture.dtype, one.group
            size = own_size if kind is None else jnp.dtype(kind).itemsize
            num_output = group.stop_rule.max_tokens
            for site in probe.sites:
                num_tokens = len(group.prompt_token_ids) + num_output
                rows = num_output if site == LOGITS else num_tokens
                total += rows * math.prod(known[site]) * (4 if site == LOGITS else size)
            pairs = (len(group.prompt_token_ids) + num_output) ** 2
            total += 4 * len(probe.weights) * self._model.num_heads * pairs
            most = min(probe.capture.max_bytes, probe.capture.max_bytes if most is None else most)
        if most is not None and total > most:
            allowed = f"max_bytes={most} at most: fewer sites, tokens or prompts, or more max_bytes"
            raise ValidationError("capture", f"up to {total} bytes", allowed)

    def collect(
        self, prepared: Sequence[PreparedRequest], outputs: Sequence[RequestOutput]
    ) -> None:
        """Give the outputs of a call what was captured.

        Raises:
            ValidationError, Exception: what a callable on the host has raised.
        """
        for one, output in zip(prepared, outputs, strict=True):
            feature, probe = self._probe_of(one)
            if feature is not None and probe is not None and probe.capture is not None:
                (name,) = one.group.sequence_ids
                num_output = len(output.outputs[0].token_ids)
                num_tokens = len(one.group.prompt_token_ids) + num_output
                found = feature.take(name, num_tokens, num_output)
                found |= self._weights(probe, found, len(one.group.prompt_token_ids))
                kept = {*probe.wanted, *probe.weights}
                output.captured = {site: x for site, x in found.items() if site in kept}
        names = [name for one in prepared for name in one.group.sequence_ids]
        hosts = [one for one in self._features if isinstance(one, HostProcessing)]
        failed = [e for h in hosts for n in names if (e := h.failures.pop(n, None)) is not None]
        if failed:
            raise failed[0]

    def _weights(self, probe: Probe, found: dict[str, Any], prompt_len: int) -> dict[str, Any]:
        """Attention weights [tokens, heads, tokens] of a sequence, of its captured projections."""
        assert probe.capture is not None
        made: dict[str, Any] = {}
        for name in probe.weights:
            layer = _layer_of(name)
            qkv = found.get(f"layers.{layer}.attention.qkv")
            if qkv is None:
                continue
            model = self._client.engine.runner.model()
            weights = attention_weights(model, layer, jnp.asarray(qkv), prompt_len)
            weights = weights.astype(probe.capture.dtype or weights.dtype)
            made[name] = weights if probe.capture.device else np.asarray(weights)
        return made

    def _probe_of(self, prepared: PreparedRequest) -> tuple[Probing | None, Probe | None]:
        given = prepared.group.params.extra_args or {}
        for one in self._features:
            if isinstance(one, Probing) and one.name in given:
                return one, given[one.name]
        return None, None

    def take(self, params: SamplingParams) -> None:
        """Have the processors that a request asks for; its parameters name them afterwards.

        Raises:
            ValidationError: a processor that cannot be traced or changes shapes or types.
        """
        asked = params.logits_processors
        params.logits_processors = None
        if not asked:
            return
        extra, after = dict(params.extra_args or {}), -1
        for of_host, group in itertools.groupby(asked, lambda p: isinstance(p, HostProcessor)):
            if of_host:
                hosts = tuple(self._fitting(one) for one in group)
                after = self._place(self._host_feature(after))
                extra[self._features[after].name] = hosts
                continue
            for one in group:
                after = self._place(self._feature_of(one, after))
                args = one.args if isinstance(one, AskedProcessor) else {}
                extra[self._features[after].name] = args
        params.extra_args = extra

    def _fitting(self, processor: Processor) -> HostProcessor:
        """The processor, called once with a row of zeros so that its result is known to fit.

        Raises:
            ValidationError: it changes the shape or dtype of a row.
        """
        assert isinstance(processor, HostProcessor)
        if not any(processor.function is one for one in self._tried):
            self._tried.append(processor.function)
            row = np.zeros(self._client.engine.runner.facts.vocab_size, np.float32)
            try:
                processor.apply([0], [], row)
            except ValidationError:
                raise
            except Exception:  # it may want a longer prompt: its requests will tell
                logger.warning("%s failed with a row of zeros", processor.name, exc_info=True)
        return processor

    def ready(self) -> None:
        """Compile what the requests need that were taken."""
        names = frozenset(f.name for f in self._features if f.on_demand) & self._wanted
        if names and self._client.engine.runner.compile_with(names):
            logger.info("compiled programs with %s", ", ".join(sorted(names)))

    @property
    def _model(self) -> ModelConfig:
        model = self._client.engine.runner.facts.model
        assert model is not None
        return model

    @property
    def _features(self) -> Sequence[Feature]:
        return self._client.engine.runner.features

    def _place(self, feature: Feature) -> int:
        self._wanted.add(feature.name)
        return list(self._features).index(feature)

    def _feature_of(self, asked: Processor, after: int) -> Feature:
        """The feature of a function that comes behind another one, made if there is none."""
        processor = asked.processor if isinstance(asked, AskedProcessor) else asked
        assert isinstance(processor, JaxProcessor)
        for one in self._features[after + 1 :]:
            if isinstance(one, Processing) and _is_same(one.processor, processor):
                return one
        name = f"{processor.name}@{next(self._numbers)}"
        return self.add(processor_feature(processor, name, on_demand=True))

    def _host_feature(self, after: int) -> Feature:
        if self._client.config.asked.tensor_parallel_size > 1:
            allowed = "functions (logits, rows, state) in JAX where tensor_parallel_size is above 1"
            raise ValidationError(FIELD, "callables", allowed)
        for one in self._features[after + 1 :]:
            if isinstance(one, HostProcessing):
                return one
        name = f"{HOST_PROCESSORS}@{next(self._numbers)}"
        return self.add(type("HostProcessing", (HostProcessing,), {"name": name}))

    def add(self, kind: type[Feature], options: Any = None) -> Feature:
        """Give the engine a feature on demand.

        Raises:
            ValidationError: it cannot be made, or there are too many.
        """
        if self._client.config.asked.deterministic:
            raise ValidationError(kind.name, "given", f"none with deterministic: {UNKNOWN}")
        if sum(feature.on_demand for feature in self._features) >= MOST_FEATURES:
            allowed = f"at most {MOST_FEATURES} different ones; give the same function again"
            raise ValidationError(FIELD, kind.name, allowed)
        engine, inputs = self._client.engine, self._client.inputs
        feature = made((kind, options or {}), engine.runner.facts)
        engine.runner.add_features([feature])
        engine.features.add([feature])
        if inputs.features is not None:
            inputs.features = (*inputs.features, kind.name)
        return feature


def _layer_of(site: str) -> int:
    """The layer of "layers.3.residual"."""
    return int(site.split(".")[1])


def _one_each(field: str, given: Any, count: int) -> list[Any]:
    """What each request of a call has, of what was given for all of them or for each."""
    kinds = {"capture": (Capture, str), "interventions": (Intervention,)}[field]
    is_list = isinstance(given, list | tuple)
    if given is None or isinstance(given, kinds):
        return [given] * count
    if not is_list:
        raise ValidationError(field, given, f"a list of {kinds[0].__name__}")
    whole = field == "interventions" or any(isinstance(one, str) for one in given)
    if whole and all(isinstance(one, kinds) for one in given):
        return [given] * count
    if len(given) != count:
        raise ValidationError(field, f"{len(given)} entries", f"one a prompt, {count} of them")
    return list(given)


def _is_same(one: JaxProcessor, other: JaxProcessor) -> bool:
    """Whether two are one: the same object, or the same function with nothing beside."""
    is_bare = not (one.args or other.args or one.reads or other.reads)
    has_state = one.state is not None or other.state is not None
    return one is other or (one.function is other.function and is_bare and not has_state)
