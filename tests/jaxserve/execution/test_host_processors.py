"""What a class of vLLM's is told of a batch that comes and goes."""

from __future__ import annotations

import numpy as np
import pytest

from jaxserve.errors import ValidationError
from jaxserve.execution.features import Facts
from jaxserve.execution.features.host_processors import Served, VllmBatch
from jaxserve.params.sampling_params import SamplingParams
from jaxserve.params.vllm_processor import BatchUpdate, LogitsProcessor
from tests.jaxserve.requests import make_request

pytestmark = pytest.mark.slow  # torch

FACTS = Facts(16, 1, max_num_seqs=8)


class Marking(LogitsProcessor):
    """Writes a request's own number into its row, as it follows the updates."""

    def __init__(self, vllm_config, device, is_pin_memory):
        assert vllm_config.model_config.get_vocab_size() == 16 and device.type == "cpu"
        self.rows: dict[int, int] = {}
        self.updates = 0

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        if batch_update is None:
            return
        self.updates += 1
        for index in batch_update.removed:
            del self.rows[index]
        for index, _, prompt, _ in batch_update.added:
            assert prompt is not None
            self.rows[index] = prompt[0]
        for one, other, _ in batch_update.moved:
            self.rows[other] = self.rows.pop(one)
        assert sorted(self.rows) == list(range(batch_update.batch_size))

    def apply(self, logits):
        assert len(logits) == len(self.rows)
        for index, number in self.rows.items():
            logits[index] += number
        return logits


def served(number: int) -> Served:
    return Served(make_request(f"r{number}", [number], SamplingParams()), (), [])


def test_each_row_is_its_requests_whoever_comes_and_goes() -> None:
    batch, rng = VllmBatch(Marking, FACTS), np.random.default_rng(0)
    every = [served(number) for number in range(1, 13)]
    for _ in range(60):
        now = rng.choice(len(every), size=rng.integers(0, 9), replace=False)
        places = rng.permutation(10)[: len(now)]
        rows = {int(place): every[one] for place, one in zip(places, now, strict=True)}
        logits = np.zeros((10, 16), np.float32)
        batch.run(rows, logits)
        wanted = np.zeros(10)
        for place, one in rows.items():
            wanted[place] = one.request.prompt_token_ids[0]
        np.testing.assert_array_equal(logits[:, 3], wanted)


def test_a_class_that_cannot_be_made_is_refused() -> None:
    class Broken(Marking):
        def __init__(self):
            pass

    with pytest.raises(ValidationError, match="Broken"):
        VllmBatch(Broken, FACTS)
