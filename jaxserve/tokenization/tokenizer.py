"""A Hugging Face tokenizer folder, used in a thread-safe way and without torch."""

from __future__ import annotations

import functools
import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from checkpoints.errors import CheckpointError
from checkpoints.gguf import is_gguf
from checkpoints.json_file import read_object
from jaxserve.config.settings import OneOf
from jaxserve.errors import TemplateRefusal, ValidationError
from jaxserve.tokenization.control_tokens import START, ControlTokens, unmarked
from jaxserve.tokenization.gguf_tokenizer import gguf_tokenizer
from jaxserve.tokenization.message_text import content_parts, content_text, has_images
from jaxserve.tokenization.older_files import converted_tokenizer
from jaxserve.tokenization.render_limit import RenderTimeoutError, render_limit
from jaxserve.tokenization.token_bytes import TokenBytes
from jaxserve.tokenization.truncation import LEAST_PART, PART_CHARACTERS, SPARE_TOKENS

# errors do not tell where files lie
_UNTOLD = (
    "name_or_path",
    "is_local",
    "local_files_only",
    "tokenizer_file",
    "vocab_file",
    "tokenizer_object",
    "backend",
)
FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
RENDER_TIMEOUT_S = 10.0
MAX_TEMPLATE_ERROR = 200  # characters that are told of what a template says of messages
KEPT_TEMPLATES = 8
CONTENT_FORMATS = ("auto", "string", "openai")
LONG_TEXT = 2048  # characters from which other threads may run while a text is tokenised
_IMAGES = re.compile(r"""['"]image['"]""")  # in a template
_ASKS_FOR_TEXT = "is string"
_INTERNALS = re.compile(r"\b0x[0-9a-fA-F]+\b|(?:/[\w.+-]+){2,}")  # addresses and paths
# Arguments of `apply_chat_template` and `render_chat`, of transformers', and what templates are
# given: a caller's variables of the template must not set them behind their back (CVE-2025-62426).
RESERVED_TEMPLATE_NAMES = frozenset(
    {
        "add_generation_prompt",
        "additional_special_tokens",
        "bos_token",
        "chat_template",
        "cls_token",
        "content_format",
        "continue_final_message",
        "conversation",
        "eos_token",
        "extra_special_tokens",
        "mark",
        "mask_token",
        "max_length",
        "messages",
        "pad_token",
        "padding",
        "raise_exception",
        "return_assistant_tokens_mask",
        "return_dict",
        "return_tensors",
        "sanitize_control_tokens",
        "self",
        "sep_token",
        "strftime_now",
        "tokenize",
        "tokenizer_kwargs",
        "tools",
        "truncation",
        "unk_token",
    }
)


class Tokenizer:
    """Encodes, decodes and renders chat templates; safe to use from several threads.

    transformers' own `encode` changes truncation and padding of the shared Rust tokenizer on each
    call, which fails under threads; here that state is fixed once and only the Rust tokenizer's
    read-only calls are used.

    Attributes:
        bos_token_id, eos_token_id: ids from the tokenizer's configuration, or None.
        vocab_size: number of tokens, added ones included.
        added_tokens: id -> text of added tokens (special ones and others).
        special_ids: ids that `skip_special_tokens` leaves out.
        byte_table: what each token adds to the text, as bytes.
    """

    def __init__(self, path: str | Path, chat_template: str | None = None):
        """Loads the tokenizer of a folder, or of a GGUF file.

        Args:
            path: of the folder or the file.
            chat_template: a file or the text of a template, in place of the folder's.

        Raises:
            ValidationError: the folder has no readable tokenizer.json and no files that it is made
                of, a GGUF file has none that is read, the tokenizer's decoder is of a kind whose
                text cannot be made token by token, or `chat_template` is neither a file nor a
                template.
        """
        self.path = str(path)
        # While transformers is imported it would log that PyTorch is missing, which is not needed.
        os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
        self._renderer = gguf_tokenizer(Path(path)) if is_gguf(path) else _folder_tokenizer(path)
        if chat_template is not None:
            self._renderer.chat_template = template_text(chat_template)
        backend = self._renderer.backend_tokenizer
        backend.no_truncation()
        backend.no_padding()
        backend.encode_special_tokens = self._renderer.split_special_tokens
        self._backend = backend
        added = backend.get_added_tokens_decoder()
        self.added_tokens: dict[int, str] = {i: token.content for i, token in added.items()}
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        self.bos_token_id: int | None = self._renderer.bos_token_id
        self.eos_token_id: int | None = self._renderer.eos_token_id
        self.vocab_size: int = backend.get_vocab_size(with_added_tokens=True)
        self.byte_table = TokenBytes(backend)
        self._frame = _image_frame(self._renderer)
        # of the folder's template, and of some that requests bring
        self._control_tokens = functools.lru_cache(KEPT_TEMPLATES)(self._find_control_tokens)

    @property
    def chat_template(self) -> str | dict[str, str] | None:
        """The folder's chat template, or None."""
        return self._renderer.chat_template

    def info(self) -> dict[str, Any]:
        """The configuration as plain data: kind, context, special tokens, chat template."""
        kept = {k: v for k, v in self._renderer.init_kwargs.items() if k not in _UNTOLD}
        told: dict[str, Any] = json.loads(json.dumps(kept, default=str))
        told["tokenizer_class"] = type(self._renderer).__name__
        told["chat_template"] = self.chat_template
        return told

    def to_json(self) -> str:
        """The tokenizer as text, its added tokens included."""
        text: str = self._backend.to_str()
        return text

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text.

        Raises:
            ValidationError: the text holds half a surrogate pair, which is not Unicode text.
        """
        _check_unicode(text)
        if len(text) < LONG_TEXT:
            return self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        # only this call of the library lets other threads run
        (encoded,) = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return encoded.ids

    def beginning(self, text: str, most: int) -> str:
        """What a text begins with that has at most so many tokens, cut between two of them.

        No more of a long text is tokenised than what is kept follows from.

        Raises:
            ValidationError: as `encode`.
        """
        _check_unicode(text)
        size = max(LEAST_PART, PART_CHARACTERS * most)
        part, offsets = text[:size], self._offsets(text[:size])
        while len(part) < len(text) and len(offsets) <= most + most // 8 + SPARE_TOKENS:
            size *= 4
            part, offsets = text[:size], self._offsets(text[:size])
        while len(offsets) > most:  # a part may have other tokens than it had in the whole
            part = part[: min(offsets[most - 1][1], offsets[most][0], len(part) - 1)]
            offsets = self._offsets(part)
        return part

    def _offsets(self, text: str) -> list[tuple[int, int]]:
        """Where each token of a text begins and ends."""
        (encoded,) = self._backend.encode_batch([text], add_special_tokens=False)
        offsets: list[tuple[int, int]] = encoded.offsets
        return offsets

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        """Text of token ids; ids that are not in the vocabulary add nothing."""
        return self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def convert_ids_to_tokens(self, ids: Iterable[int]) -> list[str | None]:
        """The vocabulary's spelling of each id, None for ids that are not in it."""
        return [self._backend.id_to_token(i) for i in ids]

    def convert_tokens_to_ids(self, tokens: Iterable[str]) -> list[int | None]:
        """The id of each spelling of the vocabulary, None for those that are not in it."""
        return [self._backend.token_to_id(token) for token in tokens]

    def framed(self, text: str) -> str:
        """A text with images as the model was trained on them: Gemma 3 has a token where an image
        begins, its place and a token where it ends, between empty lines, for each first one alone.

        Tokens that `render_chat` has marked as a user's text stay. The texts of tokenizers without
        a `boi_token` stay as they are.
        """
        if self._frame is None:
            return text
        begins, whole = self._frame
        return begins.sub(lambda _: whole, text)

    def token_text(self, token_id: int) -> str:
        """The text that a token adds in the middle of a sequence; broken UTF-8 gives U+FFFD."""
        return self.byte_table[token_id].decode("utf-8", "replace")

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template: str | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tokenize: bool = False,
        keep_control_tokens: bool = False,
        **kwargs: Any,
    ) -> str | list[int]:
        """Renders a conversation in transformers' sandboxed Jinja environment.

        Args:
            messages: the conversation, at least one message; content that is a list of text parts
                is joined by lines, and the role "developer" is "system" where the template does not
                speak of it.
            add_generation_prompt: end with the start of an assistant message.
            continue_final_message: leave the last message open instead.
            chat_template: a template, or the name of one of the folder's; the folder's default
                when None.
            tools: JSON schemas of functions, for templates that know them.
            tokenize: return token ids; the template writes the special tokens itself, and those in
                the messages' and the variables' strings are text.
            keep_control_tokens: those are tokens too.
            kwargs: further variables of the template.

        Raises:
            ValidationError: no template, a template that does not compile, or messages that the
                template refuses.
        """
        text = self.render_chat(
            messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            chat_template=chat_template,
            tools=tools,
            mark=tokenize and not keep_control_tokens,
            **kwargs,
        )
        if not tokenize:
            return text
        if keep_control_tokens:
            return self.encode(text, add_special_tokens=False)
        return self.encode_chat(text, chat_template)

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool,
        continue_final_message: bool,
        chat_template: str | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        mark: bool = True,
        content_format: str = "auto",
        **kwargs: Any,
    ) -> str:
        """The text of `apply_chat_template`; for `encode_chat` if control tokens are to be marked.

        Args:
            content_format: "openai": templates get each content as a list of parts; "string": as
                one text; "auto": as one text, unless it has an image or the template speaks of
                images and does not ask whether a content is text.

        Raises:
            ValidationError: see `apply_chat_template`.
        """
        if isinstance(messages, (str, Mapping)) or not all(
            isinstance(message, Mapping) for message in messages
        ):
            raise ValidationError("messages", messages, "a list of objects")
        if not messages:
            raise ValidationError("messages", messages, "at least one message")
        if add_generation_prompt and continue_final_message:
            raise ValidationError(
                "continue_final_message", True, "false while add_generation_prompt is true"
            )
        check_template_variables(kwargs)
        if chat_template is None and self._renderer.chat_template is None:
            raise ValidationError(
                "chat_template", None, "a template, because the tokenizer brings none"
            )
        OneOf(CONTENT_FORMATS).checked("chat_template_content_format", content_format)
        source = self._source(chat_template)
        with_content = _with_text
        is_open = content_format == "auto" and _IMAGES.search(source)
        if content_format == "openai" or (is_open and _ASKS_FOR_TEXT not in source):
            with_content = _with_parts
        conversation: Any = [with_content(one, index) for index, one in enumerate(messages)]
        if "developer" not in source:  # OpenAI's newer name of "system"
            conversation = [_as_system(message) for message in conversation]
        if mark:
            control = self._control_tokens(chat_template)
            conversation, tools, kwargs = (control.mark(v) for v in (conversation, tools, kwargs))
        try:
            with render_limit(RENDER_TIMEOUT_S):
                text = self._renderer.apply_chat_template(
                    conversation,
                    tools=list(tools) if tools else None,
                    chat_template=chat_template,
                    add_generation_prompt=add_generation_prompt,
                    continue_final_message=continue_final_message,
                    tokenize=False,
                    **kwargs,
                )
        except ImportError:  # a broken installation is not the request's fault
            raise
        except Exception as error:  # templates can raise anything
            field = "messages" if chat_template is None else "chat_template"
            value = messages if chat_template is None else chat_template
            raise TemplateRefusal(field, value, _template_error(error)) from error
        has_image = any(has_images(message.get("content")) for message in messages)
        return self.framed(str(text)) if has_image else str(text)

    @functools.cached_property
    def takes_late_system(self) -> bool:
        """Whether the folder's template renders messages of the system behind those of others."""
        roles = ("system", "user") * 2
        turns = [{"role": role, "content": f"[turn {i}]"} for i, role in enumerate(roles)]
        try:
            text = self.render_chat(turns, add_generation_prompt=True, continue_final_message=False)
        except TemplateRefusal:
            return False
        return all(turn["content"] in text for turn in turns)

    def encode_chat(
        self, text: str, chat_template: str | None = None, *, add_special_tokens: bool = False
    ) -> list[int]:
        """Token ids of what `render_chat` made with marks."""
        ids = self._control_tokens(chat_template).encode(text)
        if not add_special_tokens:
            return ids
        # what the tokenizer puts before and behind any text
        bare, whole = (self.encode("a", add_special_tokens=added) for added in (False, True))
        before = next(i for i in range(len(whole)) if whole[i : i + len(bare)] == bare)
        return [*whole[:before], *ids, *whole[before + len(bare) :]]

    def _source(self, chat_template: str | None) -> str:
        """The text of a template; None: the folder's, or all that it has."""
        own = self._renderer.chat_template or ""
        named = own if isinstance(own, dict) else {}
        if chat_template is not None:
            return named.get(chat_template, chat_template)
        return "\n".join(named.values()) if named else own

    def _find_control_tokens(self, chat_template: str | None) -> ControlTokens:
        """Special tokens, and added ones that the template itself writes."""
        source = self._source(chat_template)
        tokens = {
            text: number
            for number, text in self.added_tokens.items()
            if number in self.special_ids or (text in source and not text.isspace())
        }
        return ControlTokens(tokens, functools.partial(self.encode, add_special_tokens=False))


def _check_unicode(text: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValidationError(
            "prompt", text, f"Unicode text; there is half a surrogate pair at {error.start}"
        ) from error


def _folder_tokenizer(path: str | Path) -> Any:
    """transformers' tokenizer of a folder."""
    if not (Path(path) / FILES[0]).is_file():
        return converted_tokenizer(Path(path))
    for file in (Path(path) / name for name in FILES[1:]):
        if file.is_dir():  # transformers would go on without it
            raise ValidationError("tokenizer", str(file), "a file that can be read")
    # AutoTokenizer would import every model's code and torch; this class reads tokenizer.json
    # as it stands and never runs code from the folder.
    from transformers import PreTrainedTokenizerFast

    try:
        return PreTrainedTokenizerFast.from_pretrained(str(path), local_files_only=True)
    except Exception as error:  # the Rust parser raises plain Exception
        where, problem = _fault(Path(path), error)
        raise ValidationError("tokenizer", where, f"a readable tokenizer: {problem}") from error


def _image_frame(renderer: Any) -> tuple[re.Pattern[str], str] | None:
    """What finds the tokens with which images begin, and the text that each stands for."""
    names = ("boi_token", "image_token", "eoi_token")
    told = (renderer.init_kwargs.get(name) or getattr(renderer, name, None) for name in names)
    begin, place, end = (str(one or "") for one in told)
    if not (begin and place and end):
        return None
    unmarked = re.compile(f"(?<!{START}){re.escape(begin)}")
    return unmarked, f"\n\n{begin}{place}{end}\n\n"


def _fault(folder: Path, error: Exception) -> tuple[str, str]:
    """The file that keeps a tokenizer from being read, or the folder, and what is wrong."""
    for name in FILES:
        try:
            read_object(folder / name)
        except CheckpointError as fault:
            return str(fault.path), str(fault).partition(": ")[2]
    return str(folder), f"{' or '.join(FILES[:2])} ({type(error).__name__}: {error})"


def template_text(given: str) -> str:
    """The text of a chat template.

    Args:
        given: a file, or the text.

    Raises:
        ValidationError: neither.
    """
    field, allowed = "chat_template", "a file that can be read, or the text of a Jinja template"
    if "{" in given or "\n" in given:  # a file's name has neither
        return given
    try:
        return Path(given).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValidationError(field, given, allowed) from error


def check_template_variables(variables: Mapping[str, Any]) -> None:
    """Refuses variables of a chat template that are `RESERVED_TEMPLATE_NAMES`.

    Raises:
        ValidationError: names the first one.
    """
    for name in sorted(RESERVED_TEMPLATE_NAMES & variables.keys()):
        raise ValidationError("chat_template_kwargs", name, "a variable of the template")


def _template_error(error: Exception) -> str:
    """What is told of an error: the template's own words, of others the kind."""
    from jinja2 import TemplateError

    if not isinstance(error, (TemplateError, RenderTimeoutError)):
        return f"{type(error).__name__} in the template"
    return _INTERNALS.sub("...", unmarked(str(error))[:MAX_TEMPLATE_ERROR])


def _with_text(message: Mapping[str, Any], index: int) -> Mapping[str, Any]:
    """A message whose content is no list of parts: a template would print the list itself."""
    content = message.get("content")
    if has_images(content):
        return _with_parts(message, index)
    if not isinstance(content, list):
        return message
    return {**message, "content": content_text(content, f"messages[{index}].content")}


def _with_parts(message: Mapping[str, Any], index: int) -> Mapping[str, Any]:
    """A message whose content is a list of parts, for templates that go through them."""
    parts = content_parts(message.get("content"), f"messages[{index}].content")
    return {**message, "content": parts}


def _as_system(message: Mapping[str, Any]) -> Mapping[str, Any]:
    return {**message, "role": "system"} if message.get("role") == "developer" else message
