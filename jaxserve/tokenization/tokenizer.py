"""A Hugging Face tokenizer folder, used in a thread-safe way and without torch."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxserve.errors import ValidationError
from jaxserve.tokenization.messages import content_text
from jaxserve.tokenization.token_bytes import TokenBytes

# Arguments of `apply_chat_template`, ours and transformers': a caller's variables of the template
# must not set them behind their back (CVE-2025-62426).
RESERVED_TEMPLATE_NAMES = frozenset(
    {
        "add_generation_prompt",
        "chat_template",
        "continue_final_message",
        "conversation",
        "max_length",
        "messages",
        "padding",
        "return_assistant_tokens_mask",
        "return_dict",
        "return_tensors",
        "sanitize_control_tokens",
        "tokenize",
        "tokenizer_kwargs",
        "tools",
        "truncation",
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

    def __init__(self, path: str | Path):
        """Loads the tokenizer of a folder.

        Raises:
            ValidationError: the folder has no readable tokenizer.json, or the tokenizer's decoder
                is of a kind whose text cannot be made token by token.
        """
        self.path = str(path)
        file = Path(path) / "tokenizer.json"
        if not file.is_file():
            raise ValidationError("tokenizer", self.path, "a folder that holds tokenizer.json")
        # AutoTokenizer would import every model's code and torch; this class reads tokenizer.json
        # as it stands and never runs code from the folder.
        # While it is imported it would tell everybody that PyTorch is missing, which nobody needs.
        os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
        from transformers import PreTrainedTokenizerFast

        try:
            self._renderer = PreTrainedTokenizerFast.from_pretrained(
                self.path, local_files_only=True
            )
        except Exception as error:  # the Rust parser raises plain Exception
            raise ValidationError("tokenizer", self.path, f"a readable tokenizer: {error}") from (
                error
            )
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

    @property
    def chat_template(self) -> str | dict[str, str] | None:
        """The folder's chat template, or None."""
        return self._renderer.chat_template

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text.

        Raises:
            ValidationError: the text holds half a surrogate pair, which is not Unicode text.
        """
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise ValidationError(
                "prompt", text, f"Unicode text; there is half a surrogate pair at {error.start}"
            ) from error
        return self._backend.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        """Text of token ids; ids that are not in the vocabulary add nothing."""
        return self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def convert_ids_to_tokens(self, ids: Iterable[int]) -> list[str | None]:
        """The vocabulary's spelling of each id, None for ids that are not in it."""
        return [self._backend.id_to_token(i) for i in ids]

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
        **kwargs: Any,
    ) -> str | list[int]:
        """Renders a conversation in transformers' sandboxed Jinja environment.

        Args:
            messages: the conversation, at least one message; content that is a list of text parts
                is joined by lines.
            add_generation_prompt: end with the start of an assistant message.
            continue_final_message: leave the last message open instead.
            chat_template: a template, or the name of one of the folder's; the folder's default
                when None.
            tools: JSON schemas of functions, for templates that know them.
            tokenize: return token ids; the template writes the special tokens itself.
            kwargs: further variables of the template.

        Raises:
            ValidationError: no template, a template that does not compile, or messages that the
                template refuses.
        """
        self._check_chat(messages, add_generation_prompt, continue_final_message, kwargs)
        if chat_template is None and self._renderer.chat_template is None:
            raise ValidationError(
                "chat_template", None, "a template, because the tokenizer brings none"
            )
        conversation = [_with_text(message, index) for index, message in enumerate(messages)]
        try:
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
            raise ValidationError(field, value, f"the chat template failed: {error}") from error
        return self.encode(text, add_special_tokens=False) if tokenize else text

    def _check_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool,
        continue_final_message: bool,
        kwargs: dict[str, Any],
    ) -> None:
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


def check_template_variables(variables: Mapping[str, Any]) -> None:
    """Refuses variables of a chat template that are arguments of `apply_chat_template`.

    Raises:
        ValidationError: names the first one.
    """
    for name in sorted(RESERVED_TEMPLATE_NAMES & variables.keys()):
        raise ValidationError("chat_template_kwargs", name, "a variable of the template")


def _with_text(message: Mapping[str, Any], index: int) -> Mapping[str, Any]:
    """A message whose content is no list of parts: a template would print the list itself."""
    if not isinstance(message.get("content"), list):
        return message
    return {**message, "content": content_text(message["content"], f"messages[{index}].content")}
