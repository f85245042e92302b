"""From a model folder to a quantised one, a layer at a time.

Each layer is read, run over the calibration text, rounded with what its linear layers saw, run
again as it has become, so that the next one sees what it will see, and written.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from checkpoints import CheckpointError, SafetensorsReader
from checkpoints.folder_writer import FolderWriter
from checkpoints.json_file import read_object
from checkpoints.quantize.awq import best_factors, clipped
from checkpoints.quantize.calibration import activation_scale
from checkpoints.quantize.gptq import gptq, hessian
from checkpoints.quantize.layer_schemes import LayerScheme, Policy
from checkpoints.quantize.rounding import RoundedMatrix, round_fp8, round_integers, round_with_zeros
from checkpoints.quantize.schemes import Scheme, quantization_config
from checkpoints.quantize.tensors import stored_tensors
from checkpoints.quantized_formats import open_checkpoint
from checkpoints.store.writer import small_files_of
from jaxserve.config.engine_config import EngineConfig
from jaxserve.errors import ValidationError
from jaxserve.loading.hub import locate, names_gguf
from jaxserve.models.config import ModelConfig
from jaxserve.models.config_reader import read_model_config
from jaxserve.models.layer_run import LayerRun
from jaxserve.models.moe import MoeConfig
from jaxserve.models.registry import family_of
from jaxserve.models.sources import Place
from jaxserve.models.store import NO_FOLDER
from jaxserve.models.weights import check_tensors, with_stored_head
from jaxserve.tokenization.tokenizer import Tokenizer

# name of a projection to the hooks of the model -> its place in a block
PROJECTIONS: dict[str, Place] = {
    "qkv": ("attention", "qkv"),
    "output": ("attention", "output"),
    "gate_up": ("mlp", "gate_up"),
    "down": ("mlp", "down"),
}
# whose norms stand before the projections, so that they can take AWQ's factors
AWQ_ARCHITECTURES = (
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
)
LEAST_TOKENS = 512
FEW_ROWS = 256  # of activations that searches look at
DEFAULT_GROUP = 128


@dataclass(frozen=True, slots=True)
class Calibration:
    """A text and how much of it is run.

    Attributes:
        text: any; the more like what will be served the better.
        samples: windows at most, spread over the text.
        window: tokens of each.
    """

    text: str
    samples: int = 64
    window: int = 512


def quantize(
    model: str,
    out: str | Path,
    policy: Policy,
    *,
    calibration: Calibration | None = None,
    group: int = DEFAULT_GROUP,
    use_tqdm: bool = True,
) -> Path:
    """Write a quantised checkpoint in the Hugging Face format of its scheme; returns its folder.

    Args:
        model: folder with safetensors that are not quantised, or the id of a hub's model.
        out: absent or empty; written whole or not at all.
        policy: which layer becomes what.
        calibration: needed by schemes that look at activations.
        group: inputs that share a scale, of the schemes of 4 bits.
        use_tqdm: show a progress bar where standard error is a terminal.

    Raises:
        ValidationError: a scheme that this model cannot have, or a text that is too short.
        CheckpointError: the model cannot be read, or the folder not be written.
    """
    if names_gguf(str(model)):
        raise CheckpointError(model, NO_FOLDER)
    files = locate(EngineConfig(model=str(model)))
    raw = read_object(files.model / "config.json") or {}
    if raw.get("quantization_config"):
        raise ValidationError("model", str(model), "a model that is not quantised already")
    config = read_model_config(files.model)
    _check(config, policy, group)
    files.fetch_weights()
    windows = _windows(policy, calibration, files.tokenizer, config.vocab_size)
    with open_checkpoint(files.model) as checkpoint:
        config = with_stored_head(config, checkpoint)
        check_tensors(checkpoint, config)
    with SafetensorsReader(files.model) as reader, FolderWriter(out) as writer:
        model_run = LayerRun(config)
        worker = _Worker(reader, writer, model_run, policy, group)
        worker.write_rest()
        states = worker.embedded(windows)
        layers = range(config.num_layers)
        for layer in tqdm(layers, desc="quantising", disable=None if use_tqdm else True):
            states = worker.layer(layer, states)
        kept = [*worker.kept, "lm_head"]
        quantization = quantization_config(worker.modules, kept, group)
        said = {
            "quantization_config": quantization,
            "tie_word_embeddings": config.tie_word_embeddings,
        }
        small = small_files_of(files.model)
        changed = json.dumps(raw | said, indent=2)
        writer.finish(small | {"config.json": changed.encode()})
    return Path(out)


def _check(config: ModelConfig, policy: Policy, group: int) -> None:
    schemes = policy.schemes
    if family_of(config).passed_over:
        allowed = "the architecture of a text model: what reads images would be lost"
        raise ValidationError("model", config.architecture, allowed)
    is_awq = any(scheme.name == "int4-awq" for scheme in schemes)
    if is_awq and config.architecture not in AWQ_ARCHITECTURES:
        allowed = f"for {', '.join(AWQ_ARCHITECTURES)} alone, and this is {config.architecture}"
        raise ValidationError("scheme", "int4-awq", allowed)
    needing = [scheme.name for scheme in schemes if scheme.needs_text]
    if needing and isinstance(config, MoeConfig):
        raise ValidationError("scheme", needing[0], "one that needs no calibration, for experts")
    if any(scheme.grouped for scheme in schemes):
        if group < 16 or group % 16:
            raise ValidationError("group_size", group, "a multiple of 16")
        sizes = {config.hidden_size, config.num_heads * config.head_dim, *config.inner_sizes}
        for size in sorted(sizes):
            if size % group:
                raise ValidationError("group_size", group, f"a divisor of {size} inputs")
    for first, last, _ in policy.layers:
        if not first <= last < config.num_layers:
            raise ValidationError(
                "policy.layers", f"{first}-{last}", f"of the layers 0-{config.num_layers - 1}"
            )


def _windows(
    policy: Policy, calibration: Calibration | None, tokenizer: Path, vocab_size: int
) -> list[np.ndarray]:
    """Windows of the calibration text; none where no scheme needs them."""
    needing = [scheme.name for scheme in policy.schemes if scheme.needs_text]
    if not needing:
        return []
    if calibration is None:
        raise ValidationError("calibration", None, f"a text, which {needing[0]} needs")
    if calibration.samples < 1 or calibration.window < 2:
        sizes = (calibration.samples, calibration.window)
        raise ValidationError("calibration", sizes, "1 sample or more of 2 tokens or more")
    tokens = Tokenizer(tokenizer).encode(calibration.text)
    if len(tokens) < LEAST_TOKENS:
        raise ValidationError(
            "calibration", f"{len(tokens)} tokens", f"a text of {LEAST_TOKENS} tokens or more"
        )
    if max(tokens) >= vocab_size:
        raise ValidationError(
            "calibration", f"token {max(tokens)}", f"tokens of this model, 0 to {vocab_size - 1}"
        )
    window = min(calibration.window, len(tokens))
    count = len(tokens) // window
    chosen = np.unique(np.linspace(0, count - 1, min(count, calibration.samples)).astype(int))
    return [np.array(tokens[i * window : (i + 1) * window], np.int32) for i in chosen]


class _Worker:
    """Rounds and writes layer after layer.

    Attributes:
        modules: scheme of each quantised module so far.
        kept: linear modules that stay as they are.
    """

    def __init__(
        self,
        reader: SafetensorsReader,
        writer: FolderWriter,
        run: LayerRun,
        policy: Policy,
        group: int,
    ):
        self._reader, self._writer, self._run = reader, writer, run
        self._policy, self._group = policy, group
        # readers of AWQ and GPTQ take float16 alone, those of compressed-tensors the model's type
        packs_by_column = policy.schemes[0].method in ("awq", "gptq")
        self._scale_dtype = np.dtype(np.float16) if packs_by_column else jnp.dtype(run.config.dtype)
        self._config = run.config
        self.modules: dict[str, Scheme] = {}
        self.kept: list[str] = []

    def write_rest(self) -> None:
        """What is outside the layers: embeddings, last norm, head."""
        for place, variable in self._run.places(None):
            for name in self._names(place, variable):
                self._writer.add({name: self._reader.read(name)})

    def embedded(self, windows: Sequence[np.ndarray]) -> list[np.ndarray]:
        """What enters the first layer, float32[T, E] a window."""
        if not windows:
            return []
        at, variable = next(item for item in self._run.places(None) if item[0] == ("embedding",))
        (name,) = self._names(at, variable)
        table = self._reader.read(name)
        return [self._run.embed(table[tokens].astype(np.float32)) for tokens in windows]

    def layer(self, layer: int, states: list[np.ndarray]) -> list[np.ndarray]:
        """Quantise and write a layer; what leaves it as it has become."""
        places = self._run.places(layer)
        names = [name for place, variable in places for name in self._names(place, variable)]
        stored = {name: self._reader.read(name) for name in dict.fromkeys(names)}
        tensors = {name: value.astype(np.float32) for name, value in stored.items()}
        seen = self._activations(layer, tensors, states)
        changed = self._fold(layer, tensors, seen)
        written: dict[str, np.ndarray] = {}
        for place, variable in places:
            part, inside = str(place[2]), place[2:-1]
            own = self._names(place, variable)
            choice = (
                self._policy.of(layer, part) if part in self._policy.parts else LayerScheme(None)
            )
            is_linear = inside in PROJECTIONS.values() and place[-1] == "weight"
            if not is_linear or choice.scheme is None:
                if variable.get_metadata("fill") is None:
                    self.kept += [name.removesuffix(".weight") for name in own]
                for name in own:
                    written[name] = stored[name]
                    if name in changed:
                        written[name] = tensors[name].astype(stored[name].dtype)
                continue
            hook = next(name for name, at in PROJECTIONS.items() if at == inside)
            x = seen.get(hook)
            written |= self._rounded(choice, own, tensors, x, clips=hook != "qkv")
        self._writer.add(written)
        if not states:
            return []
        parameters = self._run.parameters(layer, tensors)
        return [self._run(layer, parameters, x)[0] for x in states]

    def _rounded(
        self,
        choice: LayerScheme,
        names: Sequence[str],
        tensors: dict[str, np.ndarray],
        x: np.ndarray | None,
        clips: bool,
    ) -> dict[str, np.ndarray]:
        """The stored tensors of one projection; `tensors` get the values that these stand for."""
        scheme = choice.scheme
        assert scheme is not None
        input_scale = None
        if scheme.activations == "tensor":
            assert x is not None
            input_scale = activation_scale(x, choice.calibration)
        second = hessian(x) if scheme.name == "int4-gptq" and x is not None else None
        found: dict[str, np.ndarray] = {}
        for name in names:
            if scheme.name == "int4-awq" and clips:
                assert x is not None
                tensors[name] = clipped(tensors[name], _few(x), self._group)
            rounded = self._round(scheme, tensors[name], second)
            tensors[name] = rounded.dequantized()
            module = name.removesuffix(".weight")
            self.modules[module] = scheme
            found |= stored_tensors(module, scheme, rounded, self._scale_dtype, input_scale)
        return found

    def _round(
        self, scheme: Scheme, weight: np.ndarray, second: np.ndarray | None
    ) -> RoundedMatrix:
        group = self._group if scheme.grouped else None
        if scheme.name == "int4-awq":
            return round_with_zeros(weight, group, self._scale_dtype)
        if second is not None:
            return gptq(weight, second, group, self._scale_dtype)
        if scheme.is_float:
            return round_fp8(weight, self._scale_dtype)
        return round_integers(weight, scheme.bits, group, self._scale_dtype)

    def _activations(
        self, layer: int, tensors: Mapping[str, np.ndarray], states: list[np.ndarray]
    ) -> dict[str, np.ndarray]:
        """float32[tokens, in] that enter each projection, of all windows."""
        if not states:
            return {}
        parameters = self._run.parameters(layer, tensors)
        parts: dict[str, list[np.ndarray]] = {}
        for x in states:
            for name, value in self._run(layer, parameters, x)[1].items():
                parts.setdefault(name, []).append(value)
        return {name: np.concatenate(values) for name, values in parts.items()}

    def _fold(
        self, layer: int, tensors: dict[str, np.ndarray], seen: dict[str, np.ndarray]
    ) -> set[str]:
        """AWQ's factors, into the weights and into what computes their inputs; `seen` follows.

        Returns the names of tensors that are not quantised and have changed.
        """
        prefix = f"model.layers.{layer}"
        attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
        changed: set[str] = set()

        def fold(hook: str, into: str, weights: list[str], rows: bool) -> None:
            x = _few(seen[hook])
            means = np.abs(seen[hook]).mean(axis=0)
            if hook == "output":
                means = self._by_value_head(means)
            factors = best_factors([tensors[w] for w in weights], x, self._group, means)
            if hook == "output":
                factors = self._by_value_head(factors)
            if not rows:
                factors = self._as_stored(f"{into}.weight", tensors, factors)
            for weight in weights:
                tensors[weight] = tensors[weight] * factors
            seen[hook] = seen[hook] / factors
            behind = self._of_values(factors) if hook == "output" else factors
            for name in (f"{into}.weight", f"{into}.bias"):
                if name in tensors and (rows or name.endswith("weight")):
                    by_row = behind[:, None] if tensors[name].ndim == 2 else behind
                    tensors[name] = tensors[name] / by_row
                    changed.add(name)

        if self._is_awq(layer, "attention"):
            qkv = [f"{attention}.{x}_proj.weight" for x in "qkv"]
            fold("qkv", f"{prefix}.input_layernorm", qkv, rows=False)
            fold("output", f"{attention}.v_proj", [f"{attention}.o_proj.weight"], rows=True)
        if self._is_awq(layer, "mlp"):
            halves = [f"{mlp}.{half}_proj.weight" for half in ("gate", "up")]
            fold("gate_up", f"{prefix}.post_attention_layernorm", halves, rows=False)
            fold("down", f"{mlp}.up_proj", [f"{mlp}.down_proj.weight"], rows=True)
        return changed

    def _as_stored(
        self, name: str, tensors: Mapping[str, np.ndarray], factors: np.ndarray
    ) -> np.ndarray:
        """The factors that a norm has taken once its quotients are rounded to its own type."""
        kept = self._reader.tensors[name].dtype
        quotients = (tensors[name] / factors).astype(kept).astype(np.float32)
        safe = np.where(quotients == 0, np.float32(1), quotients)
        return np.where(quotients == 0, factors, tensors[name] / safe)

    def _by_value_head(self, by_input: np.ndarray) -> np.ndarray:
        """Means over the query heads of each value head, [H * D] -> [H * D]."""
        config = self._config
        grouped = by_input.reshape(config.num_kv_heads, -1, config.head_dim)
        return np.broadcast_to(grouped.mean(axis=1, keepdims=True), grouped.shape).reshape(-1)

    def _of_values(self, by_input: np.ndarray) -> np.ndarray:
        """[H * D], alike in the heads of each group -> [KVH * D]."""
        config = self._config
        return by_input.reshape(config.num_kv_heads, -1, config.head_dim)[:, 0].reshape(-1)

    def _is_awq(self, layer: int, part: str) -> bool:
        scheme = self._policy.of(layer, part).scheme
        return scheme is not None and scheme.name == "int4-awq"

    def _names(self, place: Place, variable: Any) -> list[str]:
        """Of the tensors of a parameter."""
        source = self._run.source(place, self._config)
        is_matrix = variable.get_metadata("fill") is None
        return list(source.tensors(variable.get_value().shape, is_matrix))


def _few(x: np.ndarray) -> np.ndarray:
    """At most `FEW_ROWS` rows, spread over all."""
    return x[:: max(1, -(-len(x) // FEW_ROWS))]
