"""Which replica a request goes to, by its body: policy alone, without Ray.

The front has no tokenizer: a page of a prompt is here a piece of its text, whose key names all text
up to its end.
"""

from __future__ import annotations

import hashlib
import logging
import re
import threading
from collections.abc import Collection, Hashable, Sequence
from typing import Any, Generic, NamedTuple, TypeVar
from weakref import WeakKeyDictionary

from pydantic_core import from_json

from jaxserve.isolation.routing import Routing
from jaxserve.memory.page_keys import page_keys, root_key
from server.on_ray.forwarding import Forwarded
from server.protocol.responses import dumps

logger = logging.getLogger("jaxserve.server")

Replica = TypeVar("Replica", bound=Hashable)

BYTES_A_TOKEN = 4  # of text, about
TOKENS_A_KEY = 16
MOST_BYTES = 2**18  # of a prompt that are looked at
MOST_OUTPUT = 128  # tokens that are expected of an answer: most end before their `max_tokens`
# Fields of the APIs that prompts are made of, in the order in which templates have them.
PARTS = ("tools", "system", "instructions", "prompt", "messages", "input", "query", "documents")
LIMITS = ("max_tokens", "max_completion_tokens", "max_output_tokens")  # by the APIs' names
# Files in JSON, as `data:` URLs or as Anthropic's API has them: their text is no prompt.
_FILE = re.compile(
    r'(?<=[:,\[])"data:[^",\\]{0,256};base64,[^"\\]*"|(?<="data":)"[A-Za-z0-9+/=]{64,}"'
)


class Prompt(NamedTuple):
    """What the choice reads of a request.

    Attributes:
        keys: of the pieces of its prompt.
        num_tokens: of the prompt, about.
        num_output: that are expected.
    """

    keys: Sequence[bytes]
    num_tokens: int
    num_output: int


NO_PROMPT = Prompt((), 0, 0)


def prompt_of(body: bytes) -> Prompt:
    """The prompt of a body; an empty one of a body that the replica will refuse."""
    try:
        asked = from_json(body, allow_inf_nan=False)
        if not isinstance(asked, dict):
            return NO_PROMPT
        # 1e999 is read as infinity, which is no text
        text = "".join(_text(asked[name]) for name in PARTS if name in asked).encode()
        salt = asked.get("cache_salt")
        root = root_key([salt] if isinstance(salt, str) else [])
        keys = page_keys(list(text[:MOST_BYTES]), BYTES_A_TOKEN * TOKENS_A_KEY, root)
    except ValueError:
        return NO_PROMPT
    given = next((asked[name] for name in LIMITS if asked.get(name) is not None), MOST_OUTPUT)
    output = max(0, min(given, MOST_OUTPUT)) if type(given) is int else MOST_OUTPUT
    return Prompt(keys, len(text) // BYTES_A_TOKEN, output)


class Prompts:
    """Prompts of requests, each made once: Ray asks again and again where all replicas are full.

    They are kept as long as their requests are, and are no larger than those.
    """

    def __init__(self) -> None:
        self._kept = WeakKeyDictionary[Forwarded, Prompt]()
        self._has_failed = False

    def of(self, asked: Forwarded) -> Prompt:
        """The prompt of a request; an empty one where making it fails.

        Ray would leave the request without an answer if this raised.
        """
        prompt = self._kept.get(asked)
        if prompt is None:
            try:
                prompt = prompt_of(asked.body)
            except Exception:
                prompt = NO_PROMPT
                if not self._has_failed:
                    logger.exception("a request is sent on without regard to its prompt")
                self._has_failed = True
            self._kept[asked] = prompt
        return prompt


class Choice(Generic[Replica]):
    """Chooses among replicas, which come and go. Used by several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._routing = Routing[Replica](TOKENS_A_KEY)
        self._known = set[Replica]()
        # requests that have not ended: whose, and tokens that it has to compute
        self._running: dict[str, tuple[Replica, int]] = {}

    def choose(self, name: str, replicas: Collection[Replica], prompt: Prompt) -> Sequence[Replica]:
        """Replicas for a request, the best first, which counts as having it.

        Args:
            name: of the request; one that is asked about again is with the first no more.
            replicas: that there are.
            prompt: its.
        """
        with self._lock:
            for gone in self._known - set(replicas):
                self._routing.forget(gone)
            self._known = set(replicas)
            self._running.pop(name, None)
            work = dict.fromkeys(replicas, 0.0)
            for replica, tokens in self._running.values():
                if replica in work:
                    work[replica] += tokens
            found = {one: self._routing.num_found(one, prompt.keys) for one in work}
            # of equals the one that was chosen longest ago: no request is of the same client
            best = self._routing.choose(work, prompt.num_tokens, prompt.keys, client=name)
            new = prompt.num_tokens - found[best] * TOKENS_A_KEY
            self._running[name] = best, new + prompt.num_output
            return sorted(replicas, key=lambda one: (one != best, work[one]))

    def moved(self, name: str, replica: Replica) -> None:
        """A request has gone to this replica, perhaps another than the best."""
        with self._lock:
            if name in self._running:
                self._running[name] = replica, self._running[name][1]

    def ended(self, name: str, replica: Replica | None = None) -> None:
        """A request has ended, or has left the replica; None: wherever it is."""
        with self._lock:
            if name in self._running and replica in (None, self._running[name][0]):
                del self._running[name]


def _text(part: Any) -> str:
    """A part of the prompt; files have a digest in their place."""
    return part if isinstance(part, str) else _FILE.sub(_digest, dumps(part))


def _digest(file: re.Match[str]) -> str:
    return hashlib.blake2b(file[0].encode(), digest_size=16).hexdigest()
