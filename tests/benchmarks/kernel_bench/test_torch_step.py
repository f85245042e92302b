"""The torch step gives a time for each batch, and none where its graph cannot be."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from benchmarks.kernel_bench import torch_step  # noqa: E402

SETTINGS = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "vocab_size": 64,
}
REQUEST = {"settings": SETTINGS, "batches": (3, 1), "tokens": 5, "seconds": 60.0, "dry_run": True}
no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")


@no_gpu
def test_every_batch_has_a_time_and_the_answer_says_that_there_is_no_graph():
    answer = torch_step.measure(REQUEST)
    assert list(answer["ms"]) == ["3", "1"] and min(answer["ms"].values()) > 0
    assert answer["graph"] is False and "torch" in answer["versions"]


@no_gpu
def test_outside_of_a_dry_run_a_machine_without_a_gpu_is_an_error():
    with pytest.raises(RuntimeError, match="torch sees no GPU"):
        torch_step.measure(REQUEST | {"dry_run": False})


def test_when_the_time_is_up_a_batch_has_none():
    assert torch_step.measure(REQUEST | {"seconds": -1.0})["ms"] == {"3": None, "1": None}


def test_heads_of_a_group_as_rows_are_grouped_attention(monkeypatch):
    seen = []
    plain = torch.nn.functional.scaled_dot_product_attention

    def attend(q, k, v):
        seen.append((q, k, v, plain(q, k, v)))
        return seen[-1][-1]

    monkeypatch.setattr(torch_step.F, "scaled_dot_product_attention", attend)
    weights = torch_step.random_weights(SETTINGS)
    tokens = torch_step.decode_step(SETTINGS, weights, 3, 5)()
    assert tokens.shape == (3,) and len(seen) == SETTINGS["num_hidden_layers"]
    q, k, v, got = (x.float() for x in seen[-1])
    wanted = plain(q.reshape(3, 4, 1, 8), k, v, enable_gqa=True).reshape(got.shape)
    torch.testing.assert_close(got, wanted, atol=1e-2, rtol=1e-2)
