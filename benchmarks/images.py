#!/usr/bin/env python3
"""Time to the first token of prompts with images, and image tokens a second, beside transformers.

    python -m benchmarks.images
    python -m benchmarks.images --model clip-b16 --side 336 --repeats 3

An image counts from PIL's on: the image processor, the encoder and the prompt's steps are in each
figure. Each engine has a process of its own and the same number of cores, and they take turns. None
keeps anything of an image: prefix cache and encoder cache are off, and all images differ.

`clip-b16` is a LLaVA of random numbers: CLIP's ViT-B/16 and a Llama of 98 million parameters.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.extras import require
from benchmarks.peers.cores import use_cores

BUNDLED, RANDOM = "bundled-picture", "clip-b16"
TEXT = 16  # tokens of a prompt beside its images
COMPARED = 8  # tokens of an answer that are compared
WIDTH, HEIGHT = 640, 480  # of images as they come

Prompt = tuple[list[int], list[Any]]  # token ids, one for each image, and PIL's images


@dataclass(frozen=True)
class Job:
    """What both engines are given.

    Attributes:
        folder: of the model.
        dtype: of its weights.
        cores: that an engine has.
        most_images, most_prompts: of a prompt, and at once.
        context: tokens of the longest prompt with its answer.
        token, places: an image's token, and how many places it takes.
    """

    folder: str
    dtype: str
    cores: int
    most_images: int
    most_prompts: int
    context: int
    token: int
    places: int


class Ours:
    """jaxserve, in this process."""

    def __init__(self, job: Job):
        from jaxserve import LLM

        self._llm = LLM(
            model=job.folder,
            dtype=job.dtype,
            skip_tokenizer_init=True,
            max_model_len=job.context,
            max_num_seqs=job.most_prompts,
            limit_mm_per_prompt={"image": job.most_images},
            enable_prefix_caching=False,
            encoder_cache_bytes=0,
        )

    def run(self, prompts: Sequence[Prompt], count: int) -> list[list[int]]:
        """Greedy tokens of prompts that come at once."""
        from jaxserve import SamplingParams

        given = [
            {"prompt_token_ids": tokens, "multi_modal_data": {"image": images}}
            for tokens, images in prompts
        ]
        params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
        outputs = self._llm.generate(given, params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]


class Theirs:
    """transformers' `generate` of one batch, whose prompts are of one length."""

    def __init__(self, job: Job):
        import torch
        from transformers import AutoModelForImageTextToText

        from jaxserve.client.images import image_processor

        torch.set_num_threads(job.cores)
        load = AutoModelForImageTextToText.from_pretrained
        self._model = load(job.folder, dtype=getattr(torch, job.dtype)).eval()
        self._processor = image_processor(job.folder)
        self._job = job

    def run(self, prompts: Sequence[Prompt], count: int) -> list[list[int]]:
        """As `Ours.run`."""
        import torch

        made = self._processor(
            images=[one for _, images in prompts for one in images], return_tensors="np"
        )
        pixels = torch.tensor(np.asarray(made["pixel_values"])).to(self._model.dtype)
        rows = [
            [
                one
                for token in tokens
                for one in [token] * (self._job.places if token == self._job.token else 1)
            ]
            for tokens, _ in prompts
        ]
        ids = torch.tensor(rows)
        with torch.inference_mode():
            out = self._model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                pixel_values=pixels,
                max_new_tokens=count,
                min_new_tokens=count,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
            )
        found: list[list[int]] = out[:, ids.shape[1] :].tolist()
        return found


ENGINES = {"jaxserve": Ours, "transformers": Theirs}


def work(connection: Connection, engine: str, job: Job) -> None:
    """One engine's process: prompts and a count in, seconds and tokens out, until None comes."""
    use_cores(job.cores)
    running = ENGINES[engine](job)
    connection.send("ready")
    for prompts, count in iter(connection.recv, None):
        begin = time.perf_counter()
        tokens = running.run(prompts, count)
        connection.send((time.perf_counter() - begin, tokens))


def make_prompts(job: Job, count: int, images: int, seed: int) -> list[Prompt]:
    """Prompts of random tokens behind images of random colours, of which no two are equal."""
    from PIL import Image

    rng, made = np.random.default_rng(seed), list[Prompt]()
    for _ in range(count):
        small = rng.integers(0, 256, (images, 6, 8, 3), dtype=np.uint8)
        pictures = [Image.fromarray(one).resize((WIDTH, HEIGHT)) for one in small]
        text = rng.integers(3, job.token, TEXT).tolist()
        made.append(([job.token] * images + text, pictures))
    return made


def save_random(folder: Path, side: int) -> None:
    """Write a LLaVA with CLIP's ViT-B/16 at a side in pixels, and its image processor."""
    import torch
    from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig
    from transformers import LlavaForConditionalGeneration as Llava
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    size = {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12}
    tower = CLIPVisionConfig(intermediate_size=3072, image_size=side, patch_size=16, **size)
    text = LlamaConfig(
        vocab_size=8192,
        intermediate_size=2048,
        num_key_value_heads=4,
        max_position_embeddings=8192,
        **size,
    )
    torch.manual_seed(0)
    config = LlavaConfig(vision_config=tower, text_config=text, image_token_index=8191)
    Llava(config).save_pretrained(folder)
    square = {"height": side, "width": side}
    CLIPImageProcessorPil(size={"shortest_edge": side}, crop_size=square).save_pretrained(folder)


def measure(job: Job, options: argparse.Namespace) -> None:
    """Print the table."""
    context = multiprocessing.get_context("spawn")
    engines, processes = {}, []
    for name in ENGINES:
        here, there = context.Pipe()
        processes.append(context.Process(target=work, args=(there, name, job), daemon=True))
        processes[-1].start()
        engines[name] = here
    for one in engines.values():
        assert one.recv() == "ready"

    def ask(engine: str, prompts: list[Prompt], count: int) -> tuple[float, list[list[int]]]:
        engines[engine].send((prompts, count))
        found: tuple[float, list[list[int]]] = engines[engine].recv()
        return found

    columns = ("images", "engine", "TTFT, ms", "least", "image tokens/s", f"of {options.requests}")
    print("| " + " | ".join(columns) + " |\n|" + "---|" * len(columns))
    for images in options.images:
        compared = make_prompts(job, options.requests, images, 0)
        answers = [ask(name, compared, COMPARED)[1] for name in ENGINES]
        seconds: dict[tuple[str, int], list[float]] = {}
        for repeat in range(options.repeats + 1):
            for count in (1, options.requests):
                prompts = make_prompts(job, count, images, 1 + repeat)
                for name in ENGINES:
                    spent = ask(name, prompts, 1)[0]
                    if repeat:  # the first compiles
                        seconds.setdefault((name, count), []).append(spent)
        for name in ENGINES:
            alone, together = seconds[name, 1], seconds[name, options.requests]
            places = images * job.places
            cells = [
                f"{1e3 * statistics.median(alone):.0f}",
                f"{1e3 * min(alone):.0f}",
                f"{places / statistics.median(alone):.0f}",
                f"{options.requests * places / statistics.median(together):.0f}",
            ]
            print(f"| {images} | {name} | {' | '.join(cells)} |", flush=True)
        same = sum(one == other for one, other in zip(*answers, strict=True))
        print(f"<!-- {same} of {len(compared)} answers of {COMPARED} tokens are the same -->")
    for one in engines.values():
        one.send(None)
    for process in processes:
        process.join()


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=BUNDLED, help=f"{BUNDLED}, {RANDOM} or a LLaVA's folder")
    parser.add_argument("--side", type=int, default=224, help=f"of images of {RANDOM}, in pixels")
    parser.add_argument("--images", type=int, nargs="+", default=[1, 4], help="of a prompt")
    parser.add_argument("--requests", type=int, default=4, help="prompts at once")
    parser.add_argument("--repeats", type=int, default=5, help="of which the median counts")
    parser.add_argument("--cores", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    options = parser.parse_args(arguments)
    require(parser, "train,images", "torch", "PIL")
    from checkpoints import bundled_picture_model_path
    from jaxserve.bench.measure import describe, environment
    from jaxserve.models.config_reader import read_model_config

    use_cores(options.cores)
    print(f"{describe(environment())}, {options.cores} cores, {options.dtype}")
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(options.model)
        if options.model == BUNDLED:
            folder = bundled_picture_model_path()
        elif options.model == RANDOM:
            folder = Path(scratch)
            save_random(folder, options.side)
        facts = read_model_config(folder).images
        if facts is None or facts.free_axes or facts.sees_whole:
            parser.exit(1, f"{parser.prog}: error: {folder} is no LLaVA 1.5\n")
        most = max(options.images)
        places = facts.places(facts.shape)
        longest = most * places + TEXT + COMPARED
        rest = longest, facts.token_id, places
        job = Job(str(folder), options.dtype, options.cores, most, options.requests, *rest)
        named = f"{options.model} at {facts.shape[-1]} pixels"
        print(f"{named}: {places} places an image, {TEXT} tokens of text\n", flush=True)
        measure(job, options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
