"""Policies by the names of their modules, as an operator has them."""

from __future__ import annotations

import asyncio
import os
import re
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from checkpoints import bundled_model_path
from jaxserve import SamplingParams
from jaxserve.async_engine import AsyncEngine
from jaxserve.config.engine_config import EngineConfig, Isolation
from jaxserve.errors import ValidationError
from jaxserve.scheduling.policies import FirstComeFirstServed, make_policy
from tests.command_line import run
from tests.jaxserve.scheduling.test_scheduler import make_request, names, simple, start, step

ROOT = Path(__file__).parents[4]


def example() -> str:
    """The program of the page on scheduling."""
    text = (ROOT / "docs" / "scheduling.md").read_text()
    (found,) = (b for b in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "class" in b)
    return str(found)


def made(name: str) -> Any:
    return make_policy(EngineConfig(model="m", scheduling_policy=name))


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A module of an operator's: the example, and classes that are no policies."""
    module = ModuleType("short_answers")
    exec(example(), vars(module))
    own: Any = module.ShortAnswersFirst
    members = vars(FirstComeFirstServed) | {"peek": None}
    vars(module)["Incomplete"] = type("Incomplete", (), members)
    vars(module)["Alone"] = type("Alone", (own,), {"__init__": lambda self: None})
    vars(module)["Fails"] = type("Fails", (own,), {"__init__": lambda self, inputs: 1 / 0})
    older = {"rank": lambda self, num_prompt, priority: 0}
    vars(module)["Older"] = type("Older", (own,), older)
    vars(module)["value"] = own(None)
    monkeypatch.setitem(sys.modules, "short_answers", module)
    return module


def test_the_example_of_the_docs_is_a_policy(module: ModuleType) -> None:
    scheduler, device = start(
        simple(policy=lambda: made("short_answers:ShortAnswersFirst"), max_num_seqs=1)
    )
    for name, asked in (("a", 3), ("b", 1), ("c", 2)):
        request = make_request(name, [5, 6], 1)
        request.asked = replace(request.asked, params=SamplingParams(max_tokens=asked))
        scheduler.add(request)
    assert [names(step(scheduler, device))[1] for _ in range(3)] == [["b"], ["c"], ["a"]]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("short_answers:Nothing", "that can be imported .*has no attribute 'Nothing'"),
        ("no_such_module:Policy", "that can be imported .*No module named 'no_such_module'"),
        ("short_answers:Incomplete", "it lacks peek"),
        ("short_answers:value", "it is of type ShortAnswersFirst"),
        ("short_answers:Alone", "made with one argument, PolicyInputs"),
        ("short_answers:Fails", r"made with one argument, PolicyInputs \(ZeroDivisionError"),
        ("short_answers:Older", r"whose rank takes \(self, num_prompt, priority, num_output\)"),
        ("short_answers", "one of fcfs, priority, length, or module:Class"),
        ("short answers:Policy", "or module:Class"),
        ("os;x:y", "or module:Class"),
        (5, "or module:Class"),
    ],
)
def test_what_is_no_policy_is_one_error(name: Any, said: str, module: ModuleType) -> None:
    with pytest.raises(ValidationError, match=said) as caught:
        made(name)
    assert caught.value.field == "scheduling_policy" and caught.value.value == name


def test_a_start_with_another_class_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("1 / 0\n")
    words = ["serve", "--scheduling-policy", "broken:Policy", "--port", "0"]
    done = run(*words, env=os.environ | {"PYTHONPATH": str(tmp_path)})
    assert done.returncode == 1 and done.stderr.count("\n") == 1
    assert "scheduling_policy='broken:Policy'" in done.stderr and "division by" in done.stderr


@pytest.mark.slow
def test_an_engine_in_its_own_process_imports_it_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = f"""
import os
class Told(ShortAnswersFirst):
    def entered(self, request):
        with open({str(tmp_path / "told")!r}, "a") as file:
            asked, found = request.asked.num_output_asked, self.inputs.num_found(request)
            print(os.getpid(), self.inputs.device_busy(), asked, found, file=file)
        super().entered(request)
"""
    (tmp_path / "own_policy_of_a_test.py").write_text(example() + told)
    monkeypatch.syspath_prepend(str(tmp_path))
    config = EngineConfig(
        model=str(bundled_model_path()),
        scheduling_policy="own_policy_of_a_test:Told",
        max_num_seqs=1,
        compile_ahead=2,
        compile_in_background=False,
    )

    async def main() -> None:
        engine = AsyncEngine(config, isolation=Isolation())
        try:
            await engine.wait_ready()
            for name in "ab":
                params = SamplingParams(n=2, max_tokens=3)
                async for output in engine.generate([5] * 40, params, name):
                    last = output
                assert last.finished
        finally:
            await engine.shutdown()

    asyncio.run(main())
    pid, busy, asked, found = (tmp_path / "told").read_text().splitlines()[-1].split()
    assert int(pid) != os.getpid() and 0 < float(busy) <= 1
    assert (asked, found) == ("6", "32"), "two of three tokens; two pages of the prompt are kept"
