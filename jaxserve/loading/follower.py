"""A process of an engine that decides nothing: it has devices, and runs what process 0 tells it."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jaxserve.boundary.process_messages import EngineDecision, RunCommand, WeightsFound
from jaxserve.compilation import compilation_cache
from jaxserve.config.engine_config import EngineConfig
from jaxserve.config.several_processes import address_of
from jaxserve.errors import JaxServeError
from jaxserve.execution.host_memory import check_limits, trim
from jaxserve.execution.runner import Runner
from jaxserve.loading.engine_build import load_stages
from jaxserve.loading.engine_plan import EnginePlan, choose, fetch_weights, kv_scales_of
from jaxserve.loading.hub import ModelFiles, locate
from jaxserve.loading.load_progress import LoadProgress
from jaxserve.loading.process_group import digest_of, steps_digest, token_of, what_is_compared
from jaxserve.loading.tier_plan import check_own_part
from jaxserve.parallel.mesh import make_mesh
from jaxserve.parallel.processes import connect, disconnect
from jaxserve.processes.joining import join
from jaxserve.processes.link import Link
from jaxserve.processes.wire import StartRefusal

logger = logging.getLogger(__name__)

MOST_BEHIND = 2  # steps that are dispatched and have not run


class Follower:
    """An engine's part in another process than 0; `run` is called once.

    Args:
        config: of this process.
        on_lost: called in another thread, with words, when process 0 is lost or ends with an error;
            a step that waits for it may never end.

    Attributes:
        decided: what process 0 has decided.
        runner: that is warmed up, as process 0's.

    Raises:
        JaxServeError, checkpoints.CheckpointError: it cannot be built; process 0 is told.
    """

    def __init__(self, config: EngineConfig, on_lost: Callable[[str], None]):
        compilation_cache.use(config.compilation_cache)
        assert config.coordinator is not None
        address, own = address_of(config.coordinator), what_is_compared(config)
        self._link, joined = join(address, own, token_of(config), on_lost)
        try:
            connect(joined.address, config.num_processes, config.process_id)
            with LoadProgress(logger.info) as report:
                self.decided, self.runner = _built(config, self._link, report)
            disconnect()
        except BaseException as error:
            self._refuse(error)
            raise

    def run(self) -> None:
        """Run commands until the engine is closed.

        Raises:
            EngineDeadError: process 0 is lost, or a step failed.
        """
        behind: deque[jax.Array] = deque()
        try:
            while isinstance(body := self._link.receive(), RunCommand):
                done = self.runner.run(body.program, np.frombuffer(body.operand, np.int32))
                if done is not None:
                    behind.append(done[0])
                if len(behind) > MOST_BEHIND:
                    jax.block_until_ready(behind.popleft())
        except BaseException as error:
            self._refuse(error)
            raise
        self.runner.close()
        self._link.close()

    def _refuse(self, error: BaseException) -> None:
        try:
            self._link.send(StartRefusal(str(error) or type(error).__name__))
        except JaxServeError:
            logger.debug("process 0 is lost already")
        self._link.close()


def _built(config: EngineConfig, link: Link, report: LoadProgress) -> tuple[EnginePlan, Runner]:
    """What process 0 decides, and a runner of it that is warmed up."""
    with report.phase("finding the model") as told:
        files = locate(config, told=told)
    check_limits()
    mesh = make_mesh(config.tensor_parallel_size)
    if config.load_format != "dummy":
        fetch_weights(files, report)
    link.send(WeightsFound(digest_of(config, files)))
    with report.phase("waiting for process 0"):
        body = link.receive()
    assert isinstance(body, EngineDecision)
    decided = _as_decided(config, body, files, mesh, report)
    runner = decided.runner(mesh)
    check_own_part(decided.config, runner, mesh)
    cache, scheduler = decided.config.cache, decided.config.scheduler
    runner.set_pool(cache.num_pages, scheduler.max_model_len)
    load = partial(load_stages, decided, mesh)
    runner.weights.set(load(report), partial(load, LoadProgress(logger.info, shown=False)))
    with report.phase("compiling"):
        runner.warm_up()
    trim()
    return decided, runner


def _as_decided(
    config: EngineConfig, body: EngineDecision, files: ModelFiles, mesh: Mesh, report: LoadProgress
) -> EnginePlan:
    """Process 0's decision with the files of this process.

    Raises:
        JaxServeError: by the files and devices here the steps would be others.
    """
    own: dict[str, Any] = {"model": config.model, "tokenizer": config.tokenizer}
    own |= {"revision": config.revision, "download_dir": config.download_dir}
    own |= {"process_id": config.process_id, "compilation_cache": config.compilation_cache}
    asked = replace(body.config.asked, **own)
    chosen = choose(asked, files, mesh, report, in_memory=False)
    chosen = replace(chosen, config=replace(body.config, asked=asked))
    decided = replace(chosen, kv_scales=kv_scales_of(chosen, files))
    if steps_digest(decided) != body.steps:
        text = f"process {config.process_id} would compile other steps than process 0"
        raise JaxServeError(f"{text}: its device or the model's files differ")
    return decided
