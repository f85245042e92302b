"""A deployment of Ray Serve that runs the HTTP application of `jaxserve serve` in each replica.

Before the replicas is a front: it reads a request's body, so that Ray's router can choose a replica
by it, and it tells the client what has become of a request whose replica was killed.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from jaxserve.errors import EngineDeadError, ValidationError
from server.batch import MAX_RESPONSE_ENTRIES
from server.cli import build_parser
from server.commands.edge_flags import allowed_hosts, edge_limits
from server.commands.log_flags import tracer
from server.commands.serve import asked_for
from server.on_ray import room
from server.on_ray.config import MAX_IN_FRONT, MAX_QUEUED, LLMConfig, num_processes, read_fields
from server.on_ray.forwarding import Forwarded, Front, messages_of
from server.process_end import exit_after

if TYPE_CHECKING:
    from ray.serve import Application
    from starlette.applications import Starlette
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from jaxserve.async_engine import AsyncEngine
    from server.on_ray.followers import Followers

HOLD_S = 0.05  # between two looks at an engine that is replaced
# an update replaces a front too, whose requests may wait until a replica has loaded and then run
MOST_WAIT_S = 600
TOLD_S = 0.5  # in which Ray is told why, before a replica that has lost a process ends
ENGINE_LOST = 70  # its exit code, as a server's
ARGS = ("llm_configs", "ingress_deployment_config", "require_room")


def build_openai_app(llm_serving_args: Mapping[str, Any]) -> Application:
    """The application that serves one model over OpenAI's API.

    In a file of `ray serve deploy`, `import_path` is "jaxserve.ray:build_openai_app" and `args` are
    what is given here.

    Args:
        llm_serving_args: `llm_configs`, a list of one `LLMConfig` or mapping of its fields,
            `ingress_deployment_config`, options of the front's deployment, and `require_room`:
            whether a cluster without room for the first replicas is refused. Without it a warning
            says what is missing, and Ray waits for hosts.

    Raises:
        ValidationError: a field is unknown or of a wrong type, or there is no room; nothing is
            deployed then.
    """
    given = llm_serving_args.get("llm_configs")
    for name in llm_serving_args:
        if name not in ARGS:
            raise ValidationError(f"args.{name}", llm_serving_args[name], f"one of {ARGS}")
    if not isinstance(given, (list, tuple)) or len(given) != 1:
        allowed = "a list of one model: another model is another application"
        raise ValidationError("args.llm_configs", given, allowed)
    front = llm_serving_args.get("ingress_deployment_config", {})
    if not isinstance(front, Mapping):
        raise ValidationError("args.ingress_deployment_config", front, "a mapping")
    is_room_required = llm_serving_args.get("require_room", False)
    if not isinstance(is_room_required, bool):
        raise ValidationError("args.require_room", is_room_required, "true or false")
    one = given[0]
    config = one if isinstance(one, LLMConfig) else read_fields(LLMConfig, "llm_configs[0]", one)
    words, options, flags = config.words(), config.options(), config.flags()
    # imported here: a configuration is read without Ray
    from ray import serve

    limits, name = edge_limits(flags), options["name"]

    def make_front() -> Front:
        app_name = serve.get_replica_context().app_name
        handle = serve.get_deployment_handle(name, app_name)
        return Front(handle.options(method_name="answer", stream=True), limits)

    bounds = {
        "max_ongoing_requests": MAX_IN_FRONT,
        "max_queued_requests": MAX_QUEUED,
        "graceful_shutdown_timeout_s": MOST_WAIT_S,
    }
    front_options = {"name": "jaxserve"} | bounds | dict(front)
    front_deployment = serve.deployment(serve.ingress(make_front)(), **front_options)
    of_processes = num_processes(flags), options["ray_actor_options"]
    replicas = serve.deployment(Replica, **options).bind(words, *of_processes)
    room.check(options, front_options, is_room_required)
    return front_deployment.bind(replicas)


class Replica:
    """The application, whose engine begins to load in its own process, or in several.

    Args:
        words: the command line.
        processes: that the engine has; the replica is process 0, in the first of Ray's bundles.
        actor: options of Ray's for the others.

    Raises:
        RayError: one of the others cannot be started.
    """

    def __init__(self, words: list[str], processes: int, actor: Mapping[str, Any]) -> None:
        self._life = contextlib.AsyncExitStack()  # first: it ends one that could not be made too
        self._followers: Followers | None = None
        if processes > 1:
            # imported here: most engines have one process
            from server.on_ray import followers

            self._followers = followers.Followers(words, processes, actor)
            words = self._followers.words
        self._app = make_application(words)
        self._begun = False
        self._waiting = 0  # prompt tokens, when the engine was last there to tell

    async def check_health(self) -> None:
        """Called by Ray.

        Raises:
            Whatever has ended the engine for good: Ray then replaces the replica.
            EngineDeadError: another process of the engine has ended, so this one ends too.
        """
        if not self._begun:
            self._begun = True
            await self._life.enter_async_context(self._app.router.lifespan_context(self._app))
        if self._followers is not None:
            try:
                self._followers.check()
            except EngineDeadError:
                # Ray would wait for requests here that nothing can finish: another replica has them
                exit_after(TOLD_S, ENGINE_LOST)
                raise
        # the first check comes before the replica gets requests, and may take as long as a load
        await serving(self._app.state.service.engine)

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Ray calls this and hands the result to `WorkPolicy`: prompt tokens that wait here."""
        engine: AsyncEngine = self._app.state.service.engine
        if engine.is_ready:  # while it is replaced its requests go on waiting
            self._waiting = engine.ledger.num_waiting_tokens
        return {"queued_tokens": self._waiting}

    async def answer(self, asked: Forwarded) -> AsyncIterator[Message]:
        """The messages of the application's answer, as they come."""
        async with contextlib.aclosing(messages_of(self._app, asked)) as messages:
            async for message in messages:
                yield message

    async def __del__(self) -> None:  # called by Ray once nothing runs any more
        await self._life.aclose()


def make_application(words: list[str], of_batch: bool = False) -> Starlette:
    """The HTTP application of a command line, whose engine begins to load in its own process.

    Args:
        words: the command line.
        of_batch: its only client is the batch, as with `jaxserve run-batch`: no key is asked for.
    """
    # imported here: who builds an application need not load what serves it
    from jaxserve.async_engine import AsyncEngine
    from server.app import create_app

    args = build_parser("serve").parse_args(words)
    config, told, isolation = asked_for(args)
    engine = AsyncEngine(config, isolation=isolation if args.isolate_engine else None)
    if of_batch:
        limits = replace(told["limits"], max_response_entries=MAX_RESPONSE_ENTRIES)
        told |= {"api_keys": (), "limits": limits}
    app = create_app(
        engine,
        allowed_origins=args.allowed_origins,
        allowed_hosts=allowed_hosts(args) if args.allowed_hosts and not of_batch else (),
        tracer=tracer(args, config.model_names[0]),
        has_page=args.page,
        **told,
    )
    app.add_middleware(HoldMiddleware, engine=engine)
    return app


class HoldMiddleware:
    """Holds requests while an engine that has died is replaced, for Ray goes on sending them.

    Args:
        app: what answers them.
        engine: that of the application.
    """

    def __init__(self, app: ASGIApp, engine: AsyncEngine) -> None:
        self._app, self._engine = app, engine

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        while self._engine.is_restarting and scope["type"] == "http":
            await asyncio.sleep(HOLD_S)
        await self._app(scope, receive, send)


async def serving(engine: AsyncEngine) -> None:
    """Wait until an engine has loaded; a dead one that is replaced counts as alive.

    Raises:
        Whatever has ended the engine for good: Ray then replaces the replica.
    """
    if not engine.is_restarting:
        await engine.wait_ready()
