"""`jaxserve chat`: a conversation in the terminal, with a model in this process or a server."""

from __future__ import annotations

import argparse
import json
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any

from jaxserve.errors import JaxServeError
from server.commands.engine_flags import (
    ONE_AT_A_TIME,
    add_engine_flags,
    add_model_argument,
    engine_config,
)
from server.commands.sampling_flags import add_sampling_flags, sampling_fields, sampling_params

Message = dict[str, str]
# A conversation in, the pieces of the answer out.
Reply = Callable[[list[Message]], Iterator[str]]


class ServerError(JaxServeError):
    """A server refused a request, broke off, or is not there."""


def register(subparsers: Any) -> None:
    """Add the command to the parser."""
    parser = subparsers.add_parser("chat", help="talk to a model in the terminal")
    add_model_argument(parser)
    parser.add_argument(
        "--url",
        metavar="URL",
        help="talk to this server, such as http://127.0.0.1:8000, instead; the engine's flags then "
        "have no effect, and MODEL is the name that the server knows",
    )
    parser.add_argument("--api-key", metavar="KEY", help="for --url")
    parser.add_argument("--system-prompt", metavar="TEXT", help="first message")
    add_sampling_flags(parser)
    add_engine_flags(parser)
    parser.set_defaults(func=run, **ONE_AT_A_TIME)


def run(args: argparse.Namespace) -> int:
    """Talk until end of input or Ctrl-C; returns the exit code."""
    history: list[Message] = []
    if args.system_prompt:
        history.append({"role": "system", "content": args.system_prompt})
    try:
        if args.url is not None:
            converse(server_reply(args), history)
            return 0
        from server.commands.local import LocalEngine

        params = sampling_params(args)
        with LocalEngine(engine_config(args)) as local:

            def reply(messages: list[Message]) -> Iterator[str]:
                tokenizer = local.engine.tokenizer
                token_ids = tokenizer.apply_chat_template(messages, tokenize=True)
                return local.stream({"prompt_token_ids": token_ids}, params)

            converse(reply, history)
    except KeyboardInterrupt:
        print()
    return 0


def converse(reply: Reply, history: list[Message]) -> None:
    """Read a line, print the answer, until end of input or Ctrl-C at the prompt.

    Ctrl-C during an answer ends that answer only. A turn that is refused (a conversation that has
    become too long, say) is taken back out of the history.
    """
    print("Ctrl-D ends the conversation, Ctrl-C an answer.", file=sys.stderr)
    while True:
        try:
            line = input("> ")
        except (EOFError, KeyboardInterrupt):
            print()
            return
        if not line.strip():
            continue
        history.append({"role": "user", "content": line})
        answer = ""
        try:
            for text in reply(history):
                answer += text
                print(text, end="", flush=True)
        except KeyboardInterrupt:
            # The pieces so far stay in the history, as they stay on the screen.
            print(" [stopped]", end="")
        except JaxServeError as error:
            print(f"jaxserve: {error}", file=sys.stderr)
            history.pop()
            continue
        print()
        history.append({"role": "assistant", "content": answer})


def server_reply(args: argparse.Namespace) -> Reply:
    """Answers from a server's `/v1/chat/completions`.

    Raises:
        ServerError: the server cannot be reached or refuses.
    """
    url = args.url.rstrip("/").removesuffix("/v1") + "/v1/chat/completions"
    headers = {"Content-Type": "application/json"}
    if args.api_key:
        headers["Authorization"] = f"Bearer {args.api_key}"
    fields = {**sampling_fields(args), "stream": True}
    if args.model or args.model_path:
        fields["model"] = args.model or args.model_path

    def reply(messages: list[Message]) -> Iterator[str]:
        body = json.dumps({**fields, "messages": messages}).encode()
        request = urllib.request.Request(url, body, headers)
        try:
            with urllib.request.urlopen(request) as response:
                for line in response:
                    if line.startswith(b"data: {"):
                        yield _text_of(json.loads(line[6:]))
        except urllib.error.HTTPError as error:
            raise ServerError(_message(error)) from error
        except OSError as error:
            raise ServerError(f"{url}: {error}") from error

    if not url.startswith(("http://", "https://")):
        raise ServerError(f"--url {args.url} must start with http:// or https://")
    return reply


def _text_of(event: dict[str, Any]) -> str:
    if "error" in event:
        raise ServerError(str(event["error"].get("message")))
    return "".join(choice["delta"].get("content") or "" for choice in event["choices"])


def _message(error: urllib.error.HTTPError) -> str:
    text = error.read().decode("utf-8", "replace")
    try:
        return str(json.loads(text)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"{error.code} {error.reason}"
