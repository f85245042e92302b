"""GGUF files: one file with weights, config and tokenizer."""

from checkpoints.gguf.config import gguf_config
from checkpoints.gguf.file import GGUFFile, is_gguf
from checkpoints.gguf.reader import GGUFReader

__all__ = ["GGUFFile", "GGUFReader", "gguf_config", "is_gguf"]
