"""A vocabulary that is small enough to try every token."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

END = 0
# single characters, tokens of several, and some that end in the middle of one another
TEXTS = [*'{}[]",:-.0123456789abcxyz', "ab", "abc", '":', '{"', '"}', "true", "null", "12", "bc"]
TOKENS = ["<|end|>", *TEXTS]


class TinyTokenizer:
    """What a compiler asks of a tokenizer."""

    eos_token_id = END
    vocab_size = len(TOKENS)

    def to_json(self) -> str:
        vocab = {token: number for number, token in enumerate(TOKENS)}
        backend = Backend(models.BPE(vocab=vocab, merges=[]))
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = decoders.ByteLevel()
        backend.add_special_tokens(["<|end|>"])
        return backend.to_str()


# the model has logits of more tokens than the tokenizer knows
FACTS: Any = SimpleNamespace(
    vocab_size=len(TOKENS) + 7, hidden_size=8, num_layers=1, eos_token_ids=()
)
