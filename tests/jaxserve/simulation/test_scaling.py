"""Estimates of one model over several devices."""

from __future__ import annotations

from itertools import pairwise

import pytest

from jaxserve.config.engine_config import EngineConfig
from jaxserve.models.config_reader import model_config_of
from jaxserve.models.known_shapes import SHAPES
from jaxserve.simulation.scaling import ROWS, Estimate, estimate, heading, rows, sent_bytes


def of(name: str, kind: str, devices: int) -> Estimate | None:
    return estimate(EngineConfig(model=name), model_config_of(SHAPES[name]), kind, devices)


def test_more_devices_have_less_each_and_are_faster_on_one_host():
    found = [of("llama-3-8b", "a100", devices) for devices in (1, 2)]
    for fewer, more in pairwise(found):
        assert more.weights == pytest.approx(fewer.weights / 2, rel=0.01)
        assert fewer.seconds / 2 < more.seconds < fewer.seconds
    assert (found[0].sums, found[0].sent, found[0].links) == (0, 0.0, 0.0)
    assert found[1].sums == 2 * 32 + 1
    cells = [one.split(" | ") for one in rows("m", found)]
    assert all(len(one) == len(heading()[0].split(" | ")) for one in cells)
    gain = found[0].seconds / found[1].seconds
    assert cells[0][-1] == " |" and cells[1][-1] == f"x {gain:.1f} |"


@pytest.mark.slow
def test_what_does_not_fit_has_no_estimate():
    assert of("llama-3-70b", "a100", 1) is None
    assert of("llama-3-405b", "a100", 8) is None


@pytest.mark.slow
def test_sums_over_gpus_of_two_hosts_go_over_the_slower_link():
    inside, outside = (of("llama-3-70b", "h200", devices) for devices in (8, 16))
    assert outside.links > 3 * inside.links
    inside, outside = (of("llama-3-70b", "tpu-v6e", devices) for devices in (8, 16))
    assert outside.links < 1.5 * inside.links


def test_two_devices_send_half_of_each_sum_twice():
    model = model_config_of(SHAPES["llama-3-8b"])
    sums = 65 * ROWS * 4096 * 2
    assert sent_bytes(model, 2) == sums + ROWS * 128256 * 4 / 4
