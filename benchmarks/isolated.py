"""Work in a child process that may crash or hang without taking the caller along.

A new GPU kernel can wait for ever or poison its process with an illegal access. The caller gives a
child one JSON request at a time, waits for one JSON answer, and replaces the child when none comes.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

DEATH_LIMIT_S = 20  # after a child was killed
TAIL = 1500  # characters of a dead child's last output that its failure quotes


def importing_from(folder: Path) -> dict[str, str]:
    """The variable of a child by which it also imports from a folder, first of all."""
    others = os.environ.get("PYTHONPATH")
    return {"PYTHONPATH": os.pathsep.join(filter(None, (str(folder), others)))}


class WorkerError(RuntimeError):
    """The request was not answered; the message says why.

    Attributes:
        lost: whether the process is gone as well, and another one must be started.
    """

    def __init__(self, reason: str, lost: bool = False):
        super().__init__(reason)
        self.lost = lost


class Worker:
    """A child process that answers requests; started when first asked, again after it failed."""

    def __init__(self, command: Sequence[str], environment: dict[str, str] | None = None):
        """The command of the child, and what it has in its environment besides our own."""
        self._command = list(command)
        self._environment = environment or {}
        self._process: subprocess.Popen[bytes] | None = None
        self._log: BinaryIO | None = None
        self._buffer = b""

    def call(self, request: Any, limit_s: float) -> Any:
        """The answer to one request.

        Raises:
            WorkerError: the child raised, died, or did not answer in time (then it is ended).
        """
        process = self._started()
        assert process.stdin is not None
        try:
            process.stdin.write(json.dumps(request).encode() + b"\n")
            process.stdin.flush()
        except BrokenPipeError:
            raise WorkerError(self._ended("the process died"), lost=True) from None
        line = self._line(process, time.monotonic() + limit_s)
        if line is None:
            raise WorkerError(self._ended(f"no answer within {limit_s:.0f} s"), lost=True)
        if not line:
            raise WorkerError(self._ended("the process died"), lost=True)
        answer = json.loads(line)
        if answer["failure"] is None:
            return answer["value"]
        if answer["poisoned"]:
            self.close()
        raise WorkerError(answer["failure"], lost=answer["poisoned"])

    def close(self) -> None:
        """Ends the child; the next call starts another."""
        if self._process is not None:
            self._process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):  # a kernel without end holds it
                self._process.wait(DEATH_LIMIT_S)
            for pipe in (self._process.stdin, self._process.stdout, self._log):
                if pipe is not None:
                    try:
                        pipe.close()
                    except BrokenPipeError:
                        continue  # the request that the dead child never read
        self._process, self._log, self._buffer = None, None, b""

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            self._log = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the child
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._log,
                env=os.environ | self._environment,
            )
        return self._process

    def _line(self, process: subprocess.Popen[bytes], deadline: float) -> bytes | None:
        """The next line; None when the time is up, empty when the child is gone."""
        assert process.stdout is not None
        descriptor = process.stdout.fileno()
        while b"\n" not in self._buffer:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([descriptor], [], [], left)[0]:
                return None
            read = os.read(descriptor, 1 << 16)
            if not read:
                return b""
            self._buffer += read
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line

    def _ended(self, reason: str) -> str:
        assert self._process is not None and self._log is not None
        status = self._process.poll()
        if status is None and "died" in reason:
            status = self._process.wait()
        if status is not None:
            reason += f" with exit status {status}"
        self._log.seek(0)
        tail = " ".join(self._log.read().decode(errors="replace").split())[-TAIL:]
        self.close()
        return f"{reason}; its last output: {tail}" if tail else reason


class Inline:
    """The same interface with the work done in this process: for dry runs and tests."""

    def __init__(self, answer: Callable[[Any], Any]):
        self._answer = answer

    def call(self, request: Any, limit_s: float) -> Any:
        """The answer; whatever the work raises becomes a WorkerError. There is no time limit."""
        del limit_s
        try:
            # through JSON as a child would send it: both ways give the same types
            return json.loads(json.dumps(self._answer(json.loads(json.dumps(request)))))
        except Exception as error:
            traceback.print_exc()
            raise WorkerError(describe(error)) from error

    def close(self) -> None:
        """Ends what the work holds, if it says how."""
        getattr(self._answer, "close", lambda: None)()


def describe(error: BaseException) -> str:
    """The type and the first lines of an exception, short enough for a table."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}"[:400]


def with_causes(error: BaseException | None) -> Iterator[BaseException]:
    """An exception, what it was raised from, and so on."""
    while error is not None:
        yield error
        error = error.__cause__


def serve(answer: Callable[[Any], Any], poisonous: tuple[type[BaseException], ...] = ()) -> None:
    """The child's loop: one request a line on standard input until it ends.

    Args:
        answer: from a request to something that JSON can hold.
        poisonous: exceptions after which this process is not to be used again, such as the
            device's errors; also as the cause of another, such as the engine's.
    """
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what libraries print is not an answer
    for line in sys.stdin:
        reply: dict[str, Any] = {"value": None, "failure": None, "poisoned": False}
        try:
            reply["value"] = answer(json.loads(line))
            encoded = json.dumps(reply)
        except Exception as error:
            traceback.print_exc()
            reply = {
                "value": None,
                "failure": describe(error),
                "poisoned": any(isinstance(one, poisonous) for one in with_causes(error)),
            }
            encoded = json.dumps(reply)
        answers.write(encoded.encode() + b"\n")
        answers.flush()
