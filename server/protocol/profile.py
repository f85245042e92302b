"""`/start_profile`: the request."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict


class StartProfileRequest(BaseModel):
    """Body of `POST /start_profile`, which may have none.

    Benchmarks send their usual bodies, of which the other fields are passed over.
    """

    model_config = ConfigDict(strict=True)

    profile_prefix: str | None = None
    delay_iterations: int | None = None
    max_iterations: int | None = None
    profiler_kwargs: dict[str, Any] | None = None
