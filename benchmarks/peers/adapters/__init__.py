"""The worker's adapter of each engine: a module with `load`, and with `convert` where it reads
another file format than the checkpoint's.

A module imports its engine at its top, so that a missing engine is an ImportError of the module.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from benchmarks.peers.workload import Cell

# name of an engine -> (its module here, settings that `--settings` may override)
ENGINES: dict[str, tuple[str, dict[str, Any]]] = {
    "jaxserve": ("jaxserve_llm", {}),
    "jaxserve-int8": ("jaxserve_llm", {"quantization": "int8"}),
    "jaxserve-int4": ("jaxserve_llm", {"quantization": "int4"}),
    "jaxserve-q4_0": ("jaxserve_gguf", {"weights": "q4_0"}),
    "transformers": ("transformers_generate", {}),
    "transformers-continuous": ("transformers_continuous", {}),
    "vllm": ("vllm_llm", {}),
    "llama.cpp": ("llama_cpp_batch", {}),
    "llama.cpp-q8_0": ("llama_cpp_batch", {"weights": "q8_0"}),
    "llama.cpp-q4_0": ("llama_cpp_batch", {"weights": "q4_0"}),
    "openvino": ("openvino_batching", {}),
}


class Unavailable(Exception):
    """The engine is there but cannot run this job; the message says why."""


@dataclass(frozen=True)
class Job:
    """The model and settings that a worker loads.

    Attributes:
        model: folder in Hugging Face format.
        dtype: "bfloat16" or "float32", of weights and activations.
        slots: most requests in flight over all cells.
        step_tokens: tokens of one step at most, for an engine that has such a budget.
        threads: cores that the engine may use, and threads where it is told a number.
        max_model_len: longest request over all cells, prompt and output, in tokens.
        converted: folder for this model in the engines' own file formats.
        settings: passed on to the engine's own configuration.
    """

    model: Path
    dtype: str
    slots: int
    step_tokens: int
    threads: int
    max_model_len: int
    converted: Path
    settings: dict[str, Any]


@dataclass(frozen=True)
class Ran:
    """The results of a cell: the output tokens of each request, and the engine's own figures."""

    tokens: list[list[int]]
    figures: dict[str, float]


class Engine(Protocol):
    """A loaded engine."""

    versions: dict[str, str]

    def run(self, cell: Cell) -> Ran:
        """Serve the cell: all requests queued, at most `cell.in_flight` running.

        Greedy, end-of-sequence ignored, and nothing kept of earlier prompts.
        """

    def close(self) -> None: ...
