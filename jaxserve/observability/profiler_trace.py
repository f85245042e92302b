"""A trace of host and device, as Perfetto (https://ui.perfetto.dev) shows it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Collection
from pathlib import Path

from jaxserve.errors import ValidationError

logger = logging.getLogger(__name__)

TRACE = "perfetto_trace.json.gz"


def traces(folder: Path) -> list[Path]:
    """The files for Perfetto below a folder, the newest last."""
    return sorted(folder.rglob(TRACE), key=lambda file: file.stat().st_mtime)


def new_trace(folder: Path, before: Collection[Path]) -> Path:
    """The file that has come to a folder; raises FileNotFoundError where none has.

    Args:
        folder: that was recorded into.
        before: what `traces` found there when it began.
    """
    found = [file for file in traces(folder) if file not in before]
    if not found:
        raise FileNotFoundError(f"JAX has written no {TRACE} below {folder}")
    return found[-1]


class Profile:
    """One trace at a time: JAX has one profiler a process."""

    def __init__(self) -> None:
        self._folder: Path | None = None
        self._before: list[Path] = []

    def start(self, folder: str | Path) -> None:
        """Begin to record into a folder, which is made.

        Raises:
            ValidationError: a trace is being recorded already.
        """
        if self._folder is not None:
            raise ValidationError("folder", str(folder), "one trace at a time: call stop_profile")
        import jax  # a process without an engine has no reason to

        self._before = traces(Path(folder))
        jax.profiler.start_trace(str(folder), create_perfetto_trace=True)
        self._folder = Path(folder)

    def stop(self) -> Path:
        """End the recording; the file for Perfetto.

        Raises:
            ValidationError: none was begun.
        """
        if self._folder is None:
            raise ValidationError("folder", None, "a trace that start_profile has begun")
        import jax

        folder, self._folder = self._folder, None
        jax.profiler.stop_trace()
        return new_trace(folder, self._before)


class BackgroundProfile:
    """The profile of an engine whose steps go on: a failure is a line of the log.

    Attributes:
        folder: what is recorded into, or being written; "": nothing is.
    """

    def __init__(self) -> None:
        self.folder = ""
        self._profile = Profile()

    def start(self, folder: str) -> None:
        """Begin to record into a folder, unless that fails."""
        try:
            self._profile.start(folder)
        except Exception:  # whatever JAX raises: requests are served without a profile
            logger.exception("nothing is recorded into %s", folder)
        else:
            self.folder = folder

    def stop(self) -> None:
        """End the recording, if there is one; a thread writes the files, which takes seconds."""
        if self.folder:
            threading.Thread(target=self._write, name="profile", daemon=True).start()

    def _write(self) -> None:
        try:
            logger.info("recorded: %s", self._profile.stop())
        except Exception:  # as in `start`
            logger.exception("the recording in %s is lost", self.folder)
        finally:
            self.folder = ""
