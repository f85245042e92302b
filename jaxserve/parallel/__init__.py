"""The device mesh and the rules that lay a model out over it."""

from jaxserve.parallel.mesh import make_mesh
from jaxserve.parallel.sharding import ShardingRules

__all__ = ["ShardingRules", "make_mesh"]
