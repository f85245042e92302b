"""What has to be the same in all processes of an engine, and what each may have of its own."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from jaxserve import LLM, EngineConfig
from jaxserve.errors import ValidationError
from jaxserve.loading.process_group import token_of, what_is_compared

TWO: dict[str, Any] = {"num_processes": 2, "tensor_parallel_size": 2, "coordinator": "localhost:1"}
CONFIG = EngineConfig(model="m", **TWO)


def test_files_and_the_queue_are_a_hosts_own_and_what_decides_steps_is_not() -> None:
    first = what_is_compared(CONFIG)
    assert set(first.versions) == {"jaxserve", "jax", "jaxlib", "python"}
    own = {"model": "/elsewhere", "hf_token": "secret", "max_num_queued_reqs": 5, "process_id": 1}
    assert what_is_compared(replace(CONFIG, **own)) == replace(first, process_id=1)
    assert "secret" not in repr(what_is_compared(replace(CONFIG, hf_token="secret")))
    for change in ({"seed": 1}, {"max_num_seqs": 3}, {"dtype": "float32"}, {"num_pages": 9}):
        assert what_is_compared(replace(CONFIG, **change)).settings != first.settings, change


def test_the_secret_is_what_its_file_holds(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert token_of(CONFIG) == b"" and "any user of this machine" in caplog.text
    caplog.clear()
    file = tmp_path / "token"
    config = replace(CONFIG, process_token_file=str(file))
    with pytest.raises(ValidationError, match="a file that can be read"):
        token_of(config)
    file.write_text(" \n")
    with pytest.raises(ValidationError, match="a file that is not empty"):
        token_of(config)
    file.write_text("a secret\n")
    assert token_of(config) == b"a secret" and not caplog.text


def test_an_llm_is_process_0_alone() -> None:
    with pytest.raises(ValidationError, match="0 here: the other processes run `jaxserve serve`"):
        LLM("m", process_id=1, **TWO)
