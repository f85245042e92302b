"""How many open files the system lets the process have, and which of them are for connections."""

from __future__ import annotations

import os
from dataclasses import dataclass

from jaxserve.errors import ValidationError

EXTRA_CONNECTIONS = 1024  # beyond the limit, which may ask for the server's health
ACCEPTED_AT_A_TIME = 16  # connections, in a turn of the event loop
# Pipes and sockets of the next engine while the last one's are there, files of /proc, batches.
KEPT = (16, 64)  # at least and at most, else a sixteenth
LEAST = 48  # of which a server without connections has about 20 open
OWN = 512  # generously, beside connections


@dataclass(frozen=True, slots=True)
class Descriptors:
    """What connections may have of a limit on open files.

    The system gives a new descriptor the lowest number that is free. So the number of a connection
    tells how many others are open, whatever has opened them.

    Attributes:
        limit: on open files of the process; None: there is none.
    """

    limit: int | None = None

    @classmethod
    def raised(cls, connections: int) -> Descriptors:
        """Raise the limit to what so many connections need, as far as the system's own one goes.

        Raises:
            ValidationError: it is too low for any.
        """
        try:
            import resource
        except ImportError:  # not on Windows, which has no such limit
            return cls()
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        wanted = connections + EXTRA_CONNECTIONS + OWN
        if hard != resource.RLIM_INFINITY:
            wanted = min(wanted, hard)
        if soft == resource.RLIM_INFINITY:
            return cls()
        if soft < wanted:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            soft = wanted
        if soft < LEAST:
            raise ValidationError("the limit on open files (ulimit -n)", soft, f"{LEAST} or more")
        return cls(soft)

    @property
    def listeners(self) -> int:
        """Descriptors of the listening socket, each of which is accepted from once a turn."""
        share = ACCEPTED_AT_A_TIME if self.limit is None else self.limit // 64
        return max(1, min(ACCEPTED_AT_A_TIME, share))

    @property
    def extra(self) -> int:
        """Connections beyond those that are served, which may ask for the server's health."""
        share = EXTRA_CONNECTIONS if self.limit is None else self.limit // 8
        return min(EXTRA_CONNECTIONS, share)

    @property
    def leaving(self) -> int:
        """Connections beyond those, which are closed but not gone yet."""
        return self._kept // 2

    def excess(self, number: int) -> int:
        """How many connections are too many, by the number of the newest one's descriptor."""
        if self.limit is None:
            return 0
        return max(0, number + 1 - self._end)

    def room(self, connections: int) -> int | None:
        """How many connections can be served at a time; None where there is no limit.

        Args:
            connections: that are open now.
        """
        if self.limit is None:
            return None
        return self._end - (len(os.listdir("/dev/fd")) - 1 - connections)  # 1 is the listing's own

    @property
    def _end(self) -> int:
        """The first number that no connection has which is served."""
        assert self.limit is not None
        return self.limit - self._kept - self.listeners - self.extra

    @property
    def _kept(self) -> int:
        least, most = KEPT
        return most if self.limit is None else min(max(least, self.limit // 16), most)
