"""transformers' `generate` on random weights, static batches, on the device that torch has."""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch
import transformers

WARM_UP = 1
REPEATS = 2


def random_model(settings: dict[str, Any], device: str) -> Any:
    """A bfloat16 model of a Hugging Face config with small random weights, made on the device."""
    config = transformers.AutoConfig.for_model(**settings)
    # initialising element by element on the host would take minutes
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model = model.to_empty(device=device).eval()
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.02)
    # what to_empty left undefined besides the parameters: the angles of the rotary embedding
    rotary = model.model.rotary_emb
    model.model.rotary_emb = type(rotary)(config).to(device)
    return model


def generate(request: dict[str, Any]) -> dict[str, Any]:
    """Output tokens a second for each batch size of the request.

    Args:
        request: `settings` (Hugging Face config with model_type), `batches`, `input_len`,
            `output_len`, `seconds`: no batch is begun later.
    """
    deadline = time.monotonic() + request["seconds"]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = random_model(request["settings"], device)
    found: dict[str, float | None] = {}
    for batch in request["batches"]:
        if time.monotonic() > deadline:
            found[str(batch)] = None
            continue
        vocab = model.config.vocab_size
        prompt = torch.randint(3, vocab, (batch, request["input_len"]), device=device)
        samples = []
        for repeat in range(WARM_UP + REPEATS):
            if device == "cuda":
                torch.cuda.synchronize()
            begin = time.perf_counter()
            with torch.inference_mode():
                out = model.generate(
                    prompt,
                    attention_mask=torch.ones_like(prompt),
                    max_new_tokens=request["output_len"],
                    min_new_tokens=request["output_len"],
                    do_sample=False,
                    eos_token_id=None,
                    pad_token_id=0,
                )
            if out.shape[1] != request["input_len"] + request["output_len"]:
                raise RuntimeError(f"generate gave {out.shape[1]} tokens in all")
            out.cpu()
            if repeat >= WARM_UP:
                samples.append(time.perf_counter() - begin)
        found[str(batch)] = batch * request["output_len"] / statistics.median(samples)
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
    return {"tok_s": found, "versions": versions, "attention": model.config._attn_implementation}
