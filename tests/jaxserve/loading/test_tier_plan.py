"""What of pages in the hosts' memory is refused in another process than 0."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from jaxserve.errors import ValidationError
from jaxserve.loading import tier_plan
from jaxserve.loading.tier_plan import GIB, check_own_part


@pytest.mark.parametrize(("left", "fits"), [(2, True), (1.9, False), (None, True)])
def test_another_process_compares_the_part_of_its_devices_with_its_own_host(
    left: float | None, fits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has one of four devices, and 8 GiB are asked for in all."""
    share = None if left is None else int(left * GIB)
    monkeypatch.setattr(tier_plan, "share_of_host", lambda asked: share)
    monkeypatch.setattr(tier_plan, "device_limit", lambda device: 1)
    devices = np.array([SimpleNamespace(process_index=place) for place in (1, 0, 2, 3)])
    asked = SimpleNamespace(kv_offloading_size=8.0, memory_reserve=0.05, process_id=2)
    config: Any = SimpleNamespace(asked=asked, cache=SimpleNamespace(num_host_pages=8))
    cache = SimpleNamespace(page_bytes=lambda shards: GIB // shards)
    runner: Any = SimpleNamespace(cache=cache, weights=SimpleNamespace(host_bytes=0))
    mesh: Any = SimpleNamespace(devices=devices, size=4)
    if fits:
        return check_own_part(config, runner, mesh)
    told = "kv_offloading_size=8.0 .*at most 1.90 GiB in process 2, whose part takes 2.00 GiB"
    with pytest.raises(ValidationError, match=told):
        check_own_part(config, runner, mesh)
