"""The report on constrained answers runs, and its schemas compile."""

from __future__ import annotations

import json

import pytest

from benchmarks.constrained import __main__ as validity
from benchmarks.constrained import speed
from checkpoints import bundled_model_path
from jaxserve import StructuredOutputsParams
from jaxserve.boundary.model_facts import ModelFacts
from jaxserve.grammars.compiler import GrammarCompiler
from jaxserve.grammars.grammar_text import grammar_text
from jaxserve.tokenization.tokenizer import Tokenizer
from tests.benchmarks.documented import documented


class Facts(ModelFacts):
    vocab_size, hidden_size, num_layers, eos_token_ids = 2048, 8, 1, (2,)  # type: ignore[assignment]


def test_all_schemas_compile() -> None:
    tokenizer = Tokenizer(bundled_model_path())
    compiler = GrammarCompiler(lambda: tokenizer, Facts())
    cases = json.loads(validity.SCHEMAS.read_text())
    assert len({case["name"] for case in cases}) == len(cases) >= 100
    for case in cases:
        compiler.start(grammar_text(StructuredOutputsParams(json=case["schema"]))).result()
    compiler.close()


@pytest.mark.slow
def test_documented_commands_run(capsys: pytest.CaptureFixture[str]) -> None:
    (flags,) = documented("python -m benchmarks.constrained")
    assert validity.main([*flags, "--quick"]) == 0
    assert "| bounded |" in capsys.readouterr().out
    (flags,) = documented("python -m benchmarks.constrained.speed")
    assert speed.main([*flags, "--quick"]) == 0
    assert "| beside |" in capsys.readouterr().out
