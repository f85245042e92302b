"""schemathesis against our own document: no 5xx, and answers are as it says."""

from __future__ import annotations

import pytest
from starlette.testclient import TestClient

from server.app import create_app
from server.options import Options
from tests.server.fake_controls import FakeControls
from tests.server.fake_engine import FakeEngine

schemathesis = pytest.importorskip("schemathesis", reason="needs the extra `test`")
hypothesis = pytest.importorskip("hypothesis")

pytestmark = pytest.mark.slow
EXAMPLES = 8  # an operation


class Lasting(FakeEngine):
    """The application is started and ended for each case."""

    async def shutdown(self) -> None:
        """It goes on."""


APP = create_app(
    Lasting("ok", enable_embeddings=True),
    options=Options(
        tracks_load=True, tells_tokenizer=True, has_control_routes=True, profile_folder="/folder"
    ),
)
APP.state.service.controls = FakeControls()
schema = schemathesis.openapi.from_dict(TestClient(APP).get("/openapi.json").json())
schema.app = APP


@schema.parametrize()
@hypothesis.settings(
    max_examples=EXAMPLES,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(hypothesis.HealthCheck),
)
def test_answers_are_as_the_document_says(case) -> None:
    response = case.call()
    case.validate_response(
        response,
        checks=[
            schemathesis.checks.not_a_server_error,
            schemathesis.checks.status_code_conformance,
            schemathesis.checks.content_type_conformance,
            schemathesis.checks.response_schema_conformance,
        ],
    )
