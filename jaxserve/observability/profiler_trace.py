"""A trace of host and device, as Perfetto (https://ui.perfetto.dev) shows it."""

from __future__ import annotations

from pathlib import Path

from jaxserve.errors import ValidationError

TRACE = "perfetto_trace.json.gz"


class Profile:
    """One trace at a time: JAX has one profiler a process."""

    def __init__(self) -> None:
        self._folder: Path | None = None

    def start(self, folder: str | Path) -> None:
        """Begin to record into a folder, which is made.

        Raises:
            ValidationError: a trace is being recorded already.
        """
        if self._folder is not None:
            raise ValidationError("folder", str(folder), "one trace at a time: call stop_profile")
        import jax  # a process without an engine has no reason to

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
        traces = sorted(folder.rglob(TRACE), key=lambda file: file.stat().st_mtime)
        if not traces:
            raise FileNotFoundError(f"JAX has written no {TRACE} below {folder}")
        return traces[-1]
