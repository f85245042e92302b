"""OLMo-2: norms behind attention and MLP, and over the whole projections of queries and keys."""

from jaxserve.models.olmo2.config import read_config
from jaxserve.models.olmo2.model import Olmo2
from jaxserve.models.olmo2.weights import source

__all__ = ["Olmo2", "read_config", "source"]
