"""A deployment of Ray Serve that runs the HTTP application of `jaxserve serve` in each replica.

Read as `jaxserve.ray`; its configuration has the fields of `ray.serve.llm.LLMConfig` that jaxserve
knows. Needs the extra `ray`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import io
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from jaxserve.errors import ValidationError
from server.cli import build_parser
from server.commands.config_file import with_settings
from server.commands.edge_flags import allowed_hosts
from server.commands.log_flags import tracer
from server.commands.serve import asked_for

if TYPE_CHECKING:
    from ray.serve import Application
    from starlette.applications import Starlette
    from starlette.types import ASGIApp, Receive, Scope, Send

    from jaxserve.async_engine import AsyncEngine

# Flags of what Ray has in jaxserve's place: the socket, and the end of a replica.
OF_RAY = ("config", "host", "port", "uds", "shutdown_timeout", "record_trace", "num_workers")
OF_MODEL = ("model", "served_model_name")  # flags that `model_loading_config` gives
# as many as the server takes connections: its own limits on what waits are met first
MAX_ONGOING = 4096
HOLD_S = 0.05  # between two looks at an engine that is replaced


@dataclasses.dataclass(frozen=True)
class ModelLoadingConfig:
    """Which model.

    Attributes:
        model_id: the name that requests have.
        model_source: a folder, or an id of the hub; None: it is the name.
    """

    model_id: str
    model_source: str | None = None


@dataclasses.dataclass(frozen=True)
class LLMConfig:
    """One model and how it is deployed.

    Attributes:
        model_loading_config: which model, a `ModelLoadingConfig` or a mapping of its fields.
        engine_kwargs: flags of `jaxserve serve` by their names, with underscores or dashes.
        accelerator_type: of each replica, by Ray's names ("H200", "TPU-V6E"); None: no device.
        deployment_config: options of `serve.deployment`, such as `num_replicas`,
            `autoscaling_config`, `ray_actor_options`.
        runtime_env: of the replicas' processes.

    Raises:
        ValidationError: a field is unknown or of a wrong type, or a flag is not allowed.
    """

    model_loading_config: ModelLoadingConfig
    engine_kwargs: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    accelerator_type: str | None = None
    deployment_config: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    runtime_env: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        loading = self.model_loading_config
        if not isinstance(loading, ModelLoadingConfig):
            read = _read(ModelLoadingConfig, "model_loading_config", loading)
            object.__setattr__(self, "model_loading_config", read)
        for name in ("engine_kwargs", "deployment_config", "runtime_env"):
            if not isinstance(getattr(self, name), Mapping):
                raise ValidationError(name, getattr(self, name), "a mapping")
        for name in self.engine_kwargs:
            if name.replace("-", "_") in OF_RAY or name.replace("-", "_").startswith("ssl_"):
                allowed = "left out: Ray's own configuration has it"
                raise ValidationError(f"engine_kwargs.{name}", self.engine_kwargs[name], allowed)
            if name.replace("-", "_") in OF_MODEL:
                allowed = "left out: model_loading_config has it"
                raise ValidationError(f"engine_kwargs.{name}", self.engine_kwargs[name], allowed)
        self.flags()

    def words(self) -> list[str]:
        """The command line that serves the model."""
        loading = self.model_loading_config
        own = {
            "model": loading.model_source or loading.model_id,
            "served-model-name": loading.model_id,
        }
        return with_settings(["serve"], own | dict(self.engine_kwargs), "engine_kwargs")

    def flags(self) -> argparse.Namespace:
        """The same, parsed.

        Raises:
            ValidationError: a flag is unknown, or its value is not allowed.
        """
        told = io.StringIO()
        try:
            with contextlib.redirect_stderr(told):
                return build_parser("serve").parse_args(self.words())
        except SystemExit:  # what the parser does after its line
            said = told.getvalue().strip()
        raise ValidationError("engine_kwargs", dict(self.engine_kwargs), f"flags: {said}")

    def options(self) -> dict[str, Any]:
        """Of the deployment: what it says itself, and what follows from the flags."""
        flags = self.flags()
        actor = dict(self.deployment_config.get("ray_actor_options", {}))
        if self.runtime_env:
            actor.setdefault("runtime_env", dict(self.runtime_env))
        if kind := self.accelerator_type:
            count = (flags.tensor_parallel_size or 1) * (flags.data_parallel_size or 1)
            resources = dict(actor.get("resources", {}))
            if kind.upper().startswith("TPU"):
                resources.setdefault("TPU", count)
            else:
                actor.setdefault("num_gpus", count)
            actor["resources"] = resources
            actor.setdefault("accelerator_type", kind)
        return {
            "name": f"jaxserve:{self.model_loading_config.model_id}".replace("/", "--"),
            "max_ongoing_requests": MAX_ONGOING,
            "graceful_shutdown_timeout_s": flags.shutdown_timeout,
            **self.deployment_config,
            "ray_actor_options": actor,
        }


def build_openai_app(llm_serving_args: Mapping[str, Any]) -> Application:
    """The application that serves one model over OpenAI's API.

    In a file of `ray serve deploy`, `import_path` is "jaxserve.ray:build_openai_app" and `args` are
    what is given here.

    Args:
        llm_serving_args: `llm_configs`, a list of one `LLMConfig` or mapping of its fields.

    Raises:
        ValidationError: a field is unknown or of a wrong type; nothing is deployed then.
    """
    # imported here: a configuration is read without Ray
    from ray import serve

    unknown = set(llm_serving_args) - {"llm_configs"}
    given = llm_serving_args.get("llm_configs")
    if unknown or not isinstance(given, (list, tuple)) or len(given) != 1:
        allowed = "llm_configs alone, with one model: another model is another application"
        raise ValidationError("args", dict(llm_serving_args), allowed)
    one = given[0]
    config = one if isinstance(one, LLMConfig) else _read(LLMConfig, "llm_configs[0]", one)
    words = config.words()

    def application() -> Starlette:
        return make_application(words)

    @serve.ingress(application)
    class Replica:
        """The application, and whether its engine lives."""

        async def check_health(self) -> None:
            # the first check comes before the replica gets requests, and may take as long as a load
            app: Any = self.app  # type: ignore[attr-defined]  # of serve.ingress
            await serving(app.state.service.engine)

    return serve.deployment(Replica, **config.options()).bind()


def make_application(words: list[str]) -> Starlette:
    """The HTTP application of a command line, whose engine begins to load in its own process."""
    # imported here: who builds an application need not load what serves it
    from jaxserve.async_engine import AsyncEngine
    from server.app import create_app

    args = build_parser("serve").parse_args(words)
    config, told, isolation = asked_for(args)
    engine = AsyncEngine(config, isolation=isolation if args.isolate_engine else None)
    app = create_app(
        engine,
        allowed_origins=args.allowed_origins,
        allowed_hosts=allowed_hosts(args) if args.allowed_hosts else (),
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


def _read(kind: Any, field: str, given: Any) -> Any:
    """A dataclass of a mapping. Raises ValidationError: it is none, or has other fields."""
    names = [one.name for one in dataclasses.fields(kind)]
    if not isinstance(given, Mapping):
        raise ValidationError(field, given, f"a mapping of {', '.join(names)}")
    for name in given:
        if name not in names:
            raise ValidationError(f"{field}.{name}", given[name], f"one of {', '.join(names)}")
    if names[0] not in given:  # the others have defaults
        raise ValidationError(f"{field}.{names[0]}", None, "given")
    return kind(**given)
