"""Loggers, at the path that vLLM has them."""

from logging import getLogger as init_logger

__all__ = ["init_logger"]
