"""Messages as strict JSON: what cannot cross a process fails here."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from pydantic import TypeAdapter

from jaxserve.boundary.messages import Abort, AddGroup, Body, Control, FirstSteps, StepOutput
from jaxserve.boundary.reports import REPORTS

BODIES: dict[str, Any] = {
    kind.kind: TypeAdapter(kind) for kind in (AddGroup, Abort, FirstSteps, Control, StepOutput)
}
REPORT_TYPES = {name: TypeAdapter(kind) for name, kind in REPORTS.items()}


def encode(body: Body) -> bytes:
    return body.kind.encode() + b"\n" + BODIES[body.kind].dump_json(body, warnings="error")


def decode(data: bytes) -> Any:
    kind, body = data.split(b"\n", 1)
    found = BODIES[kind.decode()].validate_json(body, strict=True)
    if isinstance(found, StepOutput):
        reports = {n: REPORT_TYPES[n].validate_python(told) for n, told in found.reports.items()}
        found = replace(found, reports=reports)
    return found
