"""Batches on Ray: what a worker's application asks for, with a scripted engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from checkpoints import bundled_model_path
from jaxserve.errors import ValidationError
from jaxserve.ray import LLMConfig
from server.on_ray.batch import Worker, _rows, run_batch
from tests.server.fake_engine import FakeEngine
from tests.server.test_batch import line

LOADING = {"model_id": "tiny", "model_source": str(bundled_model_path())}
KEPT = {"api_key": "sesame", "allowed_hosts": ["example.org"], "max_body_bytes": 1000}


def test_a_worker_asks_its_batch_for_no_key(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    engine = FakeEngine(max_num_seqs=4, max_num_queued_reqs=2)
    monkeypatch.setattr("jaxserve.async_engine.AsyncEngine", lambda *args, **kwargs: engine)
    config = LLMConfig(LOADING, engine_kwargs=KEPT)  # type: ignore[arg-type]
    source = tmp_path / "in.jsonl"
    prompts = [*("x" for _ in range(9)), "x" * 1000]
    source.write_text("\n".join(line(f"r{n}", {"prompt": one}) for n, one in enumerate(prompts)))
    rows: list[dict[str, Any]] = list(_rows(source, config.flags().max_body_bytes, {}))
    told = Worker(config.words())({name: [one[name] for one in rows] for name in rows[0]})
    assert told["failed"] == [False] * 9 + [True]
    assert "longer than a body may be" in told["answer"][-1]
    assert not engine.refused and len(engine.started) == 9


def test_a_batch_is_no_work_for_several_processes(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text(line("r", {"prompt": "x"}))
    kwargs = {"num_processes": 2, "tensor_parallel_size": 2}
    config = LLMConfig(LOADING, engine_kwargs=kwargs)  # type: ignore[arg-type]
    with pytest.raises(ValidationError, match=r"num_processes=2 .*: 1: a worker"):
        run_batch(config, tmp_path / "in.jsonl", tmp_path / "out.jsonl")
