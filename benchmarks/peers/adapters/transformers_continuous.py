"""transformers' continuous batching: paged attention and a scheduler of its own."""

from __future__ import annotations

import transformers
from transformers import ContinuousBatchingConfig, GenerationConfig

from benchmarks.peers.adapters import Job, Ran
from benchmarks.peers.adapters.feeding import feed
from benchmarks.peers.adapters.transformers_generate import load_model, versions
from benchmarks.peers.workload import Cell

PAGE_SIZE = 32


class ContinuousBatches:
    """The manager's thread runs the model; this one queues requests and collects results."""

    def __init__(self, model: transformers.PreTrainedModel, job: Job):
        self.versions = versions()
        pages = job.slots * -(-job.max_model_len // PAGE_SIZE)
        self._manager = model.init_continuous_batching(
            generation_config=GenerationConfig(
                do_sample=False, eos_token_id=-1, pad_token_id=0, max_new_tokens=job.max_model_len
            ),
            continuous_batching_config=ContinuousBatchingConfig(
                page_size=PAGE_SIZE,
                num_blocks=pages,
                max_batch_tokens=max(job.step_tokens, job.slots),
                max_requests_per_batch=job.slots,
                allow_block_sharing=False,
            ),
        )
        self._manager.start()
        self._number = 0

    def run(self, cell: Cell) -> Ran:
        tokens: list[list[int]] = [[] for _ in cell.prompts]
        first, self._number = self._number, self._number + len(tokens)

        def add(index: int) -> None:
            name = self._manager.add_request(
                cell.prompts[index],
                request_id=str(first + index),
                max_new_tokens=cell.output_lens[index],
                eos_token_id=-1,
            )
            if name is None:
                raise RuntimeError("the manager takes no more requests")

        def step() -> int:
            result = self._manager.get_result(timeout=1.0)
            if result is None:
                if not self._manager.is_running():
                    raise RuntimeError("the manager's thread has ended")
                return 0
            if result.error:
                raise RuntimeError(result.error)
            tokens[int(result.request_id) - first] = list(result.generated_tokens)
            return 1

        feed(len(tokens), cell.in_flight, add, step)
        return Ran(tokens, {})

    def close(self) -> None:
        self._manager.stop(block=True, timeout=30.0)


def load(job: Job) -> ContinuousBatches:
    return ContinuousBatches(load_model(job), job)
