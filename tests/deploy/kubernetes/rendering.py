"""The chart as Helm renders it, by Helm's own library (the package helm-python-sdk)."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest
import yaml

from tests.server.server_process import ROOT

KUBERNETES = ROOT / "deploy" / "kubernetes"
CHART = KUBERNETES / "jaxserve"
PRESETS = {file.stem: file for file in sorted((KUBERNETES / "presets").glob("*.yaml"))}
needs_helm = pytest.mark.skipif(
    find_spec("helm_python") is None, reason="needs helm-python-sdk (the extra `test`)"
)


def preset(name: str) -> dict[str, Any]:
    """The values of a file in presets/."""
    values: dict[str, Any] = yaml.safe_load(PRESETS[name].read_text())
    return values


def render(values: dict[str, Any], release: str = "chat") -> list[dict[str, Any]]:
    """All objects that a release has, as `helm install` sends them.

    Args:
        values: in the place of the chart's own, or into its objects.
        release: its name.

    Raises:
        HelmError: a value is not allowed; Helm's own message.
    """
    import helm_python

    with helm_python.Chart.load(str(CHART)) as chart:
        chart.validate_schema(values)
        files = chart.render(values, name=release, namespace="models")
    found = []
    for name, text in files.items():
        if name.endswith(".yaml"):
            found += [one for one in yaml.safe_load_all(text) if one is not None]
    return found


def of_kind(objects: list[dict[str, Any]], kind: str) -> dict[str, Any]:
    """The one object of a kind."""
    (found,) = [one for one in objects if one["kind"] == kind]
    return found
