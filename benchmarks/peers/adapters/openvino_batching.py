"""OpenVINO GenAI's continuous batching pipeline, on a model exported by optimum-intel."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import openvino
import openvino_genai

from benchmarks.peers.adapters import Job, Ran
from benchmarks.peers.adapters.converting import convert_once
from benchmarks.peers.adapters.feeding import feed
from benchmarks.peers.workload import Cell

# 16-bit files hold float16; the arithmetic is what INFERENCE_PRECISION_HINT says
WEIGHT_FORMATS = {"bfloat16": "fp16", "float32": "fp32"}
PRECISIONS = {"bfloat16": "bf16", "float32": "f32"}


def folder(job: Job) -> Path:
    return job.converted / f"openvino-{WEIGHT_FORMATS[job.dtype]}"


def convert(job: Job) -> None:
    command = [sys.executable, "-m", "optimum.commands.optimum_cli", "export", "openvino"]
    command += ["--model", str(job.model), "--task", "text-generation-with-past"]
    convert_once(folder(job), [*command, "--weight-format", WEIGHT_FORMATS[job.dtype]])


class OpenVino:
    """The pipeline, stepped by hand."""

    def __init__(self, pipeline: openvino_genai.ContinuousBatchingPipeline):
        self.versions = {
            "openvino-genai": openvino_genai.__version__,
            "openvino": openvino.get_version(),
        }
        self._pipeline = pipeline
        self._number = 0

    def run(self, cell: Cell) -> Ran:
        pipeline = self._pipeline
        tokens: list[list[int]] = [[] for _ in cell.prompts]
        running: dict[int, openvino_genai.GenerationHandle] = {}

        def add(index: int) -> None:
            config = openvino_genai.GenerationConfig(
                max_new_tokens=cell.output_lens[index], ignore_eos=True, do_sample=False
            )
            prompt = openvino.Tensor(np.array([cell.prompts[index]], dtype=np.int64))
            running[index] = pipeline.add_request(self._number, prompt, config)
            self._number += 1

        def step() -> int:
            pipeline.step()
            states = {index: handle.get_status() for index, handle in running.items()}
            live = openvino_genai.GenerationStatus.RUNNING
            ended = [index for index, state in states.items() if state != live]
            for index in ended:
                if states[index] != openvino_genai.GenerationStatus.FINISHED:
                    raise RuntimeError(f"request {index} ended as {states[index]}")
                tokens[index] = list(running.pop(index).read_all()[0].generated_ids)
            return len(ended)

        feed(len(tokens), cell.in_flight, add, step)
        return Ran(tokens, {})

    def close(self) -> None:
        del self._pipeline


def load(job: Job) -> OpenVino:
    """Settings in capitals are the plugin's, the others those of `SchedulerConfig`."""
    scheduler = openvino_genai.SchedulerConfig()
    settings: dict[str, Any] = {
        "DEVICE": "CPU",
        "INFERENCE_PRECISION_HINT": PRECISIONS[job.dtype],
        "KV_CACHE_PRECISION": PRECISIONS[job.dtype],  # the plugin's own choice is 8 bits
        "max_num_seqs": job.slots,
        "max_num_batched_tokens": max(job.step_tokens, job.slots),
        "enable_prefix_caching": False,
    } | job.settings
    device = settings.pop("DEVICE")
    if device == "CPU":
        settings.setdefault("INFERENCE_NUM_THREADS", job.threads)
    properties = {}
    for name, value in settings.items():
        if name.isupper():
            properties[name] = value
        else:
            setattr(scheduler, name, value)
    return OpenVino(
        openvino_genai.ContinuousBatchingPipeline(str(folder(job)), scheduler, device, properties)
    )
