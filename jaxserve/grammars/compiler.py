"""Compiled grammars: bounded in time, in size and in number."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from typing import TYPE_CHECKING, Any

from jaxserve.errors import CompilerBusyError, ValidationError
from jaxserve.grammars.budget import ThoughtBudget
from jaxserve.grammars.text import library
from jaxserve.grammars.thinking import Thinking
from jaxserve.model_facts import ModelFacts, eos_token_ids
from jaxserve.structured_outputs_params import Thoughts

if TYPE_CHECKING:
    from jaxserve.tokenization.tokenizer import Tokenizer

COMPILE_SECONDS = 5.0
LOAD_SECONDS = 30.0  # until the tokens are there, at the first grammar
MAX_GRAMMARS = 64  # compiled ones that are kept, at most
MAX_KEPT_CHARACTERS = 1 << 20  # of their texts
COMPILE_THREADS = 2
# llguidance goes through rules of a grammar by recursion: a chain of as many as fit into a text
# would leave a usual stack, and end the process
STACK_BYTES = 256 << 20
# What one grammar may cost llguidance: states of its lexer (1 to 2 kB each), work when it is
# compiled and at each token. The default of states is five times as many.
LIMITS: dict[str, Any] = {"max_lexer_states": 50_000, "verbose_errors": False}
MAX_SHOWN = 300  # characters of llguidance's own words


class GrammarError(ValueError):
    """A grammar does not compile; says why in llguidance's words."""


class GrammarCompiler:
    """Compiles grammars for the tokens of one model; used by several threads.

    Args:
        load: the model's tokenizer; asked for it at the first grammar.
        model: what is known of the model.
    """

    def __init__(self, load: Callable[[], Tokenizer], model: ModelFacts):
        self._load = load
        self._model = model
        self._table: Any = None
        self._num_words = 0
        self._tokenizer: Tokenizer | None = None
        self._kept: OrderedDict[str, Any] = OrderedDict()
        self._lock, self._loading = threading.Lock(), threading.Lock()
        self._pool: ThreadPoolExecutor | None = None

    @property
    def is_loaded(self) -> bool:
        """Whether the tokens are there, which takes seconds at the first grammar."""
        return self._table is not None

    def start(self, text: str, on_begin: Callable[[], None] = lambda: None) -> Future[Any]:
        """Begin to compile; the result is a matcher before its first token, to be copied.

        The future raises GrammarError.

        Args:
            text: of the grammar.
            on_begin: called when a thread has the tokens and begins with the grammar itself.
        """
        kept = self._find(text)
        if kept is not None:
            done: Future[Any] = Future()
            done.set_result(kept)
            return done
        return self._submit(self._compile, text, on_begin)

    def _submit(self, work: Callable[..., Any], *given: Any) -> Future[Any]:
        with self._lock:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(COMPILE_THREADS, "jaxserve-grammars")
            before = threading.stack_size(STACK_BYTES)  # of a thread that this may start
            try:
                return self._pool.submit(work, *given)
            finally:
                threading.stack_size(before)

    def start_loading(self) -> Future[Any]:
        """Begin to load what `budget` needs; the result is None."""
        if self.is_loaded:  # not behind grammars that are being compiled
            done: Future[Any] = Future()
            done.set_result(None)
            return done
        return self._submit(self._load_tokenizer)

    def check(self, text: str, field: str, given: Any) -> None:
        """See that a grammar compiles; it is kept for the next request.

        Args:
            text: as the engine is told of it.
            field, given: what it was made of, for errors.

        Raises:
            ValidationError: names `field`: it does not compile, or not in COMPILE_SECONDS.
            CompilerBusyError: no thread has begun with it in time, be it that others are compiled
                or that the tokens are being loaded.
        """
        begun = threading.Event()
        seconds = COMPILE_SECONDS if self.is_loaded else LOAD_SECONDS
        future = self.start(text, begun.set)
        future.add_done_callback(lambda _: begun.set())
        if not begun.wait(seconds):
            future.cancel()
            raise CompilerBusyError(field, COMPILE_SECONDS)
        try:
            future.result(COMPILE_SECONDS)
        except FutureTimeout as error:
            future.cancel()
            allowed = f"what compiles in {COMPILE_SECONDS:g} s"
            raise ValidationError(field, given, allowed) from error
        except GrammarError as error:
            raise ValidationError(field, given, f"what llguidance compiles: {error}") from error

    def thinking(self, thoughts: Thoughts) -> Thinking:
        """How thoughts are told by their tokens, once a grammar has been compiled."""
        assert self._tokenizer is not None
        return Thinking.of(thoughts, self._tokenizer)

    def budget(self, thoughts: Thoughts, most: int) -> ThoughtBudget:
        """That of a sequence without output, once `start_loading` or a grammar is done."""
        assert self._tokenizer is not None
        return ThoughtBudget.of(thoughts, most, self._tokenizer)

    @property
    def num_words(self) -> int:
        """uint32 words of a mask, once a grammar has been compiled."""
        return self._num_words

    def close(self) -> None:
        """Forget everything; what is being compiled is waited for by nobody."""
        with self._lock:
            pool, self._pool = self._pool, None
            self._kept.clear()
        if pool is not None:
            pool.shutdown(wait=False, cancel_futures=True)

    def _find(self, text: str) -> Any:
        with self._lock:
            kept = self._kept.get(text)
            if kept is not None:
                self._kept.move_to_end(text)
            return kept

    def _compile(self, text: str, on_begin: Callable[[], None]) -> Any:
        kept = self._find(text)  # while this one waited
        if kept is not None:
            return kept
        llguidance, table = library(), self._token_table()
        limits = llguidance.LLParserLimits(**LIMITS)
        on_begin()
        matcher = llguidance.LLMatcher(table, text, log_level=0, limits=limits)
        if not matcher.is_error():
            matcher.compute_bitmask()  # grammars without any text show here
        if matcher.is_error():
            raise GrammarError(shown(matcher.get_error()))
        with self._lock:
            self._kept[text] = matcher
            self._kept.move_to_end(text)
            while len(self._kept) > MAX_GRAMMARS or (
                len(self._kept) > 1 and sum(map(len, self._kept)) > MAX_KEPT_CHARACTERS
            ):
                self._kept.popitem(last=False)
        return matcher

    def _load_tokenizer(self) -> None:
        with self._loading:
            if self._tokenizer is None:
                self._tokenizer = self._load()

    def _token_table(self) -> Any:
        """llguidance's own tokenizer: a second's work for a large vocabulary."""
        self._load_tokenizer()
        with self._loading:
            if self._table is None:
                tokenizer = self._tokenizer
                assert tokenizer is not None
                ends = sorted(eos_token_ids(self._model, tokenizer))
                if not ends:
                    raise GrammarError("the model has no end-of-sequence token")
                # a tokenizer may know tokens that the model has no logit of
                count = max(self._model.vocab_size, tokenizer.vocab_size)
                self._num_words = -(-count // 32)
                try:
                    self._table = library().LLTokenizer(
                        tokenizer.to_json(), n_vocab=count, eos_token=ends
                    )
                except ValueError as error:
                    raise GrammarError(
                        f"no grammars with this tokenizer: {shown(str(error))}"
                    ) from error
            return self._table


def shown(message: str) -> str:
    """What of an error of llguidance is for people: not its state, nor its frames."""
    for mark in ("<state>", "<backtrace>", "<grammar>"):
        message = message.partition(mark)[0]
    message = " ".join(message.split())
    return message if len(message) <= MAX_SHOWN else message[: MAX_SHOWN - 3] + "..."
