"""Flags of `jaxserve serve` that say how its socket is opened: by TLS, or in the file system."""

from __future__ import annotations

import argparse
import os
import socket
import ssl
import stat
from pathlib import Path
from typing import Any

from jaxserve.errors import ValidationError


def add_socket_flags(parser: argparse.ArgumentParser) -> None:
    """`--uds` and `--ssl-*`."""
    add = parser.add_argument_group("socket").add_argument
    add("--uds", metavar="FILE", help="listen on this Unix socket and not on --host and --port")
    add(
        "--ssl-keyfile",
        metavar="FILE",
        help="private key; with --ssl-certfile the server speaks TLS",
    )
    add("--ssl-certfile", metavar="FILE", help="certificate, with those of its authorities")
    add("--ssl-ca-certs", metavar="FILE", help="authorities of clients' certificates")
    add(
        "--ssl-cert-reqs",
        type=int,
        choices=[int(one) for one in ssl.VerifyMode],
        default=int(ssl.CERT_NONE),
        help="whether clients bring certificates: 0 no, 1 if they like, 2 yes (default: 0)",
    )


def check_socket_flags(args: argparse.Namespace) -> None:
    """Refuse files that cannot be used, before a model is loaded.

    Raises:
        ValidationError: names the flag.
    """
    if args.ssl_certfile is None:
        for flag in ("ssl_keyfile", "ssl_ca_certs", "ssl_cert_reqs"):
            if getattr(args, flag):
                name = "--" + flag.replace("_", "-")
                raise ValidationError(name, getattr(args, flag), "only with --ssl-certfile")
        return
    if args.ssl_cert_reqs and args.ssl_ca_certs is None:
        raise ValidationError("--ssl-cert-reqs", args.ssl_cert_reqs, "0 without --ssl-ca-certs")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(args.ssl_certfile, args.ssl_keyfile, password=lambda: "")
    except (OSError, ValueError) as error:
        shown = f"{args.ssl_certfile}, {args.ssl_keyfile}"
        allowed = f"PEM files of a certificate and its key ({error})"
        raise ValidationError("--ssl-certfile, --ssl-keyfile", shown, allowed) from error
    if args.ssl_ca_certs is not None:
        try:
            context.load_verify_locations(args.ssl_ca_certs)
        except OSError as error:
            allowed = f"a PEM file of certificates ({error})"
            raise ValidationError("--ssl-ca-certs", args.ssl_ca_certs, allowed) from error


def tls(args: argparse.Namespace) -> dict[str, Any]:
    """What uvicorn is told of TLS."""
    if args.ssl_certfile is None:
        return {}
    names = ("ssl_keyfile", "ssl_certfile", "ssl_ca_certs", "ssl_cert_reqs")
    return {name: getattr(args, name) for name in names}


def listen_at(path: str) -> socket.socket:
    """A Unix socket that listens; one that a dead server has left behind is replaced.

    Raises:
        OSError: something else is there, or another process listens.
    """
    place = Path(path)
    if place.exists() and stat.S_ISSOCK(place.stat().st_mode):
        with socket.socket(socket.AF_UNIX) as probe:
            try:
                probe.connect(path)
            except ConnectionRefusedError:
                place.unlink()
    listener = socket.socket(socket.AF_UNIX)
    try:
        listener.bind(path)
        os.chmod(path, 0o600)
        listener.listen(2048)
    except OSError:
        listener.close()
        raise
    return listener
