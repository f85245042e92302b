"""The module comes back from its operands as it was."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from jaxserve.execution.parameters import split_model
from jaxserve.models.config import ModelConfig
from jaxserve.models.config_reader import model_config_of
from jaxserve.models.linear import LinearForm
from jaxserve.models.llama import Llama
from jaxserve.parallel.mesh import make_mesh

LAYERS = 3


def numbered(config: ModelConfig, form: LinearForm) -> Llama:
    """A model whose every parameter holds other numbers."""
    model = Llama(config, "float32", form)
    graph, params = nnx.split(model)
    leaves, tree = jax.tree.flatten(params)
    values = [leaf + np.asarray(index, leaf.dtype) for index, leaf in enumerate(leaves)]
    return nnx.merge(graph, jax.tree.unflatten(tree, values))


def config(**changes) -> ModelConfig:
    settings = {
        "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "vocab_size": 32,
        "max_position_embeddings": 64,
    }
    return model_config_of(settings | changes)


@pytest.mark.parametrize("quantization", [None, "int8"])
def test_every_parameter_comes_back_in_its_place(quantization) -> None:
    model = numbered(config(), LinearForm("xla", quantization))
    structure, operands = split_model(model)
    before, after = (jax.tree.leaves(nnx.state(m)) for m in (model, structure.merge(operands)))
    assert len(before) == len(after)
    for one, other in zip(before, after):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(one, other)


def test_vectors_of_one_kind_are_one_operand() -> None:
    _, operands = split_model(numbered(config(), LinearForm("xla")))
    shapes = [operand.shape for operand in operands]
    assert shapes.count((2 * LAYERS + 1, 16)) == 1, "norms of the residual stream"
    assert shapes.count((2 * LAYERS, 8)) == 1, "norms of queries and keys"
    matrices = 4 * LAYERS + 2
    assert len(operands) == matrices + 2


@pytest.mark.parametrize(
    ("form", "stacks"),
    [
        (LinearForm("gpu", residual_norm="triton", qkv_in_parts=True), 0),
        (LinearForm("xla", qkv_in_parts=True), 0),
        (LinearForm("gpu"), 2),
    ],
)
def test_vectors_that_a_kernel_takes_stay_apart(form, stacks) -> None:
    """XLA would copy a row of a stack for a kernel that is not its own."""
    _, operands = split_model(numbered(config(), form))
    assert (
        sum(o.ndim == 2 and o.shape[0] in (2 * LAYERS, 2 * LAYERS + 1) for o in operands) == stacks
    )


def test_stacks_keep_their_placement_and_may_be_abstract() -> None:
    sharding = NamedSharding(make_mesh(), PartitionSpec("model"))
    model = Llama(config(), "float32")
    graph, params = nnx.split(model)
    placed = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), params
    )
    _, operands = split_model(nnx.merge(graph, placed))
    stacks = [x for x in operands if x.shape == (2 * LAYERS + 1, 16)]
    assert [x.sharding.spec for x in stacks] == [PartitionSpec(None, "model")]
    assert all(isinstance(x, jax.ShapeDtypeStruct) for x in operands)
