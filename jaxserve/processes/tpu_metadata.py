"""What a TPU VM of Google's cloud says of the slice that it is a host of.

On GKE these are variables of the environment; on a TPU VM its metadata server has them. It is asked
only where a TPU is on the PCI bus: elsewhere its name may resolve to anything.
"""

from __future__ import annotations

import http.client
import logging
from collections.abc import Mapping
from pathlib import Path

logger = logging.getLogger(__name__)

HOST = "metadata.google.internal"  # GCE_METADATA_IP in the environment names another one
PATH = "/computeMetadata/v1/instance/attributes/"
ASK_S = 5.0
TRIES = 3
MOST_BYTES = 1 << 20
PCI = Path("/sys/bus/pci/devices")
GOOGLE = "0x1ae0"
# v2 and v3, v4, v5p, v5e, v6e, 7x
CHIPS = frozenset(("0x0027", "0x005e", "0x0062", "0x0063", "0x006f", "0x0076"))


def slice_variables(environ: Mapping[str, str], pci: Path = PCI) -> dict[str, str]:
    """The variables that GKE would set: TPU_WORKER_ID and TPU_WORKER_HOSTNAMES; none where this is
    no TPU VM, or its metadata are not to be asked for (TPU_SKIP_MDS_QUERY).

    Args:
        environ: of this process.
        pci: the folder in which the system lists what is on the bus.
    """
    if "TPU_SKIP_MDS_QUERY" in environ or not has_chips(pci):
        return {}
    host = environ.get("GCE_METADATA_IP", HOST)
    attributes = "agent-worker-number", "worker-network-endpoints"
    for left in reversed(range(TRIES)):
        try:
            number, hosts = (_asked(host, name) for name in attributes)
            break
        except (OSError, http.client.HTTPException) as error:
            logger.warning("the metadata of this TPU VM are not there: %s: %s", host, error)
            if not left:
                return {}
    # one is a host, or NAME:ID:ADDRESS
    names = [one.split(":")[-1] for one in hosts.split(",")]
    return {"TPU_WORKER_ID": number, "TPU_WORKER_HOSTNAMES": ",".join(names)}


def has_chips(pci: Path = PCI) -> bool:
    """Whether a TPU is on the PCI bus."""
    try:
        found = [*pci.iterdir()] if pci.is_dir() else []
        return any(
            _text(one / "vendor") == GOOGLE and _text(one / "device") in CHIPS for one in found
        )
    except OSError:  # a device has gone, or may not be looked at
        return False


def _text(path: Path) -> str:
    return path.read_text().strip() if path.is_file() else ""


def _asked(host: str, name: str) -> str:
    connection = http.client.HTTPConnection(host, timeout=ASK_S)
    try:
        connection.request("GET", PATH + name, headers={"Metadata-Flavor": "Google"})
        answer = connection.getresponse()
        if answer.status != http.HTTPStatus.OK:
            raise OSError(f"{name}: status {answer.status}")
        return answer.read(MOST_BYTES).decode()
    finally:
        connection.close()
