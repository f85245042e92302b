"""`print_embeddings`, at the path that vLLM has it."""

from jaxserve.observability.print_embeddings import print_embeddings

__all__ = ["print_embeddings"]
