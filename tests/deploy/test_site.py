"""The site has all pages, and is built without a warning."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

import jaxserve

ROOT = Path(__file__).resolve().parents[2]
CONFIG = ROOT / "deploy" / "site" / "mkdocs.yml"
BUILD_S = 300


def _pages(nav: list[Any]) -> set[str]:
    found: set[str] = set()
    for entry in nav:
        for inner in entry.values() if isinstance(entry, dict) else [entry]:
            found |= _pages(inner) if isinstance(inner, list) else {inner}
    return found


def test_every_page_has_a_place() -> None:
    docs = ROOT / "docs"
    pages = _pages(yaml.safe_load(CONFIG.read_text())["nav"])
    assert {str(page.relative_to(docs)) for page in docs.rglob("*.md")} <= pages


@pytest.mark.slow
def test_the_site_is_built(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs", reason="needs the extra `docs`")
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "-f", str(CONFIG), "-d", str(tmp_path)],
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=BUILD_S,
    )
    said = built.stdout + built.stderr
    assert built.returncode == 0 and "WARNING" not in said, said
    for name in jaxserve.__all__:
        assert f"jaxserve.{name}" in (tmp_path / "reference" / name / "index.html").read_text()
    llm = (tmp_path / "reference" / "LLM" / "index.html").read_text()
    assert "update_weights" in llm and 'name="viewport"' in llm
    # a link to a file outside docs/ leads to its page
    assert 'href="../bundled_model/"' in (tmp_path / "tools" / "index.html").read_text()
