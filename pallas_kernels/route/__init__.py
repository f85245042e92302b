"""Routing: the experts of every token, and the blocks in which a grouped product computes them."""

from pallas_kernels.route.api import route
from pallas_kernels.route.coverage import RouteShape

__all__ = ["RouteShape", "route"]
