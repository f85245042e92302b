"""What compiles steps: weights that were given back are not traced, options that XLA lacks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest

from jaxserve.compilation.compiler_options import PINNED
from jaxserve.errors import EngineDeadError, ValidationError
from jaxserve.execution import step_compiler
from jaxserve.execution.device_weights import DeviceWeights
from jaxserve.execution.features import make_features
from jaxserve.execution.runner import Runner
from jaxserve.execution.step_compiler import StepCompiler, step_options
from jaxserve.parallel.mesh import make_mesh
from jaxserve.parallel.stages import Stage
from tests.jaxserve.execution.engine_facts import FACTS, fast


def test_weights_that_are_given_back_are_not_traced() -> None:
    def dead() -> None:
        assert weights._num_readers == 1, "`close` waits from before the question"
        raise EngineDeadError("the engine was closed")

    weights = DeviceWeights([])
    nothing: Any = SimpleNamespace(structure=None, leaves=())
    compiler = StepCompiler(
        Stage(make_mesh(), 0, 1, 1),
        nothing,
        weights,
        *(nothing,) * 2,
        FACTS,
        np.dtype("f4"),
        {},
        dead,
    )
    state: Any = SimpleNamespace(cache=SimpleNamespace(page_size=16), max_num_seqs=4)
    state.cache.groups = SimpleNamespace(pages=SimpleNamespace(num_groups=1))
    with pytest.raises(EngineDeadError, match="closed"):
        compiler.program(fast(2), make_features(FACTS), state)
    weights.close()  # returns: the compiler has left `reading`


def test_a_runner_is_dead_before_its_weights_go() -> None:
    runner: Any = MagicMock(_death=None, stages=[])
    runner.weights.close.side_effect = lambda: Runner.check_alive(runner)
    with pytest.raises(EngineDeadError, match="closed"):
        Runner.close(runner)


@pytest.mark.parametrize(
    ("one_program", "platform"), [(True, "gpu"), (False, "gpu"), (True, "cpu")]
)
def test_one_program_is_refused_where_xla_cannot_pin_it(
    one_program: bool, platform: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost = sorted(PINNED)[0]
    monkeypatch.setattr(
        step_compiler, "accepted", lambda given: {k: v for k, v in given.items() if k != lost}
    )
    backends: Any = SimpleNamespace(divides_products=False, one_program=one_program)

    def options() -> dict[str, Any]:
        return step_options(platform, backends, graph_collectives=False, streams=False)

    if one_program and platform == "gpu":
        with pytest.raises(ValidationError, match=f"deterministic=True.*does not know {lost}"):
            options()
    else:
        assert lost not in options()
