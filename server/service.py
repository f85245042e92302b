"""What every route needs of the engine: readiness, model names, prompts as token ids, limits."""

from __future__ import annotations

import asyncio
import hashlib
import json
import secrets
import time
from collections.abc import Mapping, Sequence
from copy import copy
from functools import cached_property
from typing import TYPE_CHECKING, Any

from starlette.requests import Request

from jaxserve.client.input_processor import check_cache_salt
from jaxserve.client.prompt_reader import check_text_fits
from jaxserve.errors import EngineDeadError, PausedError, QueueFullError, ValidationError
from jaxserve.request.queueing import Queueing
from jaxserve.scheduling.ledger import Entry
from jaxserve.tokenization.truncation import Cut, asked_cut
from server.body_reader import BodyReader
from server.client_limits import Limits
from server.counts import Counts
from server.errors import ApiError, as_api_error
from server.holders import Holders
from server.keys import ApiKey, Client, KeyRing, client_name
from server.middleware import Load
from server.options import NO_OPTIONS, Options
from server.protocol.chat import TemplateFields
from server.protocol.logprobs import TokenText
from server.protocol.queueing import queueing
from server.protocol.requests import PromptRequest, QueuedRequest
from server.response_store import ResponseStore
from server.tools.choice import Parsers
from server.unread_answers import UnreadAnswers
from server.watchers import Watch

if TYPE_CHECKING:
    from jaxserve.async_engine import AsyncEngine
    from jaxserve.async_llm_engine import AsyncLLMEngine

NO_PARSERS = Parsers()
CUT_CONTEXTS = 16  # of which a conversation that is cut may have as many tokens


class Service:
    """The engine as the routes see it.

    Args:
        engine: the engine, perhaps still loading.
        limits: on what a request may ask for.
        options: what answers tell, and which routes there are.
        parsers: what reads calls and thoughts in answers.
        api_keys: tell clients apart; none: requests need no key.
        counts: on which limits are kept; None: no other process has the same limits.

    Attributes:
        keys: those; None where there are none.
        created: when its models were made, in seconds of the epoch.
        models: the services of all models of the server, the default one first.
        is_held: no request is let in yet, since the server's start has not succeeded.
    """

    def __init__(
        self,
        engine: AsyncEngine,
        limits: Limits = Limits(),  # noqa: B008
        *,
        options: Options = NO_OPTIONS,
        parsers: Parsers = NO_PARSERS,
        api_keys: Sequence[ApiKey] = (),
        counts: Counts | None = None,
    ) -> None:
        self.engine = engine
        self.models = [self]
        self.counts = counts or Counts()
        self.options = options
        self.limits = limits
        self.bodies = BodyReader(limits, self.counts)
        self.unread = UnreadAnswers(limits.max_unread_answer_bytes, counts=self.counts)
        self.parsers = parsers
        self.responses = ResponseStore(
            limits.max_stored_responses, limits.max_stored_bytes, max(1, len(api_keys))
        )
        self.holders = Holders()
        self.keys = KeyRing(api_keys, self.counts) if api_keys else None
        self.watch = Watch(self, tells_cached=options.tells_cached_tokens or not api_keys)
        self.load = Load(self.counts)
        self.created = int(time.time())
        self.model_names = engine.asked.model_names
        self.is_held = False

    def add_model(self, engine: AsyncEngine, parsers: Parsers) -> None:
        """Serve one more model, whose clients, limits and stored responses are the server's."""
        other = copy(self)
        other.engine, other.parsers = engine, parsers
        other.model_names = engine.asked.model_names
        self.models.append(other)

    def of_model(self, name: object) -> Service:
        """That of the model which has a name; the default one where none has, or none is given."""
        named = (one for one in self.models if name in (*one.model_names, one.engine.asked.model))
        return next(named, self.models[0])

    def chosen(self, request: Request) -> list[Service]:
        """Those that a request of control is for: the model of its parameter `model`, or all.

        Raises:
            ApiError: 404, no model has this name.
        """
        name = request.query_params.get("model")
        if name is None:
            return self.models
        found = self.of_model(name)
        found.resolve_model(name)
        return [found]

    @cached_property
    def controls(self) -> AsyncLLMEngine:
        """What holds requests back and frees memory."""
        # imported here: most servers are not asked for it
        from jaxserve.async_llm_engine import AsyncLLMEngine

        return AsyncLLMEngine(self.engine, self.options.profile_folder)

    @staticmethod
    def of(request: Request) -> Service:
        """The service of the application that handles this request."""
        service: Service = request.app.state.service
        return service

    def require_ready(self) -> None:
        """Raises ApiError 503 while no engine serves, or the server is about to end."""
        why = self.unready()
        if why is not None:
            raise why[1]

    def require_engine(self) -> None:
        """Raises ApiError 503 while there is no engine that could be told to sleep or to wake."""
        why = self.unready()
        if why is not None and why[0] not in ("paused", "silent"):
            raise why[1]

    def unready(self) -> tuple[str, ApiError] | None:
        """Why no engine serves, in a word and as requests are told; None: one does."""
        engine = self.engine
        if engine.is_draining:
            return "draining", _come_again("the server shuts down", 5)
        if engine.is_dead:
            return "dead", ApiError(503, "the engine has stopped; the server must be restarted")
        if engine.is_restarting:
            return "restarting", _come_again("the engine has died and is started again", 2)
        if self.is_held or not engine.is_ready:
            return "loading", _come_again("the model is still loading", 5)
        if engine.refusal is not None:
            return "paused", as_api_error(PausedError(engine.refusal))
        silence = engine.silence
        return None if silence is None else ("silent", _come_again(silence, 2))

    def serves(self) -> bool:
        """Whether requests are let in at all; `require_ready` says why not."""
        return self.unready() is None

    def refusal(self, client: str) -> ApiError | None:
        """What any request of a client is told that generates; None: it has to be read first."""
        if not self.serves():
            return None  # the application says which it is
        try:
            self.engine.check_room(client)
        except QueueFullError as error:
            return as_api_error(error)
        except EngineDeadError:
            pass  # the application says so
        return None

    @property
    def num_entering(self) -> int:
        """Requests that have been let in and that their engine has not been sent."""
        engines = (one.engine for one in self.models)
        return sum(one.ledger.num_entering for one in engines if one.is_ready)

    def resolve_model(self, name: str | None) -> str:
        """The name to answer with: the default one when the request gives none.

        The model's folder, as the server was given it, is another name of the default one.

        Raises:
            ApiError: 404, no model has this name.
        """
        if name is None or name == self.engine.asked.model:
            return self.model_names[0]
        if name not in self.model_names:
            known = ", ".join(one for model in self.models for one in model.model_names)
            raise ApiError(
                404, f"The model `{name[:200]}` does not exist; it can be {known}", param="model"
            )
        return name

    @property
    def tells_cached_tokens(self) -> bool:
        """Whether responses say how many prompt tokens the prefix cache had."""
        return self.options.tells_cached_tokens

    def cache_salt(self, client: Client | None, given: str | None) -> str | None:
        """What keeps a request's pages of the prefix cache from others'.

        Pages of one API key are not found for another, so that no answer's speed tells what other
        clients have asked.

        Args:
            client: of the key that came with the request, None without keys.
            given: the request's own `cache_salt`.

        Raises:
            ValidationError: the request's own is none.
        """
        if client is None or self.limits.share_prefix_cache:
            return given
        check_cache_salt(given)
        return hashlib.sha256(json.dumps([client.name, given]).encode()).hexdigest()

    @property
    def reads_images(self) -> bool:
        """Whether conversations may have images."""
        most = self.engine.config.asked.max_images
        return self.engine.model_config.images is not None and most > 0

    @property
    def sampling_defaults(self) -> Mapping[str, float]:
        """What the model's generation_config.json says of sampling."""
        return self.engine.config.sampling_defaults

    async def encode(
        self, text: str, *, add_special_tokens: bool, field: str, cut: Cut | None = None
    ) -> list[int]:
        """Token ids of a text, or what is to be kept of them, tokenised off the event loop.

        Raises:
            ValidationError: the text cannot fit into the context.
        """

        def encode() -> list[int]:
            tokenizer = self.engine.tokenizer
            if cut is not None:
                return cut.encode(tokenizer, text, add_special_tokens=add_special_tokens)
            check_text_fits(text, tokenizer, self.engine.max_model_len, field)
            return tokenizer.encode(text, add_special_tokens=add_special_tokens)

        return await asyncio.to_thread(encode)

    async def encode_chat(
        self,
        request: TemplateFields,
        *,
        add_special_tokens: bool,
        tools: Sequence[Mapping[str, Any]] = (),
        cut: Cut | None = None,
        images: list[str] | None = None,
    ) -> list[int]:
        """Token ids of a conversation, or what is to be kept of them, by the model's template.

        Args:
            request: the conversation.
            add_special_tokens, tools, cut: how it is rendered and tokenised.
            images: takes the addresses of images, each of which has one token; None: a
                conversation with images is refused.

        Raises:
            ValidationError: the template refuses the messages, or they cannot fit; the request
                brings a template of its own, and the server takes none.
        """
        template = request.chat_template
        if template is not None and not self.options.trusts_templates:
            allowed = "null: this server was started without --trust-request-chat-template"
            raise ValidationError("chat_template", template, allowed)
        keep, most = self.limits.allow_control_tokens, self.engine.max_model_len
        variables = {**self.options.template_variables, **request.template_variables()}
        if cut is not None:
            most *= CUT_CONTEXTS

        def encode() -> list[int]:
            tokenizer = self.engine.tokenizer
            text = tokenizer.render_chat(
                request.render_messages(images if self.reads_images else None),
                add_generation_prompt=request.add_generation_prompt,
                continue_final_message=request.continue_final_message,
                chat_template=template,
                mark=not keep,
                tools=tools,
                **variables,
            )
            check_text_fits(text, tokenizer, most, "messages")
            if keep:
                tokens = tokenizer.encode(text, add_special_tokens=add_special_tokens)
            else:
                tokens = tokenizer.encode_chat(
                    text, template, add_special_tokens=add_special_tokens
                )
            return tokens if cut is None else cut.of(tokens)

        return await asyncio.to_thread(encode)

    def cut(self, request: PromptRequest, reserved: int | None) -> Cut | None:
        """How prompts of a request are cut, `reserved` tokens of output in mind.

        Raises:
            ValidationError: to no tokens, or to more than the context.
        """
        given, side = request.truncate_prompt_tokens, request.truncation_side
        return asked_cut(given, side, self.engine.max_model_len, reserved)

    async def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Text of token ids, decoded off the event loop."""
        return await asyncio.to_thread(
            self.engine.tokenizer.decode, token_ids, skip_special_tokens=skip_special_tokens
        )


def _come_again(text: str, seconds: int) -> ApiError:
    return ApiError(503, text, headers={"Retry-After": str(seconds)})


def client_of(request: Request) -> Client | None:
    """Whose key came with a request; None where the server asks for none."""
    return getattr(request.state, "client", None)


def queueing_of(request: Request, body: QueuedRequest) -> Queueing:
    """What decides whose turn a request is whose body has been read.

    Raises:
        ValidationError: a header that is no number.
    """
    client = client_of(request)
    least = None if client is None else client.priority
    arrival = request.state.arrival_time
    return queueing(request.headers, body, arrival, least, client_name(request.scope))


def entry_of(request: Request) -> Entry | None:
    """That a request was let in at the door; None where it was not asked yet."""
    return getattr(request.state, "entry", None)


def response_id(prefix: str, request: Request, body_id: str | None) -> str:
    """The id of a response: `<prefix>-<client's request id or 16 hex digits>`."""
    given = getattr(request.state, "client_request_id", None) or body_id
    return f"{prefix}-{given or secrets.token_hex(8)}"


def engine_id(answer_id: str, index: int) -> str:
    """The id of one prompt in the engine: unique even when clients repeat their request ids."""
    return f"{answer_id}-{index}-{secrets.token_hex(4)}"


def token_text(service: Service, *, as_ids: bool) -> TokenText:
    """How logprobs show a token: its text, or `token_id:<id>`."""
    if as_ids:
        return "token_id:{}".format
    return service.engine.tokenizer.token_text
