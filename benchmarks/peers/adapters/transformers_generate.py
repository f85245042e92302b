"""transformers' `generate`: static batches in arrival order, left-padded, each until its longest
request ends."""

from __future__ import annotations

import torch
import transformers

from benchmarks.peers.adapters import Job, Ran
from benchmarks.peers.workload import Cell


def load_model(job: Job) -> transformers.PreTrainedModel:
    """The model on the GPU where torch sees one, else on the CPU."""
    torch.set_num_threads(job.threads)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    settings = dict(job.settings)
    if settings.pop("load_format", "auto") == "dummy":
        return random_model(job, device)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        str(job.model), dtype=getattr(torch, job.dtype), **settings
    )
    return model.to(device).eval()


def random_model(job: Job, device: str) -> transformers.PreTrainedModel:
    """A model of the folder's config with small random weights, made on the device."""
    config = transformers.AutoConfig.from_pretrained(str(job.model))
    # initialising element by element on the host would take minutes
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(
            config, dtype=getattr(torch, job.dtype)
        )
    model = model.to_empty(device=device).eval()
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.02)
    # what to_empty left undefined besides the parameters: the angles of the rotary embedding
    rotary = model.model.rotary_emb
    model.model.rotary_emb = type(rotary)(config).to(device)
    return model


def versions() -> dict[str, str]:
    return {
        "transformers": transformers.__version__,
        "torch": torch.__version__,
        "threads": str(torch.get_num_threads()),
    }


class StaticBatches:
    """One `generate` call for each `in_flight` requests."""

    def __init__(self, model: transformers.PreTrainedModel):
        self.versions = versions()
        self._model = model

    def run(self, cell: Cell) -> Ran:
        tokens: list[list[int]] = []
        for first in range(0, len(cell.prompts), cell.in_flight):
            batch = slice(first, first + cell.in_flight)
            tokens += self._batch(cell.prompts[batch], cell.output_lens[batch])
        if self._model.device.type != "cuda":
            return Ran(tokens, {})
        return Ran(tokens, {"device_peak_mib": torch.cuda.max_memory_reserved() / 2**20})

    def _batch(self, prompts: list[list[int]], output_lens: list[int]) -> list[list[int]]:
        longest, count = max(map(len, prompts)), max(output_lens)
        padding = [longest - len(prompt) for prompt in prompts]
        ids = [[0] * pad + prompt for pad, prompt in zip(padding, prompts)]
        mask = [[0] * pad + [1] * (longest - pad) for pad in padding]
        device = self._model.device
        with torch.inference_mode():
            out = self._model.generate(
                torch.tensor(ids, device=device),
                attention_mask=torch.tensor(mask, device=device),
                max_new_tokens=count,
                min_new_tokens=count,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
            )
        rows = out[:, longest:].tolist()
        return [row[:asked] for row, asked in zip(rows, output_lens)]

    def close(self) -> None:
        del self._model


def load(job: Job) -> StaticBatches:
    return StaticBatches(load_model(job))
