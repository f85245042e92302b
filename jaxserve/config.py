"""Engine configuration: every knob in one frozen dataclass, validated once at the edge."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from jaxserve.errors import ValidationError

DTYPES = ("auto", "float32", "float16", "bfloat16", "float", "half")
QUANTIZATIONS = ("int8",)
PRESETS = ("chat", "bulk", "ab")
LOAD_FORMATS = ("auto", "safetensors", "dummy")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """What the engine is told by its user. `None` means: choose from the model and the device.

    Attributes:
        model: folder with a Hugging Face `config.json`, safetensors and tokenizer files.
        tokenizer: folder of the tokenizer, `model` when None.
        skip_tokenizer_init: load no tokenizer; prompts must be token ids and outputs have no text.
        dtype: type of weights and activations; "auto" takes the checkpoint's.
        load_format: "auto"/"safetensors" read the checkpoint, "dummy" makes random weights.
        seed: seed of dummy weights and of requests that bring none.
        max_model_len: longest prompt plus output, in tokens; the model's own limit when None.
        max_num_seqs: number of slots, the most requests that run at once.
        max_num_batched_tokens: token budget of one step.
        prefill_chunk: most prompt tokens of one step; the whole budget when None.
        block_size: tokens a KV page.
        num_pages: KV pages, trash page included; computed from memory when None.
        gpu_memory_utilization: share of device memory for weights, temporaries and KV pages.
        tensor_parallel_size: devices that the model is sharded over.
        max_logprobs: most logprobs a request may ask for; -1 lifts the limit to the vocabulary.
        overlap: dispatch step N+1 before step N's tokens are seen; False is the oracle.
        served_model_name: names the server answers to; the model path when empty.
        decode_backend, prefill_backend, linear_backend: kernels of attention and of the linear
            layers; None chooses from the device kind.
        quantization: "int8" keeps the weights of the linear layers as 8-bit integers with a scale
            an output, and rounds each token's activations to 8-bit integers at every step; None
            keeps `dtype`.
        compile_ahead: programs that are compiled before the engine is ready, chosen by the device
            kind when None: all on a GPU, which drops its recorded CUDA graphs when it compiles.
        compile_in_background: whether the rest is compiled at all, while a larger one serves;
            None: unless the device is a GPU.
        kv_cache_memory_bytes: size of the KV pool; takes the place of `gpu_memory_utilization`.
        compilation_cache: where compiled programs are kept for the next start: "auto" (the user's
            cache folder), "off" or a folder.
        preset: what sizes that are left open are chosen for: "chat" puts latency first, "bulk"
            throughput, "ab" neither.
    """

    model: str
    tokenizer: str | None = None
    skip_tokenizer_init: bool = False
    dtype: str = "auto"
    load_format: str = "auto"
    seed: int = 0
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    prefill_chunk: int | None = None
    block_size: int | None = None
    num_pages: int | None = None
    gpu_memory_utilization: float = 0.9
    tensor_parallel_size: int = 1
    max_logprobs: int = 20
    overlap: bool = True
    served_model_name: tuple[str, ...] = ()
    decode_backend: str | None = None
    prefill_backend: str | None = None
    linear_backend: str | None = None
    quantization: str | None = None
    compile_ahead: int | None = None
    compile_in_background: bool | None = None
    kv_cache_memory_bytes: int | None = None
    compilation_cache: str = "auto"
    preset: str = "ab"

    def __post_init__(self) -> None:
        _one_of("dtype", self.dtype, DTYPES)
        _one_of("load_format", self.load_format, LOAD_FORMATS)
        if self.quantization is not None:
            _one_of("quantization", self.quantization, QUANTIZATIONS)
        _one_of("preset", self.preset, PRESETS)
        for name in ("max_model_len", "max_num_seqs", "max_num_batched_tokens", "block_size"):
            _at_least(name, getattr(self, name), 1)
        _at_least("prefill_chunk", self.prefill_chunk, 1)
        _at_least("num_pages", self.num_pages, 2)
        _at_least("tensor_parallel_size", self.tensor_parallel_size, 1)
        _at_least("max_logprobs", self.max_logprobs, -1)
        _at_least("compile_ahead", self.compile_ahead, 1)
        _at_least("kv_cache_memory_bytes", self.kv_cache_memory_bytes, 1)
        if self.block_size is not None and self.block_size & (self.block_size - 1):
            raise ValidationError("block_size", self.block_size, "a power of two")
        share = self.gpu_memory_utilization
        if isinstance(share, bool) or not isinstance(share, int | float) or not 0.0 < share <= 1.0:
            raise ValidationError("gpu_memory_utilization", share, "a number in (0, 1]")
        if isinstance(self.seed, bool) or not isinstance(self.seed, int):
            raise ValidationError("seed", self.seed, "an integer")
        for name in ("skip_tokenizer_init", "overlap"):
            if not isinstance(getattr(self, name), bool):
                raise ValidationError(name, getattr(self, name), "true or false")
        if not isinstance(self.compile_in_background, bool | None):
            raise ValidationError(
                "compile_in_background", self.compile_in_background, "true, false or none"
            )

    @classmethod
    def from_settings(cls, **settings: Any) -> EngineConfig:
        """A config from keyword arguments of a user.

        Raises:
            ValidationError: an unknown name, besides what the constructor raises.
        """
        known = [field.name for field in fields(cls)]
        for name, value in settings.items():
            if name not in known:
                raise ValidationError(name, value, f"one of the settings {', '.join(known)}")
        names = settings.get("served_model_name")
        if isinstance(names, str):
            settings["served_model_name"] = (names,)
        elif names is not None:
            settings["served_model_name"] = tuple(names)
        return cls(**settings)


def _one_of(field: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValidationError(field, value, f"one of {', '.join(allowed)}")


def _at_least(field: str, value: int | None, least: int) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValidationError(field, value, f"an integer >= {least}")
