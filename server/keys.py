"""API keys: the client of each, and its share of the server a minute."""

from __future__ import annotations

import hashlib
import math
import secrets
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from ipaddress import IPv6Address, IPv6Network, ip_address
from pathlib import Path
from typing import Any

from jaxserve.errors import ValidationError
from server.counts import Counts, Numbers

FLAG = "--api-keys-file"
INT64 = 2**63


@dataclass(frozen=True)
class ApiKey:
    """One key.

    Attributes:
        key: the secret; never shown.
        name: of whom it belongs to, for messages and logs.
        requests_per_minute, tokens_per_minute: what it may ask for; None: any number. Tokens are
            those of prompts and of what was generated.
        priority: the smallest goes first, where the policy is "priority"; a request may ask to go
            later, but not before that.
    """

    key: str
    name: str
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    priority: int = 0

    def __post_init__(self) -> None:
        for name in ("key", "name"):
            value = getattr(self, name)
            if not isinstance(value, str) or not value.strip():
                raise ValidationError(f"{FLAG}: {name}", "...", "text that is not empty")
        for name in ("requests_per_minute", "tokens_per_minute"):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < 1):
                raise ValidationError(f"{FLAG}: {name}", value, "an integer >= 1, or null")
        if type(self.priority) is not int or not -INT64 <= self.priority < INT64:
            raise ValidationError(f"{FLAG}: priority", self.priority, "an integer")

    def __repr__(self) -> str:
        return f"ApiKey({self.name!r})"


def read_keys(path: str) -> list[ApiKey]:
    """The keys of a YAML file: a list of mappings with the fields of `ApiKey`.

    Raises:
        ValidationError: it cannot be read, or is no such list; no key is repeated in the message.
    """
    import yaml

    try:
        entries = yaml.safe_load(Path(path).read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        # an error of YAML quotes the line that it does not like
        reason = error.strerror if isinstance(error, OSError) else type(error).__name__
        raise ValidationError(FLAG, path, f"a readable YAML file ({reason})") from None
    if not isinstance(entries, list) or not entries:
        raise ValidationError(FLAG, path, "a YAML list of keys")
    keys = [_key(entry, index, path) for index, entry in enumerate(entries)]
    for what in ("key", "name"):
        if len({getattr(one, what) for one in keys}) < len(keys):
            raise ValidationError(FLAG, path, f"a file in which no {what} comes twice")
    return keys


def _key(entry: Any, index: int, path: str) -> ApiKey:
    known = [field.name for field in fields(ApiKey)]
    if not isinstance(entry, dict) or not {"key", "name"} <= entry.keys():
        raise ValidationError(FLAG, path, f"a key and a name in entry {index}")
    unknown = sorted(map(str, entry.keys() - set(known)))
    if unknown:
        allowed = f"{', '.join(known)} in entry {index}, not {', '.join(unknown)[:100]}"
        raise ValidationError(FLAG, path, allowed)
    return ApiKey(**entry)


class Bucket:
    """What is left of a minute's allowance; it fills up evenly.

    Args:
        per_minute: the allowance, and the most that is left unused.
        clock: seconds; of several processes they count from the same moment.
        state: what is left, and when that was so, which processes may share; two zeros where
            nothing has been used yet; None: they are its own.
    """

    def __init__(
        self,
        per_minute: int,
        clock: Callable[[], float] = time.monotonic,
        state: Numbers | None = None,
    ):
        self._rate = per_minute / 60.0
        self._most = float(per_minute)
        self._clock = clock
        self._state: Numbers = [0.0, 0.0] if state is None else state
        if not (self._state[0] or self._state[1]):
            self._state[0], self._state[1] = self._most, clock()

    def wait(self, amount: float = 1.0) -> float:
        """Seconds until so much is left; 0 if it is now."""
        now, (left, then) = self._clock(), (self._state[0], self._state[1])
        left = min(self._most, left + (now - then) * self._rate)
        self._state[0], self._state[1] = left, now
        return max(0.0, (min(amount, self._most) - left) / self._rate)

    def take(self, amount: float) -> None:
        """Use so much, perhaps more than is left: then nothing is for a while."""
        self.wait()
        self._state[0] -= amount


class Client:
    """Whose key came with a request, and what is left for them.

    Args:
        key: theirs.
        counts: of the server; None: of no other.
        place: of the key among those of the server.
    """

    def __init__(self, key: ApiKey, counts: Counts | None = None, place: int = 0):
        self.name, self.priority = key.name, key.priority
        requests, tokens = key.requests_per_minute, key.tokens_per_minute
        self._counts = counts or Counts()
        states = [self._counts.quota(2 * place + one) for one in (0, 1)]
        self._requests = None if requests is None else Bucket(requests, state=states[0])
        self._tokens = None if tokens is None else Bucket(tokens, state=states[1])
        self._key = key

    @property
    def queue_name(self) -> str:
        """The name under which their requests wait, see `Queueing.client`."""
        return f"key:{self.name}"

    def refusal(self) -> tuple[str, int] | None:
        """Count a request; where it is one too many, which allowance is used up, and seconds."""
        if self._requests is None and self._tokens is None:
            return None
        with self._counts.alone():
            return self._refusal()

    def _refusal(self) -> tuple[str, int] | None:
        allowances = (
            ("requests", self._key.requests_per_minute, self._requests),
            ("tokens", self._key.tokens_per_minute, self._tokens),
        )
        for what, most, bucket in allowances:
            wait = 0.0 if bucket is None else bucket.wait()
            if wait > 0:
                return f"{self.name} may have {most} {what} a minute", math.ceil(wait)
        if self._requests is not None:
            self._requests.take(1)
        return None

    def check_choices(self, count: int, tokens: int) -> None:
        """Refuse several completions that may have more tokens than a minute's allowance.

        Args:
            count: completions of one request.
            tokens: of them and their prompts, at most.

        Raises:
            ValidationError: names `n`.
        """
        most = self._key.tokens_per_minute
        if most is not None and count > 1 and tokens > most:
            allowed = (
                f"completions of at most {most} tokens in all, a minute of {self.name}: "
                f"these may have {tokens}; lower n or max_tokens"
            )
            raise ValidationError("n", f"{count} completions", allowed)

    def used(self, tokens: int) -> None:
        """Count tokens of a prompt, or generated ones."""
        if self._tokens is not None:
            with self._counts.alone():
                self._tokens.take(tokens)


class KeyRing:
    """The keys of a server.

    Keys are compared by digest, all of them, in constant time.

    Args:
        keys: one or more.
        counts: of the server; None: of no other.
    """

    def __init__(self, keys: Sequence[ApiKey], counts: Counts | None = None):
        self._clients = [
            (_digest(key.key.encode()), Client(key, counts, place))
            for place, key in enumerate(keys)
        ]

    def named(self, queue_name: str) -> Client | None:
        """The client whose requests wait under a name; None: there is none."""
        return next((one for _, one in self._clients if one.queue_name == queue_name), None)

    def find(self, headers: Iterable[tuple[bytes, bytes]]) -> Client | None:
        """Whose key a request brings, as `Authorization: Bearer <key>` or `x-api-key: <key>`.

        Args:
            headers: names in lower case.
        """
        given: dict[bytes, bytes] = {}
        for name, value in headers:
            if name in (b"authorization", b"x-api-key"):
                given.setdefault(name, value)
        scheme, _, key = given.get(b"authorization", b"").partition(b" ")
        keys = [key.strip()] if scheme.lower() == b"bearer" else []
        keys += [given[b"x-api-key"]] if b"x-api-key" in given else []
        digests = [_digest(one) for one in keys]
        matches = [
            sum(secrets.compare_digest(digest, known) for digest in digests) > 0
            for known, _ in self._clients
        ]
        return self._clients[matches.index(True)][1] if any(matches) else None


def client_name(scope: Mapping[str, Any]) -> str:
    """The name of a request's client: of its API key, else its address; see `Queueing.client`.

    Args:
        scope: of ASGI, whose state has the `Client` of a key.
    """
    client: Client | None = scope.get("state", {}).get("client")
    if client is not None:
        return client.queue_name
    address = scope.get("client")
    return "" if address is None else address_name(address[0])


def address_name(address: str) -> str:
    """The name under which the requests of a client without a key wait; "" of a Unix socket.

    An IPv6 client may have any address of its network of 64 bits, which counts as one.
    """
    try:
        found = ip_address(address)
    except ValueError:  # of a Unix socket, or a test's own name
        return address
    if isinstance(found, IPv6Address) and found.ipv4_mapped is None:
        return str(IPv6Network((found, 64), strict=False).network_address)
    return str(found)


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
