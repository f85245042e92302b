"""transformers (torch, float32) as the oracle of greedy continuations and log-probabilities."""

from __future__ import annotations

import random
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM


def load(folder: Path | str) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def greedy(model: torch.nn.Module, prompt: list[int], count: int) -> list[int]:
    """`count` most likely tokens after `prompt`, end-of-sequence ignored."""
    with torch.no_grad():
        out = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=count,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
    return out[0, len(prompt) :].tolist()


def logprobs(model: torch.nn.Module, tokens: list[int]) -> torch.Tensor:
    """Log-probabilities [len(tokens), V] of the token after each position."""
    with torch.no_grad():
        return torch.log_softmax(model(torch.tensor([tokens])).logits[0].double(), dim=-1)


def prompts(count: int, vocab_size: int, longest: int, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [
        [rng.randrange(3, vocab_size) for _ in range(rng.randint(1, longest))] for _ in range(count)
    ]
