"""The parent's end of a worker: starts it, asks it, ends it."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

from benchmarks.peers.signals import held_back


class WorkerError(Exception):
    """The worker cannot start or did not do what it was asked; the message is the row's reason."""


class Worker:
    """One engine's process, in a process group of its own, stopped while it has nothing to do.

    Stopped, because some engines poll while they wait, at the cost of the one that is timed.

    `start` starts it; a `Worker` that an error or a signal leaves half started can be closed.

    Args:
        command: program and arguments that speak the protocol of `worker.py`.
        folder: working directory, where the package `benchmarks` is found.
        log: file that takes what the engine prints.
        environment: variables on top of this process's own.
        timeout: seconds that one answer may take, the start included.
    """

    def __init__(
        self,
        command: list[str],
        folder: Path,
        log: Path,
        timeout: float,
        environment: dict[str, str] | None = None,
    ):
        self._command, self._folder, self._log = command, folder, log
        self._timeout, self._environment = timeout, environment or {}
        self._answers: queue.Queue[str | None] = queue.Queue()
        self._started: subprocess.Popen[str] | None = None
        self.conversion_seconds = self.startup_seconds = self.peak_rss_mib = 0.0
        self.versions: dict[str, str] = {}

    def start(self) -> None:
        """Returns when the engine has its first token.

        Raises:
            WorkerError: it ended, reported a reason, or was silent for `timeout`.
        """
        begin = time.perf_counter()
        with self._log.open("ab") as sink, held_back():
            try:
                self._started = subprocess.Popen(
                    self._command,
                    cwd=self._folder,
                    env=os.environ | {"HF_HUB_OFFLINE": "1"} | self._environment,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=sink,
                    text=True,
                    start_new_session=True,
                )
            except OSError as error:
                raise WorkerError(f"does not start: {error}") from error
        threading.Thread(target=self._read, daemon=True).start()
        try:
            answer = self._answer()
            if answer.get("event") == "converted":
                self.conversion_seconds = float(answer["seconds"])
                answer = self._answer()
            if answer.get("event") != "ready":
                raise WorkerError(str(answer.get("reason", answer)))
        except BaseException:
            self.close(patience=0.2)
            raise
        # from the start of the process to its first token
        self.startup_seconds = time.perf_counter() - begin - self.conversion_seconds
        self.versions = answer["versions"]
        self.peak_rss_mib = float(answer["peak_rss_mib"])
        self._signal(signal.SIGSTOP)

    @property
    def pid(self) -> int:
        """Of the process, and of its group."""
        return self._process.pid

    def run(self, cell: int, number: int) -> dict[str, Any]:
        """The figures of one cell with the prompts of a round.

        Raises:
            WorkerError: as above; the worker is of no use afterwards.
        """
        stdin = self._process.stdin
        assert stdin is not None
        self._signal(signal.SIGCONT)
        try:
            stdin.write(json.dumps({"run": cell, "round": number}) + "\n")
            stdin.flush()
        except BrokenPipeError as error:
            raise WorkerError(self._last_words()) from error
        answer = self._answer()
        if "error" in answer:
            raise WorkerError(str(answer["error"]))
        self._signal(signal.SIGSTOP)
        self.peak_rss_mib = max(self.peak_rss_mib, float(answer["peak_rss_mib"]))
        return answer

    def close(self, patience: float = 20.0) -> None:
        """Ask it to end, after `patience` seconds make it; what it started itself goes with it."""
        if self._started is None:
            return
        assert self._process.stdin is not None
        self._signal(signal.SIGCONT)
        try:
            with contextlib.suppress(BrokenPipeError, subprocess.TimeoutExpired):
                self._process.stdin.close()
                self._process.wait(timeout=patience)
        finally:
            self._signal(signal.SIGKILL)
            self._process.wait()

    @property
    def _process(self) -> subprocess.Popen[str]:
        assert self._started is not None, "it was not started"
        return self._started

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):  # all have ended
            os.killpg(self._process.pid, number)

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as answers:
            for line in answers:
                self._answers.put(line)
        self._answers.put(None)

    def _answer(self) -> dict[str, Any]:
        try:
            line = self._answers.get(timeout=self._timeout)
        except queue.Empty:
            raise WorkerError(f"no answer in {self._timeout:.0f} s") from None
        if line is None:
            raise WorkerError(self._last_words())
        try:
            answer = json.loads(line)
        except json.JSONDecodeError:
            raise WorkerError(f"answered {line.strip()[:200]!r}, which is not JSON") from None
        assert isinstance(answer, dict)
        return answer

    def _last_words(self) -> str:
        status = self._process.wait(timeout=self._timeout)
        lines = [line.strip() for line in self._log.read_text(errors="replace").splitlines()]
        said = next((line for line in reversed(lines) if line), "nothing")
        how = f"signal {-status}" if status < 0 else f"exit status {status}"
        return f"the process ended with {how}, saying: {said[:300]}"
