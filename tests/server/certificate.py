"""A key and a certificate of localhost, which nothing has signed but itself."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest


def make_certificate(folder: Path) -> tuple[str, str]:
    """The files of the key and of the certificate; the test is skipped without openssl."""
    if shutil.which("openssl") is None:
        pytest.skip("no openssl to make a certificate with")
    key, made = str(folder / "key.pem"), str(folder / "cert.pem")
    words = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"]
    words += ["-nodes", "-days", "2", "-subj", "/CN=localhost", "-addext"]
    words += ["subjectAltName=DNS:localhost", "-keyout", key, "-out", made]
    subprocess.run(words, check=True, capture_output=True)
    return key, made
