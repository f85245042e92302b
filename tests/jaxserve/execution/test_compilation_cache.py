"""Compiled programs are found again by the next process, and only by one on the same machine."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from jaxserve.execution import compilation_cache

ROOT = Path(__file__).parents[3]
PROGRAM = textwrap.dedent(
    """
    import sys
    import jax
    from jaxserve import LLM
    counts = {}
    def count(name, **_):
        counts[name.rsplit("/", 1)[1]] = counts.get(name.rsplit("/", 1)[1], 0) + 1
    jax.monitoring.register_event_listener(count)
    llm = LLM(sys.argv[1], skip_tokenizer_init=True, max_model_len=64, max_num_seqs=2, num_pages=9,
              compile_ahead=2, compile_in_background=False, max_num_batched_tokens=16)
    output = llm.generate([[5, 6, 7]], use_tqdm=False)[0]
    print(counts.get("cache_hits", 0), counts.get("cache_misses", 0), output.outputs[0].token_ids)
    llm.close()
    """
)


def start(model: Path, cache_home: Path) -> list[str]:
    environment = {**os.environ, "XDG_CACHE_HOME": str(cache_home)}
    environment.pop("JAX_COMPILATION_CACHE_DIR")
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(model)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    return run.stdout.split(maxsplit=2)


@pytest.mark.slow
def test_the_second_start_compiles_nothing(model_folder, tmp_path):
    model = model_folder("llama_gqa", num_hidden_layers=1)
    hits, misses, tokens = start(model, tmp_path)
    assert hits == "0" and int(misses) >= 3  # two programs and the device state
    assert start(model, tmp_path) == [misses, "0", tokens]
    (folder,) = (tmp_path / "jaxserve" / "xla").iterdir()
    assert folder.stat().st_mode & 0o077 == 0


def test_the_folder_is_of_this_machine(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = compilation_cache.default_folder()
    assert folder.parent == tmp_path / "jaxserve" / "xla"
    monkeypatch.setattr(compilation_cache.jaxlib, "__version__", "0.0.0")
    assert compilation_cache.default_folder() != folder


def test_a_folder_that_the_process_has_is_respected(tmp_path):
    assert compilation_cache.use("off") is None
    assert compilation_cache.use("auto") == Path(os.environ["JAX_COMPILATION_CACHE_DIR"])


def test_a_folder_that_cannot_be_made_is_an_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        compilation_cache.use(str(tmp_path / "file" / "cache"))
