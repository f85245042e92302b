"""How the processes of one engine find each other.

Process 0 listens at `coordinator`, the others connect. Before a message is read both sides show
that they have the secret, each by a keyed hash of the other's random number (HMAC, RFC 2104), so
the secret itself does not travel. Then each process says what it is (`Join`), and process 0
compares.
"""

from __future__ import annotations

import hmac
import logging
import queue
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing, suppress

from jaxserve.boundary.process_messages import Join, Joined
from jaxserve.errors import JaxServeError, MessageError
from jaxserve.processes.link import Link
from jaxserve.processes.wire import Channel, StartRefusal

logger = logging.getLogger(__name__)

JOIN_S = 25.0  # that process 0 waits for the others, and these for it
HELLO_S = 5.0  # for all of a greeting, and then for what a process says of itself
RETRY_S = 0.25
MOST_UNPROVEN = 64  # connections that are being greeted; what comes beyond has to come again
_GREETING, _NONCE, _PROOF = b"jaxserve/processes/1", 32, 32
_FIRST, _OTHER = b"process 0", b"another process"


class WrongToken(JaxServeError):
    """The other side has another secret."""


def gather(
    address: tuple[str, int],
    num_processes: int,
    own: Join,
    token: bytes,
    on_lost: Callable[[str], None],
    *,
    seconds: float = JOIN_S,
) -> dict[int, Link]:
    """In process 0: the other processes, by number, once all are there and like this one.

    Nothing listens any more when it returns or raises. A stranger who connects changes nothing. A
    process that was lost before all were there may come again.

    Args:
        address: host and port to listen at.
        num_processes: with this one.
        own: what this one is.
        token: the secret.
        on_lost: see `Link`.
        seconds: to wait.

    Raises:
        JaxServeError: the port is taken, a process did not come, or one is another than it has to
            be; the others that have come are told.
    """
    arrivals: queue.SimpleQueue[tuple[Channel, Join]] = queue.SimpleQueue()
    turned_away: list[str] = []
    unproven = threading.Semaphore(MOST_UNPROVEN)
    is_over = threading.Event()

    def welcome(stream: socket.socket) -> None:
        try:
            _greet_as_first(stream, token)
            stream.settimeout(HELLO_S)
            channel = Channel(stream)
            body = channel.receive()
            if isinstance(body, Join):
                stream.settimeout(None)
                return arrivals.put((channel, body))
            raise MessageError("it says nothing of itself")
        except (OSError, EOFError, JaxServeError) as error:
            turned_away.append(f"{type(error).__name__}: {error}")
            logger.warning("a connection to %s:%d was turned away: %s", *address, error)
            stream.close()
        finally:
            unproven.release()

    def accept() -> None:
        while not is_over.is_set():
            try:
                stream, _ = listener.accept()
            except OSError as error:  # of one connection, or no descriptor is left, or it is over
                if not is_over.wait(RETRY_S):
                    logger.warning("no connection to %s:%d can be taken: %s", *address, error)
                continue
            if not unproven.acquire(blocking=False):
                stream.close()
                continue
            name = "jaxserve-welcome"
            thread = threading.Thread(target=welcome, args=(stream,), name=name, daemon=True)
            try:
                thread.start()
            except RuntimeError as error:  # there are too many
                logger.warning("a connection to %s:%d was turned away: %s", *address, error)
                stream.close()
                unproven.release()

    family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
    try:
        listener = socket.create_server(address, family=family)
    except OSError as error:
        where = f"coordinator={_text(address)}"
        raise JaxServeError(f"{where}: process 0 cannot listen there: {error}") from error
    found: dict[int, Channel] = {}
    deadline = time.monotonic() + seconds
    with closing(listener), ExitStack() as unless_all:
        threading.Thread(target=accept, name="jaxserve-joining", daemon=True).start()
        try:
            while len(found) < num_processes - 1:
                try:
                    channel, join = arrivals.get(timeout=max(0.0, deadline - time.monotonic()))
                except queue.Empty:
                    text = _missing(num_processes, found, seconds, turned_away)
                    raise JaxServeError(text) from None
                unless_all.callback(channel.close)
                for lost in [number for number, one in found.items() if one.has_ended()]:
                    found.pop(lost).close()
                is_new = 0 < join.process_id < num_processes and join.process_id not in found
                found[join.process_id if is_new else -1] = channel  # it is told too
                _compare(own, join)
                if not is_new:
                    text = f"process_id={join.process_id}: that process is there already"
                    raise JaxServeError(text)
            links = _links(found, on_lost)
        except JaxServeError as error:
            for channel in found.values():
                with suppress(OSError):
                    channel.send(StartRefusal(str(error)))
            raise
        finally:
            is_over.set()
            with suppress(OSError):  # wakes `accept`
                listener.shutdown(socket.SHUT_RDWR)
        unless_all.pop_all()
    return links


def join(
    address: tuple[str, int],
    own: Join,
    token: bytes,
    on_lost: Callable[[str], None],
    *,
    seconds: float = JOIN_S,
) -> tuple[Link, Joined]:
    """In another process: process 0, once it has found all processes alike.

    Args: see `gather`.

    Raises:
        JaxServeError: it cannot be reached, has another secret, or says why it cannot be.
    """
    where = f"coordinator={_text(address)}"
    deadline = time.monotonic() + seconds
    while True:
        try:
            stream = socket.create_connection(address, timeout=HELLO_S)
            try:
                _greet_as_other(stream, token)
                break
            except BaseException:
                stream.close()
                raise
        except WrongToken as error:
            raise JaxServeError(f"process_token_file: {where} has another secret") from error
        except (OSError, EOFError, MessageError) as error:
            if time.monotonic() > deadline:
                text = f"{where}: process 0 was not reached within {seconds:.0f} s ({error})"
                raise JaxServeError(text) from error
            time.sleep(RETRY_S)
    channel = Channel(stream)
    try:
        stream.settimeout(seconds + HELLO_S)  # it waits for the others
        channel.send(own)
        body = channel.receive()
        stream.settimeout(None)
    except OSError as error:
        channel.close()
        raise JaxServeError(f"{where}: process 0 was lost: {error}") from error
    if isinstance(body, Joined):
        return Link(channel, "process 0", on_lost), body
    channel.close()
    why = body.text if isinstance(body, StartRefusal) else "its connection has ended"
    raise JaxServeError(f"process 0: {why}")


def _links(found: Mapping[int, Channel], on_lost: Callable[[str], None]) -> dict[int, Link]:
    return {number: Link(one, f"process {number}", on_lost) for number, one in found.items()}


def _compare(own: Join, other: Join) -> None:
    """Raises JaxServeError that names the first difference."""
    for mine, its in ((own.versions, other.versions), (own.settings, other.settings)):
        for name in sorted(mine.keys() | its.keys()):
            first, second = mine.get(name, "none"), its.get(name, "none")
            if first != second:
                raise JaxServeError(
                    f"{name}: process {other.process_id} has {second} and process 0 has {first}, "
                    "and all need the same"
                )


def _missing(
    num_processes: int, found: Mapping[int, Channel], seconds: float, turned_away: list[str]
) -> str:
    absent = ", ".join(str(one) for one in range(1, num_processes) if one not in found)
    away = f" ({len(turned_away)} turned away, the last: {turned_away[-1]})" if turned_away else ""
    return f"num_processes={num_processes}: no process {absent} came within {seconds:.0f} s{away}"


def _greet_as_first(stream: socket.socket, token: bytes) -> None:
    deadline, nonce = time.monotonic() + HELLO_S, secrets.token_bytes(_NONCE)
    stream.settimeout(HELLO_S)
    stream.sendall(_GREETING + nonce)
    answer = _exactly(stream, _NONCE + _PROOF, deadline)
    theirs, proof = answer[:_NONCE], answer[_NONCE:]
    is_right = hmac.compare_digest(proof, _proof(token, _OTHER, nonce, theirs))
    stream.sendall(_proof(token, _FIRST, theirs, nonce) if is_right else bytes(_PROOF))
    if not is_right:
        raise WrongToken("it has another secret (process_token_file)")


def _greet_as_other(stream: socket.socket, token: bytes) -> None:
    deadline = time.monotonic() + HELLO_S
    greeting = _exactly(stream, len(_GREETING) + _NONCE, deadline)
    if not greeting.startswith(_GREETING):
        raise MessageError("something else answers there")
    theirs, nonce = greeting[len(_GREETING) :], secrets.token_bytes(_NONCE)
    stream.sendall(nonce + _proof(token, _OTHER, theirs, nonce))
    proof = _exactly(stream, _PROOF, deadline)
    if not hmac.compare_digest(proof, _proof(token, _FIRST, nonce, theirs)):
        raise WrongToken("it has another secret")


def _proof(token: bytes, role: bytes, asked: bytes, given: bytes) -> bytes:
    return hmac.digest(token, role + asked + given, "sha256")


def _exactly(stream: socket.socket, count: int, deadline: float) -> bytes:
    found = b""
    while len(found) < count:
        left = deadline - time.monotonic()
        if left <= 0.0:
            raise TimeoutError("it was too slow")
        stream.settimeout(left)
        part = stream.recv(count - len(found))
        if not part:
            raise EOFError("the connection has ended")
        found += part
    return found


def _text(address: tuple[str, int]) -> str:
    host, port = address
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
