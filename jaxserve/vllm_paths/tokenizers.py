"""`get_tokenizer`, at the path that vLLM has it."""

from jaxserve.loading.tokenizers import get_tokenizer
from jaxserve.tokenization.tokenizer import Tokenizer as TokenizerLike

__all__ = ["TokenizerLike", "get_tokenizer"]
