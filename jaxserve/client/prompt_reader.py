"""Reads a caller's prompt (text, token ids, arrays, images) as token ids within the context."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from jaxserve.boundary.image_facts import facts_of
from jaxserve.boundary.model_facts import ModelFacts
from jaxserve.boundary.processor_kwargs import FIELD as PROCESSOR_KWARGS
from jaxserve.boundary.prompt_spans import NO_ID, PARTS, PromptSpan, span_of, take_places
from jaxserve.client.images import KEY as MULTI_MODAL
from jaxserve.client.images import ImageReader, check_count, least_places, placed
from jaxserve.client.media import MediaReader
from jaxserve.config.resolved_config import ResolvedConfig
from jaxserve.errors import ValidationError
from jaxserve.tokenization.tokenizer import Tokenizer

Prompt = str | Sequence[int] | Mapping[str, Any]
Tokenised = tuple[str | None, list[int], list[PromptSpan]]  # text, token ids, what has places

# of a prompt that is a mapping, beside PARTS; and what any such prompt may have
PROMPT_KEYS, EXTRA_KEYS = ("prompt", "prompt_token_ids"), ("cache_salt", PROCESSOR_KWARGS)
# one for all, since hundreds of thousands may wait: lists of a message are not changed
NO_LIST: list[Any] = []
# Of a long text so many characters a token of the context, and at least so many, are tokenised
# before the others; and so many tokens may change with what follows them.
HEAD_CHARACTERS, LEAST_HEAD, SPARE_TOKENS = 8, 2**15, 64


class PromptReader:
    """Reads prompts.

    Args:
        config: its limits bound prompts.
        model: the model's configuration, or the facts that a client has of it.
        tokenizer: None when `skip_tokenizer_init` is set.
        folder: of the model, where its image processor lies.
    """

    def __init__(
        self, config: ResolvedConfig, model: ModelFacts, tokenizer: Tokenizer | None, folder: str
    ):
        self._model = model
        self._tokenizer = tokenizer
        self._max_model_len = config.scheduler.max_model_len
        self._asked = asked = config.asked
        media = MediaReader(asked.allowed_media_domains, asked.allowed_local_media_path)
        most = asked.max_images, asked.max_encoder_patches
        self._images = ImageReader(folder, model, media, *most, asked.mm_processor_kwargs)

    def read(self, prompt: Prompt) -> Tokenised:
        """The text of a prompt, its token ids, and what takes the places of some.

        Raises:
            ValidationError: names the part of the prompt that cannot be served.
        """
        if isinstance(prompt, Mapping):
            return self._tokenise_mapping(prompt)
        if isinstance(prompt, str):
            if self._tokenizer is None:
                raise ValidationError("prompt", prompt, "token ids when skip_tokenizer_init is set")
            # a tokenizer may add a token of its own to an empty text: still nothing to continue
            check_text_fits(prompt, self._tokenizer, self._max_model_len, "prompt")
            tokens = self._tokenizer.encode(prompt) if prompt else []
            self._check_length(prompt, len(tokens))
            check_token_ids(tokens, self._model.vocab_size, "prompt")
            return prompt, tokens, NO_LIST
        if not isinstance(prompt, Sequence) or isinstance(prompt, bytes):
            allowed = f"text, a list of token ids, or a dictionary with {' or '.join(PROMPT_KEYS)}"
            raise ValidationError("prompt", prompt, allowed)
        return None, self._check_tokens(prompt), NO_LIST

    def _with_images(self, prompt: Mapping[str, Any]) -> Tokenised:
        """A prompt in which images take the places of their tokens."""
        rest = {name: value for name, value in prompt.items() if name != MULTI_MODAL}
        images = self._images.asked(prompt)
        if not images:
            return self._tokenise_mapping(rest)
        if _parts(rest):
            raise ValidationError(
                MULTI_MODAL, "...", "nothing beside arrays in the prompt's places"
            )
        facts, (text, tokens, _) = facts_of(self._model), self._tokenise_mapping(self._framed(rest))
        check_count(tokens, facts, len(images))
        # what does not fit is refused before an image is looked at
        self._check_length(prompt, len(tokens) + len(images) * (least_places(facts) - 1))
        made, pairs = placed(tokens, facts, self._images.pixels_of(prompt))
        self._check_length(prompt, len(made))
        _, tokens, spans = self._with_parts({"prompt_token_ids": made}, {"images": pairs})
        return text, tokens, spans

    def _framed(self, prompt: Mapping[str, Any]) -> Mapping[str, Any]:
        """A prompt whose text, where it has no token ids, has images as the model reads them."""
        text, tokens = (prompt.get(name) for name in PROMPT_KEYS)
        if tokens is not None or self._tokenizer is None or not isinstance(text, str):
            return prompt
        return {**prompt, PROMPT_KEYS[0]: self._tokenizer.framed(text)}

    def _tokenise_mapping(self, prompt: Mapping[str, Any]) -> Tokenised:
        if prompt.get(MULTI_MODAL) is not None:
            return self._with_images(prompt)
        if parts := _parts(prompt):
            return self._with_parts(prompt, parts)
        for name, value in prompt.items():
            if name not in (*PROMPT_KEYS, *EXTRA_KEYS) and value is not None:
                allowed = f"{' or '.join(PROMPT_KEYS)}, and {', '.join(EXTRA_KEYS)}"
                raise ValidationError(f"prompt[{name!r}]", value, allowed)
        text, tokens = (prompt.get(name) for name in PROMPT_KEYS)
        if text is not None and not isinstance(text, str):
            raise ValidationError("prompt", text, "text; token ids go to prompt_token_ids")
        if tokens is not None:
            return text, self._check_tokens(tokens), NO_LIST
        if text is None:
            raise ValidationError("prompt", dict(prompt), " or ".join(PROMPT_KEYS))
        return self.read(text)

    def _check_length(self, prompt: Prompt, num_tokens: int) -> None:
        if not num_tokens:
            raise ValidationError("prompt", prompt, "a prompt of at least one token")
        if num_tokens >= self._max_model_len:
            raise ValidationError(
                "prompt", f"{num_tokens} tokens", too_long(self._max_model_len, num_tokens)
            )

    def _check_tokens(self, tokens: Any) -> list[int]:
        if not isinstance(tokens, Sequence) or isinstance(tokens, (str, bytes)):
            raise ValidationError("prompt_token_ids", tokens, "a list of token ids")
        # what does not fit is refused without looking at each id
        self._check_length(tokens, len(tokens))
        check_token_ids(tokens, self._model.vocab_size, "prompt_token_ids")
        return list(tokens)

    def begin_images(self, prompt: Prompt) -> Future[dict[str, Any]] | None:
        """Start to read the images of a prompt, in threads that nothing else waits for.

        The future gives the prompt for `read`, or raises ValidationError. None: it has none.
        """
        if not isinstance(prompt, Mapping) or prompt.get(MULTI_MODAL) is None:
            return None
        return self._images.begin(prompt)

    def check_images(self, tokens: list[int], images: Mapping[str, Any]) -> None:
        """Check the number of a prompt's images. Raises ValidationError."""
        check_count(tokens, facts_of(self._model), len(self._images.asked(images)))

    def with_places(self, tokens: list[int], prompt: Mapping[str, Any]) -> list[int]:
        """Token ids with the places of what `begin_images` has given; of any number."""
        return placed(tokens, facts_of(self._model), self._images.pixels_of(prompt))[0]

    def without_images(self, prompt: Mapping[str, Any]) -> dict[str, Any]:
        """A prompt with so many places as its images have at least, and none of them.

        Raises:
            ValidationError: it names more or fewer images than it has.
        """
        rest = {name: value for name, value in prompt.items() if name != MULTI_MODAL}
        count = len(self._images.asked(prompt))
        if not count:
            return rest
        facts, (_, tokens, _) = facts_of(self._model), self._tokenise_mapping(self._framed(rest))
        check_count(tokens, facts, count)
        places = [facts.token_id] * count * (least_places(facts) - 1)
        return {"prompt_token_ids": tokens + places}

    def close(self) -> None:
        """End the threads that read images."""
        self._images.close()

    def _with_parts(self, prompt: Mapping[str, Any], parts: dict[str, Any]) -> Tokenised:
        """A prompt in which spans take the places of some or all token ids."""
        for name in parts:
            setting = PARTS[name].setting
            if not getattr(self._asked, setting):
                raise ValidationError(setting, False, f"True for prompts of {name}")
        ids, first = prompt.get("prompt_token_ids"), next(iter(parts))
        is_whole = ids is None or not all(isinstance(given, list) for given in parts.values())
        beside = {first} if is_whole else {*parts, "prompt_token_ids"}
        for name, value in prompt.items():
            if name not in beside.union(EXTRA_KEYS) and value is not None:
                raise ValidationError(f"prompt[{name!r}]", value, f"nothing beside {first}")
        if not is_whole:
            tokens = self._check_tokens(ids)
            return None, tokens, take_places(parts, tokens, self._model)
        span = span_of(first, 0, parts[first], self._model)
        self._check_length(f"{first} {[*span.shape]}", span.length)
        return None, [NO_ID] * span.length, [span]


def tokens_of(prompt: Prompt) -> list[int] | None:
    """The token ids of a prompt that has nothing else to be read."""
    named = prompt if isinstance(prompt, Mapping) else {}
    tokens = named.get("prompt_token_ids") if named else prompt
    if not isinstance(tokens, list) or _parts(named) or named.get(MULTI_MODAL) is not None:
        return None
    return tokens


def _parts(prompt: Mapping[str, Any]) -> dict[str, Any]:
    """The parts of a prompt that take the places of token ids."""
    return {name: prompt[name] for name in PARTS if prompt.get(name) is not None}


def too_long(max_model_len: int, num_tokens: int) -> str:
    """What is said of prompts beyond the context, in the phrases that clients know it by.

    Args:
        max_model_len: longest prompt plus output, in tokens.
        num_tokens: of the prompt, at least.
    """
    return (
        f"the prompt is too long. This model's maximum context length is {max_model_len} tokens. "
        f"However, your prompt contains at least {num_tokens} input tokens, and the output needs "
        "at least 1. Please reduce the length of the input prompt."
    )


def check_text_fits(text: str, tokenizer: Tokenizer, max_model_len: int, field: str) -> None:
    """Refuse a text that is far longer than the context, before all of it is tokenised.

    What comes first in a text has its tokens whatever follows, but for the last few: where it has
    more of them than the context, with some to spare, the whole text has.

    Raises:
        ValidationError: names `field`.
    """
    size = max(LEAST_HEAD, HEAD_CHARACTERS * max_model_len)
    while len(text) > size:
        head = len(tokenizer.encode(text[:size], add_special_tokens=False))
        if head > max_model_len + max_model_len // 8 + SPARE_TOKENS:
            raise ValidationError(
                field,
                f"a text of {len(text)} characters, more than {head} tokens",
                too_long(max_model_len, head),
            )
        size *= 4


def check_token_ids(tokens: Sequence[Any], vocab_size: int, field: str) -> None:
    """Raises ValidationError unless all are tokens of a model."""
    # in C: there may be millions
    if set(map(type, tokens)) - {int}:
        for token in tokens:
            if isinstance(token, bool) or not isinstance(token, int):
                raise ValidationError(field, token, "integers only")
    for edge in (min(tokens, default=0), max(tokens, default=0)):
        if not 0 <= edge < vocab_size:
            allowed = f"token ids from 0 to {vocab_size - 1}: it is out of vocabulary"
            raise ValidationError(field, edge, allowed)
