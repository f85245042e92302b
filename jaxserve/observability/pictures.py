"""What an `LLM` shows of itself: pictures, a trace, the life of a request."""

from __future__ import annotations

from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING

from jaxserve.errors import ValidationError
from jaxserve.observability.figures import Span, latency_figure, pages_figure, timeline_figure
from jaxserve.observability.perfetto import write_trace
from jaxserve.observability.request_lives import RequestLife

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from jaxserve.client.engine_client import LocalClient


class Pictures:
    """The methods of `LLM` that show what its engine did.

    Figures are matplotlib's (the extra `bench`); each method that makes one saves it too where it
    is given a path, whose ending says the format.

    Raises:
        JaxServeError: a figure is asked for and matplotlib is not installed.
    """

    client: LocalClient

    def plot_pages(self, path: str | PathLike[str] | None = None) -> Figure:
        """Every KV page (free, cached, in use, shared), and how many were in use at each step."""
        states = self.client.engine.scheduler.pages.pool.states()
        return _saved(pages_figure(states, self.client.history.snapshot()), path)

    def plot_timeline(self, path: str | PathLike[str] | None = None) -> Figure:
        """The last requests as bars, what the steps computed, and how busy the device was."""
        return _saved(timeline_figure(self.client.history.snapshot(), self._spans()), path)

    def plot_latency(self, path: str | PathLike[str] | None = None) -> Figure:
        """How the last requests' times are distributed: queue, first token, a token, all."""
        spans = self._spans()
        counts = [
            max(one.num_tokens for one in life.sequences.values()) for life in self._whole_lives()
        ]
        samples = {
            "queue": [s.first_step - s.arrival for s in spans if s.first_step is not None],
            "time to first token": [s.first_token - s.arrival for s in spans],
            "time per output token": [
                (s.last_token - s.first_token) / (count - 1)
                for s, count in zip(spans, counts)
                if count > 1
            ],
            "end to end": [s.last_token - s.arrival for s in spans],
        }
        return _saved(latency_figure(samples), path)

    def trace(self, path: str | PathLike[str]) -> Path:
        """Write the last steps and requests as a file for https://ui.perfetto.dev.

        Steps by their phases on the host and their time on the device, pages, tokens and sequences
        as counters, and a track a request. What XLA does within a step is in `start_profile`'s.
        """
        file = Path(path)
        write_trace(file, self.client.history.snapshot(), self.client.lives.snapshot())
        return file

    def explain(self, request_id: str) -> RequestLife:
        """What became of one of the last requests; printed, it is a few lines.

        Args:
            request_id: the `request_id` of an output.

        Raises:
            ValidationError: none of the last 1,024 requests has this id.
        """
        life = self.client.lives.find(request_id)
        if life is None:
            kept = f"the id of one of the last {len(self.client.lives)} requests"
            raise ValidationError("request_id", request_id, kept)
        return life

    def _whole_lives(self) -> list[RequestLife]:
        """Those that have a first and a last token."""
        return [life for life in self.client.lives.snapshot() if life.last_token is not None]

    def _spans(self) -> list[Span]:
        return [
            Span(life.arrival, life.first_step, life.first_token, life.last_token)
            for life in self._whole_lives()
            if life.first_token is not None and life.last_token is not None
        ]


def _saved(figure: Figure, path: str | PathLike[str] | None) -> Figure:
    if path is not None:
        figure.savefig(Path(path), dpi=120)
    return figure
