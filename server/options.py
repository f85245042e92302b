"""What a server adds to its answers and which routes it has: chosen when it is started."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from jaxserve.errors import ValidationError
from server.protocol.body_errors import renamed


@dataclass(frozen=True, slots=True)
class Options:
    """Each is a flag of `jaxserve serve`.

    Attributes:
        tells_cached_tokens: usage says how many prompt tokens the prefix cache had, which tells a
            client what others have asked.
        includes_usage: every chunk of a stream has the usage so far, and a last one the whole.
        shows_token_ids: logprobs name tokens by their ids, unless a request says otherwise.
        sends_request_ids: responses have an `X-Request-Id`.
        tracks_load: `/load` says how many requests are being answered.
        tells_tokenizer: `/tokenizer_info` is there.
        tells_timings: responses to one prompt with one choice say how long they took.
        has_control_routes: routes that empty caches, `/sleep` and `/wake_up` are there.
        trusts_templates: requests may bring chat templates of their own.
        guards_metrics: `/metrics` and `/version` need a key, where the server asks for keys.
        template_variables: of the chat template, unless a request says otherwise.
        root_path: what a proxy puts before every path: "" or "/a/b".
        profile_folder: where `/start_profile` records to; "": it is not there.

    Raises:
        ValidationError: names the flag whose value is not allowed.
    """

    tells_cached_tokens: bool = False
    includes_usage: bool = False
    shows_token_ids: bool = False
    sends_request_ids: bool = True
    tracks_load: bool = False
    tells_tokenizer: bool = False
    tells_timings: bool = False
    has_control_routes: bool = False
    trusts_templates: bool = False
    guards_metrics: bool = False
    template_variables: Mapping[str, Any] = field(default_factory=dict)
    root_path: str = ""
    profile_folder: str = ""

    def __post_init__(self) -> None:
        path = self.root_path
        if path and (not path.startswith("/") or path.endswith("/")):
            raise ValidationError(
                "--root-path", path, "a path such as /api, without a / at its end"
            )
        if not self.template_variables:
            return
        # imported here: a command's help needs no tokenizer
        from jaxserve.tokenization.tokenizer import check_template_variables

        with renamed(lambda field: "--default-chat-template-kwargs"):
            check_template_variables(self.template_variables)


NO_OPTIONS = Options()
