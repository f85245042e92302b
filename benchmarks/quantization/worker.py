"""One checkpoint in a process of its own: its bytes, its quality, its speed.

Prints one JSON line, the fields of `Measured`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.load_memory import peak_bytes
from benchmarks.quantization.schemes import held_out_text
from checkpoints.tiny.tasks import TASKS
from jaxserve import LLM
from jaxserve.bench.measure import environment, run_workload
from jaxserve.bench.workloads import fixed
from jaxserve.evaluation.perplexity import perplexity
from jaxserve.evaluation.tasks import HELD_OUT, evaluate_tasks
from jaxserve.models.store import named_leaves

WINDOW = 128  # of the perplexity
BATCHES = (1, 16)
PROGRAMS = 6  # the first ones: both that serve any step, and the sizes that are measured


@dataclass(frozen=True, slots=True)
class Job:
    """The measurements of one checkpoint.

    Attributes:
        folder: the checkpoint.
        tasks: questions of each held-out task; 0: no quality is measured.
        characters: of the held-out text; None: all.
        input_len: tokens of a prompt.
        output_len: tokens that each request generates.
        repeats: of which the median is taken; 0: no time is measured.
    """

    folder: str
    tasks: int
    characters: int | None
    input_len: int
    output_len: int
    repeats: int


@dataclass(frozen=True, slots=True)
class Measured:
    """The figures of one checkpoint.

    Attributes:
        stored_layer_bytes, stored_bytes: of the linear layers, and of all tensors, in the file.
        layer_bytes, weight_bytes: of the same as the engine keeps them.
        process_bytes: most memory of the process, with Python, XLA and the KV pool.
        perplexity, exact_match: None where no quality is measured.
        first_token_s: seconds from a batch's begin to its last first token, by size of the batch.
        tokens_per_s: that the batch decodes once each has its first, by size of the batch.
        environment: machine and versions of the measurement.
    """

    stored_layer_bytes: int
    stored_bytes: int
    layer_bytes: int
    weight_bytes: int
    process_bytes: int
    perplexity: float | None
    exact_match: float | None
    first_token_s: dict[str, float]
    tokens_per_s: dict[str, float]
    environment: dict[str, str]


def measure(job: Job) -> Measured:
    """Measure in this process, which should be new."""
    longest = max(2 * WINDOW, job.input_len + job.output_len)
    llm = LLM(
        job.folder,
        max_model_len=longest,
        max_num_seqs=max(BATCHES),
        compile_in_background=False,
        max_num_batched_tokens=512,
        compile_ahead=PROGRAMS if job.repeats else None,
        skip_tokenizer_init=not job.tasks,
        enable_prefix_caching=False,
    )
    try:
        kept = {name: leaf.nbytes for name, leaf in leaves(llm).items()}
        found = accuracy = None
        if job.tasks:
            text = held_out_text(job.characters)
            found = perplexity(llm, text, WINDOW, WINDOW // 2).perplexity
            names = [name for name in HELD_OUT if not TASKS[name].with_tools]
            accuracy = evaluate_tasks(llm, job.tasks, names).exact_match
        speeds = {str(batch): speed(llm, batch, job) for batch in BATCHES if job.repeats}
        stored = stored_bytes(Path(job.folder))
        return Measured(
            stored_layer_bytes=of_layers(stored.items()),
            stored_bytes=sum(stored.values()),
            layer_bytes=of_layers(kept.items()),
            weight_bytes=sum(kept.values()),
            process_bytes=peak_bytes(),
            perplexity=found,
            exact_match=accuracy,
            first_token_s={batch: first for batch, (first, _) in speeds.items()},
            tokens_per_s={batch: rate for batch, (_, rate) in speeds.items()},
            environment=environment(),
        )
    finally:
        llm.close()


def leaves(llm: LLM) -> dict[str, Any]:
    """The arrays of the engine's model, by name."""
    return named_leaves(llm.client.engine.runner.model())


def of_layers(sizes: Iterable[tuple[str, int]]) -> int:
    """Bytes of the linear layers, by the names of tensors or of the engine's arrays."""
    parts = (".self_attn.", ".mlp.", ".attention.")
    return sum(size for name, size in sizes if any(part in name for part in parts))


def speed(llm: LLM, batch: int, job: Job) -> tuple[float, float]:
    """Seconds to the last first token of a batch, and tokens a second that it decodes."""
    vocabulary = llm.model_config.vocab_size

    def seconds(output_len: int) -> float:
        items = fixed(batch, job.input_len, output_len, vocabulary, 0)
        return median(run_workload(llm, items).elapsed_time for _ in range(job.repeats))

    seconds(2)  # nothing is done for the first time
    first, whole = seconds(1), seconds(job.output_len)
    return first, batch * (job.output_len - 1) / (whole - first)


def stored_bytes(folder: Path) -> dict[str, int]:
    """Bytes of each tensor of the folder's safetensors, by their headers."""
    found: dict[str, int] = {}
    for file in folder.glob("*.safetensors"):
        with open(file, "rb") as opened:
            header = json.loads(opened.read(int.from_bytes(opened.read(8), "little")))
        header.pop("__metadata__", None)
        for name, entry in header.items():
            begin, end = entry["data_offsets"]
            found[name] = end - begin
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("job", help="JSON, the fields of `Job`")
    print(json.dumps(asdict(measure(Job(**json.loads(parser.parse_args().job))))))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
