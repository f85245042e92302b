"""The crossover of the native products, and its command."""

from __future__ import annotations

import pytest

from benchmarks import native_crossover as command
from pallas_kernels import native
from pallas_kernels.native.paths import Path


def test_the_crossover_is_where_it_stays_faster():
    table = {
        1: {Path.DOTS: 1.0, Path.TILES: 2.0},
        4: {Path.DOTS: 2.0, Path.TILES: 1.9},  # noise
        8: {Path.DOTS: 2.0, Path.TILES: 2.1},
        16: {Path.DOTS: 4.0, Path.TILES: 2.1},
        32: {Path.DOTS: 8.0, Path.TILES: 2.1},
    }
    assert command.crossover(table, Path.DOTS, Path.TILES) == 16
    assert command.crossover(table, Path.TILES, Path.DOTS) is None


@pytest.mark.slow
def test_the_command_prints_limits(capsys):
    if not native.availability().available:
        pytest.skip(f"native kernels: {native.availability().reason}")
    words = ["--depth", "128", "--outputs", "32", "--rows", "1", "16", "--rounds", "1"]
    assert command.main([*words, "--weight-mib", "1"]) == 0
    out = capsys.readouterr().out
    for kind in command.TYPES:
        assert f"{kind}, K 128, N 32" in out
    assert "lanes rather than dots:" in out


def test_a_depth_without_whole_groups_is_refused():
    with pytest.raises(SystemExit):
        command.main(["--depth", "100"])
