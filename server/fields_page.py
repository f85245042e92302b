"""docs/http_fields.md: every field of OpenAI's and vLLM's requests, and what becomes of it.

`python -m server.fields_page` prints the page.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from server.protocol.chat import ChatCompletionRequest
from server.protocol.completions import CompletionRequest
from server.protocol.embed_v2 import EmbedV2Request
from server.protocol.pooling import ClassifyRequest, EmbeddingRequest, PoolingRequest
from server.protocol.requests import ModelRequest
from server.protocol.scoring import RerankRequest, ScoreRequest
from server.protocol.unsupported import KNOWN, NEUTRAL, Refusal, refusals

MODELS: dict[str, type[ModelRequest]] = {
    "chat": ChatCompletionRequest,
    "completions": CompletionRequest,
    "embeddings": EmbeddingRequest,
    "pooling": PoolingRequest,
    "classify": ClassifyRequest,
    "score": ScoreRequest,
    "rerank": RerankRequest,
    "embed_v2": EmbedV2Request,
}
PATHS = {
    "chat": "/v1/chat/completions",
    "completions": "/v1/completions",
    "embeddings": "/v1/embeddings",
    "pooling": "/pooling",
    "classify": "/classify",
    "score": "/score",
    "rerank": "/rerank",
    "embed_v2": "/v2/embed",
}
HEAD = """# Fields of requests

Made from `server/protocol/` by

```bash
python -m server.fields_page
```

Every field of OpenAI's API and of vLLM's extras is in one of three lists: implemented; accepted
with any value, because it has no effect on the answer; or refused with a 400 that names it, unless
its value asks for nothing (null, or what is said here). Fields that neither API knows are accepted
and not read, as in vLLM.
"""


def implemented(kind: str) -> set[str]:
    """Fields that a kind of request declares."""
    return set(MODELS[kind].model_fields)


def page() -> str:
    """The whole page."""
    parts = [HEAD]
    for kind, path in PATHS.items():
        names = {name for known in KNOWN[kind].values() for name in known}
        own = implemented(kind)
        parts.append(f"\n## `{path}`\n\n### Implemented\n")
        for api, known in KNOWN[kind].items():
            parts.append(f"\n{_TITLES[api]}: {_listed(set(known) & own)}.\n")
        parts.append(f"\njaxserve's own: {_listed(own - names)}.\n")
        rows = [(f"`{name}`", NEUTRAL[name]) for name in sorted(names & NEUTRAL.keys())]
        parts.append("\n### Accepted, without effect\n\n" + _table(("field", "because"), rows))
        refused = refusals(kind)
        asked = sorted((names & refused.keys()) - own)
        cells = [_refused(name, refused[name]) for name in asked]
        head = ("field", "accepted beside null", "because, or instead")
        parts.append("\n### Refused\n\n" + _table(head, cells))
    return "".join(parts)


_TITLES = {"openai": "OpenAI's", "vllm": "vLLM's"}


def _refused(name: str, refusal: Refusal) -> tuple[str, ...]:
    return f"`{name}`", ", ".join(f"`{json.dumps(value)}`" for value in refusal.values), refusal.why


def _listed(names: set[str]) -> str:
    return ", ".join(f"`{name}`" for name in sorted(names)) or "none"


def _table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    lines = [head, tuple("---" for _ in head), *rows]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


if __name__ == "__main__":
    print(page(), end="")
