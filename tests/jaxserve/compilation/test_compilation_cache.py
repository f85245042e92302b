"""Compiled programs are found again by the next process, and only by one on the same machine."""

from __future__ import annotations

import os
import textwrap
from pathlib import Path

import pytest

from jaxserve.compilation import compilation_cache
from jaxserve.compilation.cache_format import cache_format
from jaxserve.errors import ValidationError
from pallas_kernels.native import own_folder
from pallas_kernels.native.build import cache_folder
from tests.command_line import output_of
from tests.jaxserve.compilation.test_cache_bounds import named
from tests.jaxserve.compilation.test_cache_format import entry_of, zlib_alone, zstandard_installed

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
    return output_of("-c", PROGRAM, str(model), env=environment).split(maxsplit=2)


@pytest.mark.slow
def test_the_second_start_compiles_nothing(model_folder, tmp_path):
    native = cache_folder()  # the C++ kernels lie there too, and take longer than all programs
    if native.exists():
        (tmp_path / "jaxserve").mkdir()
        (tmp_path / "jaxserve" / native.name).symlink_to(native)
    model = model_folder("llama_gqa", num_hidden_layers=1)
    hits, misses, tokens = start(model, tmp_path)
    assert hits == "0" and int(misses) >= 3  # two programs and the device state
    assert start(model, tmp_path) == [misses, "0", tokens]
    (folder,) = (tmp_path / "jaxserve" / "xla").iterdir()
    assert folder.stat().st_mode & 0o077 == 0


def test_the_folder_is_of_this_machine(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = compilation_cache.default_folder(cache_format().compression)
    assert folder.parent == tmp_path / "jaxserve" / "xla"
    monkeypatch.setattr(compilation_cache.jaxlib, "__version__", "0.0.0")
    assert compilation_cache.default_folder(cache_format().compression) != folder


def test_a_folder_that_the_process_has_is_respected():
    assert compilation_cache.use("auto") == Path(os.environ["JAX_COMPILATION_CACHE_DIR"])


SWITCHING = textwrap.dedent(
    """
    import os, sys
    import jax, jax.numpy as jnp
    from jaxserve.compilation import cache_bounds, compilation_cache
    for number, setting in enumerate([sys.argv[1], "off", sys.argv[1]]):
        compilation_cache.use(setting)
        before = len(os.listdir(sys.argv[1]))
        jax.jit(lambda x: jnp.cos(x) * (number + 0.5))(jnp.ones(3)).block_until_ready()
        print(len(os.listdir(sys.argv[1])) > before)
    written = [one for one in os.listdir(sys.argv[1]) if one.startswith("jit_")]
    print(len(written), all(map(cache_bounds.PROGRAMS.entries.fullmatch, written)))
    """
)


def test_off_is_off_even_where_the_process_has_a_folder(tmp_path):
    *grown, count, are_entries = output_of("-c", SWITCHING, str(tmp_path)).split()
    assert grown == ["True", "False", "True"]
    assert int(count) >= 2 and are_entries == "True", "what is cleared is named as JAX names it"


def test_a_folder_that_cannot_be_made_is_an_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValidationError, match=r"compilation_cache=.*file"):
        compilation_cache.use(str(tmp_path / "file" / "cache"))


def test_a_torn_entry_is_removed_once(tmp_path, caplog):
    own_folder.make(tmp_path)
    whole, torn = (tmp_path / named(name) for name in ("whole", "torn"))
    for path in (whole, torn):
        path.write_bytes(entry_of(bytes(range(256)) * 50))
    assert compilation_cache.remove_torn(tmp_path, cache_format()) == []
    torn.write_bytes(torn.read_bytes()[:-20])
    assert compilation_cache.remove_torn(tmp_path, cache_format()) == [torn.name]
    assert whole.exists() and not torn.exists()
    assert "removed 1 unreadable" in caplog.text
    assert compilation_cache.remove_torn(tmp_path, cache_format()) == []


def test_what_looks_torn_but_is_not_ours_stays(tmp_path):
    for folder, names in ((tmp_path, [named("theirs")]), (tmp_path / "own", ["pip-cache"])):
        if folder is not tmp_path:
            own_folder.make(folder)
            (folder / named("link")).symlink_to(tmp_path / named("theirs"))
        for name in names:
            (folder / name).write_text("hello")
        assert compilation_cache.remove_torn(folder, cache_format()) == []
        assert all((folder / name).exists() for name in names)
    assert (tmp_path / "own" / named("link")).is_symlink()
    assert not (tmp_path / compilation_cache.WHOLE).exists()


def test_a_whole_entry_is_read_once(tmp_path, monkeypatch):
    own_folder.make(tmp_path)
    (tmp_path / named("f")).write_bytes(entry_of(b"code"))
    compilation_cache.remove_torn(tmp_path, cache_format())
    monkeypatch.setattr(Path, "read_bytes", lambda path: pytest.fail(f"{path} is read again"))
    assert compilation_cache.remove_torn(tmp_path, cache_format()) == []
    assert (tmp_path / named("f")).exists()


def test_the_folder_is_of_how_jax_compresses(monkeypatch, tmp_path):
    """Two environments of one user: one has zstandard, the other has not."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folders = []
    for environment in (zlib_alone, zstandard_installed, zlib_alone):
        with environment():
            folders.append(compilation_cache.default_folder(cache_format().compression))
    assert folders[0] == folders[2] != folders[1]


def test_entries_of_another_environment_stay_in_a_folder_that_both_were_given(tmp_path, caplog):
    own_folder.make(tmp_path)
    for environment in (zlib_alone, zstandard_installed):
        with environment():
            for name in ("whole", "torn"):
                entry = entry_of(bytes(range(256)) * 50)
                path = tmp_path / named(f"{environment.__name__}-{name}")
                path.write_bytes(entry if name == "whole" else entry[:-20])
    with zlib_alone():
        assert compilation_cache.remove_torn(tmp_path, cache_format()) == [named("zlib_alone-torn")]
    assert "2 entries" in caplog.text and "this one writes zlib" in caplog.text
    with zstandard_installed():
        assert compilation_cache.remove_torn(tmp_path, cache_format()) == [
            named("zstandard_installed-torn")
        ]
    left = sorted(path.name for path in tmp_path.glob("*-cache"))
    assert left == [named("zlib_alone-whole"), named("zstandard_installed-whole")]
