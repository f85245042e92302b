"""Text to token ids and back; importing this is cheap, transformers loads with a tokenizer."""

from jaxserve.tokenization.bad_words import bad_word_sequences
from jaxserve.tokenization.detokenizer import IncrementalDetokenizer
from jaxserve.tokenization.stop import StopChecker
from jaxserve.tokenization.tokenizer import Tokenizer

__all__ = ["IncrementalDetokenizer", "StopChecker", "Tokenizer", "bad_word_sequences"]
