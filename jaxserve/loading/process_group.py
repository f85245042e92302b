"""The other processes of an engine, as process 0 has them: found, compared, told what to run."""

from __future__ import annotations

import atexit
import hashlib
import importlib.metadata
import logging
import platform
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from checkpoints.store import is_store
from jaxserve.boundary.messages import Action, Body, Control
from jaxserve.boundary.process_messages import (
    EngineDecision,
    Join,
    Joined,
    RunCommand,
    WeightsFound,
)
from jaxserve.config.engine_config import SERVER, EngineConfig
from jaxserve.config.settings import settings_of
from jaxserve.config.several_processes import address_of
from jaxserve.errors import EngineDeadError, JaxServeError, ValidationError
from jaxserve.execution.runner import CLOSE, Command, Runner
from jaxserve.loading.engine_plan import EnginePlan
from jaxserve.loading.hub import ModelFiles
from jaxserve.loading.weights_digest import weights_digest
from jaxserve.parallel.processes import connect, disconnect
from jaxserve.processes.joining import JOIN_S, gather
from jaxserve.processes.link import Link
from jaxserve.processes.network import free_port, own_address
from jaxserve.processes.wire import StartRefusal

logger = logging.getLogger(__name__)

PACKAGES = ("jaxserve", "jax", "jaxlib")
# what each process may have of its own: where its files are, and what process 0 alone acts on
OWN_SETTINGS = frozenset(
    (
        *("model", "revision", "tokenizer", "tokenizer_revision", "hf_token", "download_dir"),
        *("chat_template", "skip_tokenizer_init", "compilation_cache"),
        *("process_id", "coordinator", "process_token_file"),
        *("max_model_len", "compile_ahead"),  # an engine that is started again has them as decided
    )
)


class ProcessGroup:
    """Process 0's links to the others, once all have come; before anything uses a device.

    When one is lost, the others are told that there is no engine any more.

    Args:
        config: of process 0.
        on_lost: see `Link`; a step that waits for the one that was lost may never end.

    Attributes:
        on_lost: the same, may be replaced.

    Raises:
        ValidationError, JaxServeError: see `gather` and `connect`.
    """

    def __init__(self, config: EngineConfig, on_lost: Callable[[str], None]):
        if config.process_id:
            allowed = "0 here: the other processes run `jaxserve serve` with the same settings"
            raise ValidationError("process_id", config.process_id, allowed)
        assert config.coordinator is not None
        host, port = address_of(config.coordinator)
        try:
            host = own_address(host, JOIN_S)
        except OSError as error:
            text = f"coordinator={config.coordinator}: its host is not known here: {error}"
            raise JaxServeError(text) from error
        count, own, token = config.num_processes, what_is_compared(config), token_of(config)
        self.on_lost = on_lost
        self._is_closed = False
        self._links: Mapping[int, Link] = {}
        self._links = gather((host, port), count, own, token, self._lose)
        atexit.register(self.close)  # a script that ends is not a process that was lost
        service = f"[{host}]" if ":" in host else host
        address = f"{service}:{free_port(host)}"
        try:
            self._tell(Joined(address))
            connect(address, count, 0)
        except BaseException as error:
            self.refuse(error)
            raise

    def settle(self, decided: EnginePlan, files: ModelFiles) -> None:
        """Have the others make the same engine, beside this process.

        Raises:
            JaxServeError: a process has found other weights.
        """
        asked = decided.config.asked
        own = digest_of(asked, files)
        for number, link in self._links.items():
            body = link.receive()
            if not isinstance(body, WeightsFound) or body.digest != own:
                path = files.model
                raise JaxServeError(f"model: process {number} has other weights than {path} here")
        self._tell(EngineDecision(decided.config, steps_digest(decided)))

    def serve(self, runner: Runner) -> None:
        """Have the others run what a runner runs, from now on; all are warmed up."""
        disconnect()
        runner.listen(self._tell_command)

    def _tell_command(self, command: Command) -> None:
        """Have the others run what this process runs next."""
        if command.program == CLOSE:
            self.close()
        else:
            self._tell(RunCommand(command.program, command.operand.tobytes()))

    def refuse(self, error: BaseException) -> None:
        """Tell the others that there will be no engine, and why."""
        self._is_closed = True  # they end at once, and are not lost: this error is the one to tell
        self._say_why(str(error) or type(error).__name__)
        self._end()

    def close(self) -> None:
        """Let the others go, in good order."""
        if self._is_closed:
            return
        self._is_closed = True  # from now on the end of a connection is no loss
        for link in self._links.values():
            with suppress(EngineDeadError):  # one that was lost
                link.send(Control(Action.CLOSE))
        self._end()

    def _end(self) -> None:
        self._is_closed = True
        atexit.unregister(self.close)
        for link in self._links.values():
            link.close()

    def _lose(self, why: str) -> None:
        if self._is_closed:
            return
        self._say_why(why)
        self.on_lost(why)

    def _say_why(self, why: str) -> None:
        for link in self._links.values():
            with suppress(EngineDeadError):  # the one that was lost
                link.send(StartRefusal(why))

    def _tell(self, body: Body) -> None:
        for link in self._links.values():
            link.send(body)


def what_is_compared(config: EngineConfig) -> Join:
    """What a process is, and what has to be the same in all."""
    versions = {name: importlib.metadata.version(name) for name in PACKAGES}
    versions["python"] = ".".join(platform.python_version_tuple()[:2])
    settings = {
        name: repr(getattr(config, name))
        for name, item in settings_of(EngineConfig).items()
        if name not in OWN_SETTINGS and item.reader != SERVER
    }
    return Join(config.process_id, versions, settings)


def token_of(config: EngineConfig) -> bytes:
    """The secret that all processes share; empty, with a warning, where none is needed.

    Raises:
        ValidationError: the file cannot be read, or is empty.
    """
    if config.process_token_file is None:
        logger.warning(
            "process_token_file: none, so any user of this machine can pose as a process of this "
            "engine"
        )
        return b""
    field, file = "process_token_file", config.process_token_file
    try:
        token = Path(file).read_bytes().strip()
    except OSError as error:
        raise ValidationError(field, file, f"a file that can be read ({error.strerror})") from error
    if not token:
        raise ValidationError(field, file, "a file that is not empty")
    return token


def digest_of(config: EngineConfig, files: ModelFiles) -> str:
    """What tells the weights of this process from others.

    Raises:
        ValidationError: a store, whose reading has not been shown to be right here.
    """
    if is_store(files.model):
        allowed = "safetensors or GGUF where num_processes is above 1, and no store"
        raise ValidationError("model", str(files.model), allowed)
    return "made up" if config.load_format == "dummy" else weights_digest(files.model)


def steps_digest(decided: EnginePlan) -> str:
    """What tells engines apart whose programs differ."""
    return hashlib.blake2b(decided.of_steps.encode(), digest_size=16).hexdigest()
