"""Flags of `vllm serve` that `jaxserve serve` has not: passed over, or refused by name."""

from __future__ import annotations

import argparse
import contextlib
import json
from typing import Any

from jaxserve.config.vllm_arguments import ANY, NEUTRAL, REFUSED, own_settings
from server.protocol.body_errors import renamed

# of vLLM's server alone: flag -> the values that ask for nothing, or for what is so anyway
SERVER_NEUTRAL: dict[str, Any] = {
    "allow_credentials": (None, False),
    "allowed_headers": ANY,  # all are
    "allowed_methods": ANY,
    "api_server_count": (None, 1),
    "chat_template_content_format": (None, "auto", "string"),
    "disable_access_log_for_endpoints": ANY,
    "disable_fastapi_docs": (None, False),
    "disable_frontend_multiprocessing": ANY,
    "enable_log_deltas": ANY,
    "enable_log_outputs": (None, False),
    "enable_offline_docs": ANY,  # they need nothing from elsewhere
    "enable_ssl_refresh": (None, False),
    "exclude_tools_when_tool_choice_none": (None, False),
    "fingerprint_mode": (None, "full"),
    "h11_max_header_count": ANY,  # heads have a bound of their own
    "h11_max_incomplete_event_size": ANY,
    "log_error_stack": ANY,
    "max_log_len": ANY,  # prompts are not logged
    "response_role": (None, "assistant"),
    "sse_keep_alive_interval": ANY,  # --keep-alive-interval
    "tokens_only": (None, False),
    "trust_request_chat_template": (None, False),
    "headless": (None, False),
    "tool_strict_level": ANY,
}
SERVER_REFUSED: dict[str, str] = {
    "fingerprint_value": "the fingerprint is the version",
    "log_config_file": "set --uvicorn-log-level",
    "lora_modules": "there are no adapters yet",
    "middleware": "there are no plugins",
    "reasoning_effort_budgets": "requests have thinking_token_budget",
    "reasoning_parser_plugin": "there are no plugins",
    "ssl_ciphers": "they are the system's",
    "tool_parser_plugin": "there are no plugins",
    "tool_server": "tools are the client's",
}


# how names of switches begin; all others take a value
_SWITCHES = (
    "aggregate_engine",
    "allow_credentials",
    "async_",
    "calculate_",
    "disable_",
    "enable_",
    "enforce_",
    "exclude_",
    "fully_",
    "headless",
    "interleave_",
    "kv_sharing_",
    "language_model_",
    "log_error_",
    "tokens_only",
    "trust_",
    "use_tqdm",
)


def add_vllm_flags(parser: argparse.ArgumentParser) -> None:
    """A flag for each name that the parser has not."""
    for name in sorted({*NEUTRAL, *REFUSED, *SERVER_NEUTRAL, *SERVER_REFUSED}):
        how: dict[str, Any] = {"type": _value}
        if name.startswith(_SWITCHES):
            how = {"action": argparse.BooleanOptionalAction}
        elif name in ("lora_modules", "middleware"):
            how["nargs"] = "+"
        flag = "--" + name.replace("_", "-")
        # one that the parser has is jaxserve's
        with contextlib.suppress(argparse.ArgumentError):
            parser.add_argument(
                flag, dest=f"vllm:{name}", default=None, help=argparse.SUPPRESS, **how
            )


def check_vllm_flags(args: argparse.Namespace) -> None:
    """Pass over what asks for nothing, with one log line.

    Raises:
        ValidationError: names the first flag that asks for what jaxserve does not do.
    """
    given = {
        dest.removeprefix("vllm:"): value
        for dest, value in vars(args).items()
        if dest.startswith("vllm:") and value is not None
    }
    with renamed(lambda name: "--" + name.replace("_", "-")):
        own_settings(given, NEUTRAL | SERVER_NEUTRAL, REFUSED | SERVER_REFUSED)


def _value(text: str) -> Any:
    """JSON where it is some, else the text."""
    try:
        return json.loads(text)
    except ValueError:
        return text
