"""Parameters of embeddings, at the path that vLLM has them."""

from jaxserve.params.pooling_params import PoolingParams

__all__ = ["PoolingParams"]
