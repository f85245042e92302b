"""A Llama decode step in torch: its fastest plain operations under ONE CUDA graph.

Keys and values are contiguous and all rows are equally long, so it has no pages to follow and
nothing to schedule: what a step costs where the framework costs nothing.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.kernel_bench.torch_peer import CUDA, DEVICE, captured, series_seconds

REPLAYS, SAMPLES = 16, 5
EPSILON = 1e-5


def random_weights(settings: dict[str, Any]) -> dict[str, list[torch.Tensor]]:
    """The matrices of each kind, one a layer; small random numbers."""
    hidden, inner = settings["hidden_size"], settings["intermediate_size"]
    size = hidden // settings["num_attention_heads"]
    qkv = (settings["num_attention_heads"] + 2 * settings["num_key_value_heads"]) * size
    layers, vocab = settings["num_hidden_layers"], settings["vocab_size"]
    shapes = {"qkv": (qkv, hidden), "o": (hidden, hidden), "gate_up": (2 * inner, hidden)}
    shapes |= {"down": (hidden, inner), "norm": (hidden,), "norm2": (hidden,)}

    def drawn(shape: tuple[int, ...]) -> torch.Tensor:
        return 0.02 * torch.randn(shape, dtype=torch.bfloat16, device=DEVICE)

    found = {name: [drawn(shape) for _ in range(layers)] for name, shape in shapes.items()}
    return found | {"table": [drawn((vocab, hidden))], "head": [drawn((vocab, hidden))]}


def decode_step(settings: dict[str, Any], w: dict[str, list[torch.Tensor]], rows: int, seen: int):
    """A step without arguments for `rows` tokens that see `seen` each; returns the next tokens."""
    hidden, heads = settings["hidden_size"], settings["num_attention_heads"]
    kv_heads, size = settings["num_key_value_heads"], hidden // heads
    ids = torch.randint(3, settings["vocab_size"], (rows,), device=DEVICE)
    shape = (2, settings["num_hidden_layers"], rows, kv_heads, seen, size)
    keys, values = torch.randn(shape, dtype=torch.bfloat16, device=DEVICE)
    last = torch.tensor([seen - 1], device=DEVICE)
    angles = (seen - 1) * 1e-4 ** (torch.arange(size // 2, device=DEVICE) / (size // 2))
    cos, sin = angles.cos().bfloat16(), angles.sin().bfloat16()

    def rope(x: torch.Tensor) -> torch.Tensor:
        a, b = x.chunk(2, dim=-1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)

    def step() -> torch.Tensor:
        x = F.embedding(ids, w["table"][0])
        for layer in range(settings["num_hidden_layers"]):
            h = F.rms_norm(x, (hidden,), w["norm"][layer], EPSILON)
            split = [heads * size, kv_heads * size, kv_heads * size]
            q, k, v = F.linear(h, w["qkv"][layer]).split(split, dim=-1)
            # the heads of a group are rows of queries on one KV head: no key is read twice
            q = rope(q.view(rows, kv_heads, heads // kv_heads, size))
            keys[layer].index_copy_(2, last, rope(k.view(rows, kv_heads, 1, size)))
            values[layer].index_copy_(2, last, v.reshape(rows, kv_heads, 1, size))
            a = F.scaled_dot_product_attention(q, keys[layer], values[layer])
            x = x + F.linear(a.reshape(rows, hidden), w["o"][layer])
            h = F.rms_norm(x, (hidden,), w["norm2"][layer], EPSILON)
            gate, up = F.linear(h, w["gate_up"][layer]).chunk(2, dim=-1)
            x = x + F.linear(F.silu(gate) * up, w["down"][layer])
        logits = F.linear(F.rms_norm(x, (hidden,), w["norm"][0], EPSILON), w["head"][0])
        return logits.argmax(dim=-1)

    return step


@torch.inference_mode()
def measure(request: dict[str, Any]) -> dict[str, Any]:
    """Milliseconds of a step for each batch size.

    Args:
        request: `settings` (Hugging Face config), `batches`, `tokens` that each row sees,
            `seconds`: no batch is begun later, `dry_run`: goes on without a GPU and its graphs.
    """
    if not CUDA and not request["dry_run"]:
        raise RuntimeError("torch sees no GPU")
    deadline = time.monotonic() + request["seconds"]
    weights = random_weights(request["settings"])
    found: dict[str, float | None] = {}
    for rows in request["batches"]:
        found[str(rows)] = None
        if time.monotonic() < deadline:
            step = decode_step(request["settings"], weights, rows, request["tokens"])
            replay = captured([step])
            series_seconds(replay, 2)
            samples = [series_seconds(replay, REPLAYS) / REPLAYS for _ in range(SAMPLES)]
            found[str(rows)] = 1e3 * statistics.median(samples)
            del step, replay
            if CUDA:
                torch.cuda.empty_cache()
    return {"ms": found, "graph": CUDA, "versions": f"torch {torch.__version__}"}
