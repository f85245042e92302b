"""llama.cpp through llama-cpp-python's low-level functions: one batch of all sequences a step."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np

from benchmarks.peers.adapters import Job, Ran
from benchmarks.peers.adapters.converting import convert_once
from benchmarks.peers.adapters.feeding import feed
from benchmarks.peers.workload import Cell

WEIGHTS = {"bfloat16": "bf16", "float32": "f32"}
# ggml_type of the KV cache: F16, the library's own choice of 16 bits, and F32
KV_TYPES = {"bfloat16": 1, "float32": 0}


def weights(job: Job) -> str:
    return job.settings.get("weights", WEIGHTS[job.dtype])


def file(job: Job) -> Path:
    return job.converted / f"{weights(job)}.gguf"


def convert(job: Job) -> None:
    command = [sys.executable, "-m", "benchmarks.peers.adapters.gguf_file"]
    convert_once(file(job), [*command, "--model", str(job.model), "--weights", weights(job)])


@dataclass
class Sequence:
    """One request on its way: `prompt[done:]` is not in the KV cache yet."""

    index: int
    prompt: list[int]
    count: int
    tokens: list[int]
    done: int = 0


class LlamaCpp:
    """Slots of one context, filled as llama.cpp's server does: running sequences first, then as
    much of the waiting prompts as a batch holds."""

    def __init__(self, model: Any, context: Any, job: Job, step_tokens: int):
        self.versions = {"llama-cpp-python": llama_cpp.__version__, "weights": weights(job)}
        self._step_tokens = step_tokens
        self._model, self._context = model, context
        self._vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
        self._batch = llama_cpp.llama_batch_init(step_tokens, 0, 1)
        self._free = list(range(job.slots))
        self._running: dict[int, Sequence] = {}

    def run(self, cell: Cell) -> Ran:
        results: list[list[int]] = [[] for _ in cell.prompts]

        def add(index: int) -> None:
            sequence = Sequence(index, cell.prompts[index], cell.output_lens[index], [])
            self._running[self._free.pop()] = sequence

        def step() -> int:
            self._decode(self._fill())
            ended = [s for s, seq in self._running.items() if len(seq.tokens) == seq.count]
            for slot in ended:
                sequence = self._running.pop(slot)
                results[sequence.index] = sequence.tokens
                memory = llama_cpp.llama_get_memory(self._context)
                llama_cpp.llama_memory_seq_rm(memory, slot, -1, -1)
                self._free.append(slot)
            return len(ended)

        feed(len(results), cell.in_flight, add, step)
        return Ran(results, {})

    def _fill(self) -> list[Sequence]:
        """Fill the batch; returns the sequences that get a token, in the order of their logits."""
        self._batch.n_tokens = 0
        sampled = []
        for slot, sequence in self._running.items():
            if sequence.tokens:
                position = len(sequence.prompt) + len(sequence.tokens) - 1
                self._put(sequence.tokens[-1], position, slot, True)
                sampled.append(sequence)
        for slot, sequence in self._running.items():
            room = self._step_tokens - self._batch.n_tokens
            chunk = sequence.prompt[sequence.done : sequence.done + room]
            last = len(sequence.prompt) - 1
            for position, token in enumerate(chunk, start=sequence.done):
                self._put(token, position, slot, position == last)
            sequence.done += len(chunk)
            if chunk and sequence.done == len(sequence.prompt):
                sampled.append(sequence)
        return sampled

    def _put(self, token: int, position: int, slot: int, logits: bool) -> None:
        batch, number = self._batch, self._batch.n_tokens
        batch.token[number] = token
        batch.pos[number] = position
        batch.n_seq_id[number] = 1
        batch.seq_id[number][0] = slot
        batch.logits[number] = logits
        batch.n_tokens = number + 1

    def _decode(self, sampled: list[Sequence]) -> None:
        status = llama_cpp.llama_decode(self._context, self._batch)
        if status:
            raise RuntimeError(f"llama_decode returned {status}")
        if sampled:
            pointer = llama_cpp.llama_get_logits(self._context)
            logits = np.ctypeslib.as_array(pointer, (len(sampled), self._vocab_size))
            for sequence, token in zip(sampled, logits.argmax(axis=1).tolist()):
                sequence.tokens.append(token)

    def close(self) -> None:
        llama_cpp.llama_batch_free(self._batch)
        llama_cpp.llama_free(self._context)
        llama_cpp.llama_model_free(self._model)


def load(job: Job) -> LlamaCpp:
    """Settings besides `weights` are fields of `llama_context_params`."""
    llama_cpp.llama_backend_init()
    path = str(file(job)).encode()
    model = llama_cpp.llama_model_load_from_file(path, llama_cpp.llama_model_default_params())
    if not model:
        raise RuntimeError(f"llama.cpp does not load {file(job).name}")
    params = llama_cpp.llama_context_default_params()
    settings: dict[str, Any] = {
        "n_ctx": job.slots * job.max_model_len,
        "n_seq_max": job.slots,
        "n_batch": max(job.step_tokens, job.slots),
        "n_ubatch": max(job.step_tokens, job.slots),
        "n_threads": job.threads,
        "n_threads_batch": job.threads,
        "type_k": KV_TYPES[job.dtype],
        "type_v": KV_TYPES[job.dtype],
    }
    settings |= {key: value for key, value in job.settings.items() if key != "weights"}
    for name, value in settings.items():
        setattr(params, name, value)
    context = llama_cpp.llama_init_from_model(model, params)
    if not context:
        raise RuntimeError("llama.cpp makes no context of these settings")
    return LlamaCpp(model, context, job, settings["n_batch"])
