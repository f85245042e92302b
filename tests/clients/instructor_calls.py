"""Calls a server with instructor: python instructor_calls.py URL."""

from __future__ import annotations

import sys
from typing import Annotated

import instructor
import openai
from pydantic import BaseModel, Field


class Sum(BaseModel, extra="forbid"):
    left: Annotated[int, Field(ge=0, le=99)]
    right: Annotated[int, Field(ge=0, le=99)]


def main(url: str) -> None:
    for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
        plain = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        client = instructor.from_openai(plain, mode=mode)
        found = client.chat.completions.create(
            model="tiny",
            response_model=Sum,
            messages=[{"role": "user", "content": "2 + 3"}],
            max_tokens=100,
            max_retries=1,
        )
        assert isinstance(found, Sum), mode


if __name__ == "__main__":
    main(sys.argv[1])
    print("ok")
