"""What an engine of several processes cannot have is refused by name, before any is joined."""

from __future__ import annotations

from typing import Any

import pytest

from jaxserve import EngineConfig
from jaxserve.config.several_processes import address_of
from jaxserve.errors import ValidationError

TWO = {"num_processes": 2, "tensor_parallel_size": 4, "coordinator": "127.0.0.1:9000"}


@pytest.mark.parametrize(
    ("settings", "field", "allowed"),
    [
        ({"num_processes": 1}, "coordinator", "None where num_processes is 1"),
        ({"num_processes": 1, "process_id": 1, "coordinator": None}, "process_id", "0 where"),
        ({"process_id": 2}, "process_id", "0 to 1 where"),
        ({"coordinator": None}, "coordinator", "HOST:PORT of process 0"),
        ({"coordinator": "10.0.0.1"}, "coordinator", "HOST:PORT, as 10.0.0.1:9000"),
        ({"coordinator": "h:70000"}, "coordinator", "HOST:PORT, as"),
        ({"coordinator": "10.0.0.1:9000"}, "process_token_file", "a file with a secret"),
        ({"tensor_parallel_size": 3}, "tensor_parallel_size", "a multiple of num_processes=2"),
        ({"data_parallel_size": 2}, "data_parallel_size", "1 where"),
        (
            {"kv_offloading_size": 1.0, "kv_offloading_path": "/x"},
            "kv_offloading_path",
            "none, for a file holds",
        ),
        ({"cpu_offload_gb": 1.0}, "cpu_offload_gb", "none, for one device"),
        ({"compile_in_background": True}, "compile_in_background", "false, for all"),
        ({"features": ("a:B",)}, "features", "none, for nothing"),
        ({"logits_processors": ("a:b",)}, "logits_processors", "none, for what"),
    ],
)
def test_settings_that_say_no_place_or_are_not_carried_are_refused(
    settings: dict[str, Any], field: str, allowed: str
) -> None:
    EngineConfig(model="m", kv_offloading_size=1.0, **TWO)
    with pytest.raises(ValidationError, match=allowed) as found:
        EngineConfig(model="m", **(TWO | settings))
    assert found.value.field == field


def test_an_address_has_a_host_and_a_port() -> None:
    assert address_of("host-0.svc:9000") == ("host-0.svc", 9000)
    assert address_of("[fd00::1]:1") == ("fd00::1", 1)
