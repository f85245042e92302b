"""What an engine of several processes needs and rules out: refused by name before any is joined."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from jaxserve.errors import ValidationError

if TYPE_CHECKING:
    from jaxserve.config.engine_config import EngineConfig

THIS_MACHINE = ("127.0.0.1", "localhost", "::1")
_ADDRESS = re.compile(r"(?:\[([0-9a-fA-F:.]+)\]|([\w.-]+)):(\d{1,5})")
# that say nothing where there is one process
_OF_SEVERAL = {"process_id": 0, "coordinator": None, "process_token_file": None}
# what the commands of process 0 do not carry, and why
_OF_ONE = {
    "kv_offloading_path": "none, for a file holds what the devices of one process have of a page",
    "cpu_offload_gb": "none, for one device's layers leave it",
    "compile_in_background": "false, for all processes have the same programs at any time",
    "features": "none, for nothing has shown that yours decide the same in every process",
    "logits_processors": "none, for what they return on one host the others do not know",
}


def check_settings(config: EngineConfig) -> None:
    """Refuse settings that name no place among several processes, or that one process alone has.

    Raises:
        ValidationError: names one and says what it may be.
    """
    count = config.num_processes
    if count == 1:
        for name, default in _OF_SEVERAL.items():
            if getattr(config, name) != default:
                allowed = f"{default} where num_processes is 1"
                raise ValidationError(name, getattr(config, name), allowed)
        return
    beside = f"where num_processes is {count}"
    if config.process_id >= count:
        raise ValidationError("process_id", config.process_id, f"0 to {count - 1} {beside}")
    if config.coordinator is None:
        raise ValidationError("coordinator", None, f"HOST:PORT of process 0 {beside}")
    host, _ = address_of(config.coordinator)
    if config.process_token_file is None and host not in THIS_MACHINE:
        allowed = f"a file with a secret {beside} and coordinator is not {THIS_MACHINE[0]}"
        raise ValidationError("process_token_file", None, allowed)
    if config.tensor_parallel_size % count:
        allowed = f"a multiple of num_processes={count}, which have equal numbers of devices"
        raise ValidationError("tensor_parallel_size", config.tensor_parallel_size, allowed)
    if config.data_parallel_size != 1:
        raise ValidationError("data_parallel_size", config.data_parallel_size, f"1 {beside}")
    for name, why in _OF_ONE.items():
        if value := getattr(config, name):
            raise ValidationError(name, value, f"{why} {beside}")


def address_of(text: str) -> tuple[str, int]:
    """Host and port of `coordinator`; an IPv6 address stands in brackets.

    Raises:
        ValidationError: it is no HOST:PORT.
    """
    found = _ADDRESS.fullmatch(text)
    if found is None or not 0 < int(found[3]) < 65536:
        allowed = "HOST:PORT, as 10.0.0.1:9000 or [fd00::1]:9000"
        raise ValidationError("coordinator", text, allowed)
    return found[1] or found[2], int(found[3])
