"""Pages of the site that are not in `docs/`: what lies elsewhere, and the reference of the API.

A hook of MkDocs (https://www.mkdocs.org/user-guide/configuration/#hooks).
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

import jaxserve

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
ELSEWHERE = {  # name in the site -> file
    "index.md": ROOT / "README.md",
    "contributing.md": ROOT / "CONTRIBUTING.md",
    "bundled_model.md": ROOT / "checkpoints" / "tiny" / "README.md",
    "bundled_picture_model.md": ROOT / "checkpoints" / "pictures" / "README.md",
}
MODULES = {  # page of the reference -> what it describes beside the names of `jaxserve`
    "functional": "jaxserve.functional",
    "probes": "jaxserve.params.probes",
    "kernels": "pallas_kernels",
}
LINK = re.compile(r"(\]\()([^):\s#]+)")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """The reference is the last entry of the navigation."""
    assert config.nav is not None
    config.nav.append({"Reference": [{name: page} for name, page in _reference().items()]})
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages."""
    for page, source in ELSEWHERE.items():
        files.append(File.generated(config, page, abs_src_path=str(source)))
    for name, page in _reference().items():
        described = MODULES.get(name, f"jaxserve.{name}")
        files.append(File.generated(config, page, content=f"# {name}\n\n::: {described}\n"))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Links lead to where the files are in the site."""
    source = ELSEWHERE.get(page.file.src_uri, DOCS / page.file.src_uri)
    if not source.exists():
        return markdown
    here = Path(page.file.src_uri).parent
    elsewhere = {file: name for name, file in ELSEWHERE.items()}

    def moved(link: re.Match[str]) -> str:
        target = (source.parent / link[2]).resolve()
        name = elsewhere.get(target)
        if name is None and target.is_relative_to(DOCS):
            name = str(target.relative_to(DOCS))
        return link[1] + (link[2] if name is None else os.path.relpath(name, here))

    return LINK.sub(moved, markdown)


def _reference() -> dict[str, str]:
    """Name of each page of the reference, and its file."""
    return {name: f"reference/{name}.md" for name in [*sorted(jaxserve.__all__), *MODULES]}
