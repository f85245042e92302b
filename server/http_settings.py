"""What uvicorn is told, in the process of a server and in its fronts."""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping

import uvicorn
from starlette.types import ASGIApp

from server.admission import Admission
from server.commands.log_flags import unlogged_paths
from server.commands.socket_flags import tls
from server.descriptors import Descriptors
from server.http_protocol import connection_class
from server.listen_socket import BACKLOG
from server.logs import log_config
from server.service import Service

# Seconds that connections get to end after their requests were aborted.
DRAIN_S = 2


def http_settings(
    app: ASGIApp,
    args: argparse.Namespace,
    service: Service,
    paths: Mapping[bytes, str],
    descriptors: Descriptors,
) -> uvicorn.Config:
    """The settings of a server that speaks HTTP by our class of connections.

    Args:
        app: answers requests.
        args: the flags of `jaxserve serve`.
        service: whose limits are kept.
        paths: whose requests wait for the engine, see `engine_paths`.
        descriptors: what there is for connections.

    Raises:
        ValidationError: uvicorn is not as it has to be.
    """
    limits = service.limits
    admission = Admission(service, paths)
    return uvicorn.Config(
        app,
        http=connection_class().limited(limits, admission, descriptors, service.counts),
        ws="none",
        lifespan="on",
        log_config=log_config(args.uvicorn_log_level, args.log_format, unlogged_paths(args)),
        log_level=args.uvicorn_log_level,
        access_log=not args.disable_uvicorn_access_log,
        server_header=False,
        timeout_graceful_shutdown=DRAIN_S,
        backlog=BACKLOG,
        timeout_keep_alive=math.ceil(limits.idle_timeout),
        **tls(args),
    )
