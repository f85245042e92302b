"""Run as a program on fake CPU devices: compares a model on one device with several.

usage: python -m tests.jaxserve.models.tensor_parallel FOLDER DEVICES
Prints one JSON object; see `compare`.
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxserve.models import load_model
from jaxserve.models.config_reader import read_model_config
from jaxserve.models.linear import LinearForm
from jaxserve.parallel import make_mesh, spread
from tests.jaxserve.models.dense import empty_cache, run

TOKENS = 32
# as on GPUs, where what stands between the linear layers is apart from them
APART = LinearForm("gpu", residual_norm="xla")


def compare(folder: str, devices: int) -> dict[str, Any]:
    read = read_model_config(folder)
    tokens = np.random.default_rng(0).integers(0, read.vocab_size, TOKENS)
    logits: list[Any] = []
    leaves: dict[str, list[Any]] = {"dummy": [], "int8": [], "dummy int8": []}
    for size in (1, devices):
        config = read.spread_over(size)
        model = load_model(folder, config, mesh=make_mesh(size))
        forward, arguments = program(model, tokens)
        logits.append(np.asarray(forward(*arguments)))
        for name, found in leaves.items():
            other = load_model(
                folder,
                config,
                mesh=make_mesh(size),
                load_format="dummy" if "dummy" in name else "auto",
                form=LinearForm(quantization="int8" if "int8" in name else None),
            )
            found.append([np.asarray(leaf) for leaf in jax.tree.leaves(nnx.state(other))])
    hlo = forward.lower(*arguments).compile().as_text()

    def difference(found: np.ndarray) -> float:
        return float(np.abs(found - logits[0]).max() / np.abs(logits[0]).max())

    return {
        "difference": difference(logits[1]),
        **(rows_divided(folder, config, tokens, difference) if devices == 2 else {}),
        "equal": {
            name: all(np.array_equal(a, b) for a, b in zip(*found, strict=True))
            for name, found in leaves.items()
        },
        "collectives": collectives(hlo),
        "shard_shapes": {
            "/".join(map(str, place)): variable[...].addressable_shards[1].data.shape
            for place, variable in nnx.to_flat_state(nnx.state(model))
            if 0 in place or len(place) == 1
        },
    }


def collectives(hlo: str) -> Counter[str]:
    """How often devices exchange what, in a compiled program."""
    return Counter(re.findall(r"= \S+ (all-[a-z]+|collective-[a-z]+|reduce-scatter)", hlo))


def rows_divided(folder: str, config: Any, tokens: np.ndarray, difference: Any) -> dict[str, Any]:
    """Where each device adds and norms its own rows of the residual stream, as in large steps."""
    devices, rounded = jax.device_count(), replace(APART, quantization="int8")

    def made(form: LinearForm, size: int) -> tuple[np.ndarray, str]:
        """The logits, and the compiled program."""
        parts = config if size > 1 else read_model_config(folder)
        forward, arguments = program(
            load_model(folder, parts, mesh=make_mesh(size), form=form), tokens
        )
        return np.asarray(forward(*arguments)), forward.lower(*arguments).compile().as_text()

    def apart(found: np.ndarray, expected: np.ndarray) -> float:
        return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))

    alone, whole = made(rounded, 1)[0], made(rounded, devices)[0]
    spread.DIVIDED_NUMBERS = 0
    jax.clear_caches()  # of what was traced with whole rows
    (plain, text), (found, text_of_rounded) = made(APART, devices), made(rounded, devices)
    return {
        "rows divided": difference(plain),
        "collectives of rows": collectives(text),
        "rounded rows gathered": len(re.findall(r"= s8\S+ all-gather", text_of_rounded)),
        "rounded rows against whole ones": apart(found, whole),
        "rounded rows against one device": apart(found, alone),
        "rounding itself": apart(alone, plain),
        **divided_inputs(folder, config, rounded),
    }


def divided_inputs(folder: str, config: Any, form: LinearForm) -> dict[str, float]:
    """How far a product is from that of one device where each has a part of its inputs.

    Each rounds the inputs that it has. Inputs with the largest number once in each part have the
    scale of the whole rows there.
    """
    devices = jax.device_count()
    size = config.intermediate_size
    rows = np.random.default_rng(1).uniform(-1, 1, (TOKENS, size)).astype(np.float32)
    alike = rows.copy()
    alike[:, :: size // devices] = 1.0
    found: dict[str, list[np.ndarray]] = {"alike": [], "unlike": []}
    for count in (1, devices):
        parts = config if count > 1 else read_model_config(folder)
        product = load_model(folder, parts, mesh=make_mesh(count), form=form).blocks[0].mlp.down
        for name, given in (("alike", alike), ("unlike", rows)):
            found[name].append(np.asarray(product.in_parts(jnp.asarray(given)).sum(axis=0)))
    return {
        f"inputs with scales {name}": float(np.linalg.norm(two - one) / np.linalg.norm(one))
        for name, (one, two) in found.items()
    }


def program(model: nnx.Module, tokens: np.ndarray) -> tuple[Any, tuple[Any, ...]]:
    """(jitted function of the arguments that returns the logits, arguments)."""
    graph, state = nnx.split(model)

    def forward(state: nnx.State, tokens: jax.Array) -> jax.Array:
        merged = nnx.merge(graph, state)
        return run(merged, tokens, empty_cache(merged.config, TOKENS), 0)[0]

    return jax.jit(forward), (state, jnp.asarray(tokens, jnp.int32))


if __name__ == "__main__":
    print(json.dumps(compare(sys.argv[1], int(sys.argv[2]))))
