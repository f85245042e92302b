"""Compiled grammars, bounded in number: of texts whose cost `GrammarChecks` has found bounded."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from jaxserve.boundary.grammar_verdicts import GrammarTokens
from jaxserve.boundary.model_facts import ModelFacts
from jaxserve.grammars.matchers import mask_of, new_matcher, token_table

if TYPE_CHECKING:
    from jaxserve.tokenization.tokenizer import Tokenizer

MAX_GRAMMARS = 64  # compiled ones that are kept, at most
MAX_KEPT_CHARACTERS = 1 << 20  # of their texts
COMPILE_THREADS = 2


class GrammarCompiler:
    """Compiles grammars for the tokens of one model; used by several threads.

    Args:
        load: the model's tokenizer; asked for it at the first grammar.
        model: what is known of the model.

    Attributes:
        num_words: uint32 words of a mask, once a grammar has been compiled.
    """

    def __init__(self, load: Callable[[], Tokenizer], model: ModelFacts):
        self._load = load
        self._model = model
        self._table: Any = None
        self.num_words = 0
        self._tokenizer: Tokenizer | None = None
        self._kept: OrderedDict[str, Any] = OrderedDict()
        self._lock, self._loading = threading.Lock(), threading.Lock()
        self._pool = ThreadPoolExecutor(COMPILE_THREADS, "jaxserve-grammars")

    def start(self, text: str) -> Future[Any]:
        """Begin to compile; the result is a matcher before its first token, to be copied.

        The future raises GrammarError.

        Args:
            text: of a grammar that `GrammarChecks` has found to compile within its limits.
        """
        kept = self._find(text)
        if kept is not None:
            done: Future[Any] = Future()
            done.set_result(kept)
            return done
        return self._pool.submit(self._compile, text)

    def start_loading(self) -> Future[Any]:
        """Begin to load `tokenizer`; the result means nothing."""
        if self._tokenizer is not None:  # not behind grammars that are being compiled
            done: Future[Any] = Future()
            done.set_result(None)
            return done
        return self._pool.submit(self._load_tokenizer)

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's, once `start_loading` or a grammar is done."""
        assert self._tokenizer is not None
        return self._tokenizer

    def close(self) -> None:
        """Forget everything; compilations that run are not waited for."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        with self._lock:
            self._kept.clear()

    def _find(self, text: str) -> Any:
        with self._lock:
            kept = self._kept.get(text)
            if kept is not None:
                self._kept.move_to_end(text)
            return kept

    def _compile(self, text: str) -> Any:
        kept = self._find(text)  # while this one waited
        if kept is not None:
            return kept
        matcher = new_matcher(self._token_table(), text)
        mask_of(matcher)  # the copies have it
        with self._lock:
            self._kept[text] = matcher
            self._kept.move_to_end(text)
            while len(self._kept) > MAX_GRAMMARS or (
                len(self._kept) > 1 and sum(map(len, self._kept)) > MAX_KEPT_CHARACTERS
            ):
                self._kept.popitem(last=False)
        return matcher

    def _load_tokenizer(self) -> Tokenizer:
        with self._loading:
            if self._tokenizer is None:
                self._tokenizer = self._load()
            return self._tokenizer

    def _token_table(self) -> Any:
        tokenizer = self._load_tokenizer()
        with self._loading:
            if self._table is None:
                tokens = GrammarTokens.of(tokenizer, self._model)
                self.num_words = -(-tokens.count // 32)
                self._table = token_table(tokens)
            return self._table
