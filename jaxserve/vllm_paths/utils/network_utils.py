"""Ports and addresses, at the path that vLLM has them."""

from jaxserve.processes.network import get_ip, get_open_port

__all__ = ["get_ip", "get_open_port"]
