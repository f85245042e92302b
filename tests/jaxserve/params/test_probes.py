"""Captures and interventions as callers write them, and the sites that they name."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from jaxserve.errors import ValidationError
from jaxserve.execution.features import Facts, overrides
from jaxserve.execution.features.probes import (
    Probe,
    changes_of,
    matching,
    part_of,
    probe_feature,
    sites_of,
)
from jaxserve.models.config_reader import read_model_config
from jaxserve.params.probes import Capture, ablate_head, add_vector, patch


@pytest.fixture(scope="module")
def config(model_folder):
    return read_model_config(str(model_folder("llama_gqa")))


def test_sites_are_in_the_order_of_the_computation(config) -> None:
    sites = sites_of(config)
    names = list(sites)
    assert names[0] == "embedding" and names[-2:] == ["hidden", "logits"]
    assert sites["layers.0.residual"] == (config.hidden_size,)
    assert sites["layers.1.attention.heads"] == (config.num_heads, config.head_dim)
    of_layer = [part_of(name) for name in names if name.startswith("layers.0.")]
    assert of_layer == [
        *("attention.qkv", "attention.heads", "attention.output"),
        *("mlp.hidden", "mlp.output", "residual"),
    ]
    assert matching(["layers.*.residual"], config, "capture") == tuple(
        f"layers.{layer}.residual" for layer in range(config.num_layers)
    )


@pytest.mark.parametrize(
    "name", ["layers.99.residual", "nothing", "layers.0.attention.weights", "layers.*.attn"]
)
def test_an_unknown_site_is_refused_by_name(config, name: str) -> None:
    with pytest.raises(ValidationError, match=name.replace("*", r"\*")):
        matching([name], config, "capture")
    with pytest.raises(ValidationError, match="add_vector"):
        changes_of(add_vector(name, np.zeros(config.hidden_size)), config)


def test_a_vector_of_another_shape_and_a_head_that_is_not_there_are_refused(config) -> None:
    site, size = "layers.1.residual", config.hidden_size
    for given in (
        add_vector(site, np.zeros(size + 1)),
        add_vector(site, np.zeros((2, size))),
        patch(site, np.zeros((2, 3, size))),
        ablate_head(1, config.num_heads),
        ablate_head(config.num_layers, 0),
        add_vector("logits", np.zeros(config.vocab_size)),
    ):
        with pytest.raises(ValidationError, match=f"interventions.{given.kind}"):
            changes_of(given, config)
    wrong: list[Any] = [
        lambda: add_vector(site, "x"),
        lambda: add_vector(site, [np.nan]),
        lambda: add_vector(site, [1.0], scale=np.inf),
        lambda: patch(site, [1.0], start=3, stop=3),
        lambda: patch(site, [1.0], start=-1),
        lambda: ablate_head(True, 1),
        lambda: Capture([]),
        lambda: Capture(["logits"], dtype="int8"),
    ]
    for make in wrong:
        with pytest.raises(ValidationError):
            make()


def test_what_an_intervention_does(config) -> None:
    site, vector = "layers.1.residual", np.arange(config.hidden_size, dtype=np.float32)
    (added,) = changes_of(add_vector(site, vector, 2.0, start=3), config)
    assert (added.multiply == 1).all() and (added.add == 2 * vector).all() and added.start == 3
    rows = changes_of(patch(site, np.stack([vector, -vector]), start=5, stop=9), config)
    assert [(one.start, one.stop) for one in rows] == [(5, 6), (6, 7)]
    assert (rows[1].multiply == 0).all() and (rows[1].add == -vector).all()
    (ablated,) = changes_of(ablate_head(0, 1), config)
    heads = ablated.multiply.reshape(config.num_heads, config.head_dim)
    assert (heads[1] == 0).all() and (np.delete(heads, 1, axis=0) == 1).all()
    probes = [Probe(changes=(one,)) for one in (added, ablated, rows[0])]
    assert len({probe.key for probe in probes}) == 3 and Probe().key == ""


def test_a_feature_has_no_hook_that_it_does_not_need(config) -> None:
    facts = Facts(config.vocab_size, 1, config.hidden_size, model=config, max_num_seqs=2)

    def hooks(sites: set[str], parts: set[str]) -> set[str]:
        feature = probe_feature("p", frozenset(sites), frozenset(parts))(facts)
        every = ("embed", "linear", "operand", "layer", "see_last")
        return {hook for hook in every if overrides(feature, hook)}

    assert hooks({"layers.0.residual"}, set()) == {"layer"}
    assert hooks({"logits"}, {"attention.heads"}) == {"see_last", "operand"}
    assert hooks(set(), {"mlp.output"}) == {"linear"} and hooks({"embedding"}, set()) == {"embed"}


def test_experts_have_no_sites_of_an_mlp(model_folder) -> None:
    config = read_model_config(str(model_folder("qwen3_moe")))
    sites = sites_of(config)
    assert "layers.0.attention.output" in sites
    assert ("layers.0.mlp.output" in sites) == (0 in config.dense_layers)
