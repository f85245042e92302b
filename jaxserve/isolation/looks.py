"""A look at several engines at once."""

from __future__ import annotations

from collections.abc import Sequence

from jaxserve.boundary.engine_view import EngineView
from jaxserve.boundary.united import united_view
from jaxserve.isolation.process_client import ProcessClient


class Looks:
    """Asks engines for views, and makes one of them.

    Attributes:
        profile: the folder in which each engine was told to record into one of its own.
    """

    def __init__(self) -> None:
        self.profile = ""
        self._asked: set[int] = set()  # numbers of engines
        self._views: dict[int, EngineView] = {}

    def begin(self, engines: Sequence[ProcessClient]) -> None:
        """Ask those that serve."""
        self._views.clear()
        self._asked = {number for number, one in enumerate(engines) if one.is_ready}
        for number in self._asked:
            engines[number].look()

    def take(self, engines: Sequence[ProcessClient]) -> EngineView | None:
        """Their view, once all have answered that were asked and serve still; None before."""
        for number, one in enumerate(engines):
            view = one.take_view()
            if view is not None and number in self._asked:
                self._views[number] = view
        self._asked = {number for number in self._asked if engines[number].is_ready}
        if not self._asked or self._asked - self._views.keys():
            return None
        views = [self._views[number] for number in sorted(self._asked)]
        self._asked = set()
        is_recorded = any(view.profile for view in views)
        return united_view(views, self.profile if is_recorded else "")
