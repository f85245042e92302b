"""What `LLM` and `LLMEngine` do alike with an engine in this process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any, Self, TypeVar

from flax import nnx

from jaxserve.boundary.messages import Action, EngineStats
from jaxserve.client.blocking_requests import BlockingRequests
from jaxserve.client.engine_client import LocalClient
from jaxserve.client.prompt_reader import Prompt
from jaxserve.client.sleep import ABORT, KEEP, MODES, Sleep, check_mode, memory_tags
from jaxserve.client.tokenization_kwargs import Tokenization
from jaxserve.config.engine_config import EngineConfig
from jaxserve.config.profiler_config import ProfilerConfig, check_session
from jaxserve.config.vllm_arguments import own_settings
from jaxserve.errors import ValidationError
from jaxserve.loading.engine_build import load_engine
from jaxserve.observability.engine_gauges import memory_counters, memory_gauges
from jaxserve.observability.metric_values import Metric, metric_values
from jaxserve.observability.profiler_trace import Profile
from jaxserve.params.lora_request import LoRARequest, refuse_adapter
from jaxserve.tokenization.tokenizer import Tokenizer

Found = TypeVar("Found")


class OpenedEngine:
    """A loaded engine, and what all share that use it.

    Args:
        model, use_tqdm_on_load, profiler_config, settings: as of `LLM`.

    Attributes:
        client: serves its requests, one step a call of `outputs`.
        plan: what was decided.
        footprint, seconds: of the start, see `LoadedEngine`.
        requests: runs calls of `LLM` that wait for all their requests.
        sleeping: its sleep mode.
        profile, profile_folder: what records its work, and where to.
        can_reload: whether a folder has the weights.
        stepped: unfinished requests of `LLMEngine`, by id: whether each asks for a vector.

    Raises:
        ValidationError, checkpoints.CheckpointError: as of `LLM`.
    """

    def __init__(
        self,
        model: str,
        *,
        use_tqdm_on_load: bool | None = True,
        profiler_config: ProfilerConfig | Mapping[str, Any] | None = None,
        **settings: Any,
    ):
        self.profile_folder = ProfilerConfig.of(profiler_config).torch_profiler_dir
        asked = EngineConfig.from_settings(model=str(model), **own_settings(settings))
        if asked.data_parallel_size > 1:
            allowed = (
                "1: an LLM has one engine, which its caller's thread steps. Several are those of "
                "`jaxserve serve`, or of AsyncEngine(config, isolation=Isolation())"
            )
            raise ValidationError("data_parallel_size", asked.data_parallel_size, allowed)
        loaded = load_engine(asked, shown=use_tqdm_on_load is not False)
        self.plan, self.footprint, self.seconds = loaded.decided, loaded.footprint, loaded.seconds
        self.client = LocalClient(loaded)
        self.requests = BlockingRequests(self.client)
        self.sleeping = Sleep(self.client)
        self.profile = Profile()
        self.can_reload = True
        self.stepped: dict[str, bool] = {}


class EngineCalls:
    """Calls on an engine in this process that run no request; use it from one thread.

    Args:
        opened: the engine.

    Attributes:
        client: as of `OpenedEngine`.
        config: what was decided.
    """

    def __init__(self, opened: OpenedEngine):
        self._opened = opened
        self.client = opened.client
        self.config = opened.plan.config

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def get_tokenizer(self) -> Tokenizer:
        """The tokenizer.

        Raises:
            ValidationError: the engine was made with `skip_tokenizer_init`.
        """
        return self.client.tokenizer

    @property
    def params(self) -> dict[str, Any]:
        """The model's parameters as Flax has them: nested mappings of arrays.

        They are the engine's own: what donates them ends it. Layers whose weights a step
        brings from the host's memory (`cpu_offload_gb`) are below `streamed`, in one array each.

        Raises:
            EngineDeadError: the engine was closed.
        """
        params: dict[str, Any] = nnx.to_pure_dict(nnx.state(self.client.engine.runner.model()))
        return params

    def apply_model(self, func: Callable[[dict[str, Any]], Found]) -> list[Found]:
        """What a function finds in the model's parameters, in a list of one.

        Args:
            func: given `params`; what it returns changes nothing.

        Raises:
            ValidationError: the LLM sleeps.
            EngineDeadError: the engine was closed.
        """
        self._check_ready(None)
        return [func(self.params)]

    def collective_rpc(
        self, method: str | Callable[..., Any], timeout: float | None = None, *given: Any, **kw: Any
    ) -> None:
        """Raises ValidationError: there are no workers; `apply_model` and features are there."""
        allowed = (
            "nothing: there are no workers. apply_model(func) reads the parameters, "
            "features=[...] run inside the step (docs/research.md)"
        )
        raise ValidationError("collective_rpc", method, allowed)

    def get_world_size(self, include_dp: bool = True) -> int:
        """The number of devices; `include_dp` is vLLM's: there are no replicas."""
        asked = self.config.asked
        return asked.tensor_parallel_size * asked.pipeline_parallel_size

    def stats(self) -> EngineStats:
        """A snapshot of the engine: queues, pages, steps so far, where their time went."""
        return self.client.stats()

    def memory_report(self) -> dict[str, float]:
        """Print what the KV pages hold and what the prefix cache has found; the same by name.

        The names are those of `/metrics`, without the prefix.
        """
        stats = self.stats()
        readings = [*memory_gauges(stats, self.client.page_bytes), *memory_counters(stats)]
        for name, text, value in readings:
            print(f"{name:22} {value:<16,.10g} {text}")
        return {reading.name: reading.value for reading in readings}

    def reset_prefix_cache(
        self, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool:
        """Have nothing found any more that was computed so far; True, since nothing hinders it.

        Args:
            reset_running_requests, reset_connector: vLLM's. Running requests hinder nothing and go
                on with their pages, and there is no connector.
        """
        self.client.check_alive()
        self.client.reset_prefix_cache()
        return True

    def get_metrics(self) -> list[Metric]:
        """The values of `/metrics` as plain objects: `Counter`, `Gauge` and `Histogram`."""
        return metric_values(self.client.metrics.registry)

    def reset_mm_cache(self) -> None:
        """Have images encoded again that come again; the prefix cache finds what it found."""
        self.client.check_alive()
        self.client.control(Action.RESET_ENCODER_CACHE)

    def start_profile(
        self,
        profile_prefix: str | None = None,
        *,
        folder: str | PathLike[str] | None = None,
        delay_iterations: int | None = None,
        max_iterations: int | None = None,
        profiler_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        """Begin to record the work of host and device.

        Args:
            profile_prefix: a folder for this record, in `folder`.
            folder: None: `profiler_config`'s, or "jaxserve-profile".
            delay_iterations, max_iterations: 0 or None: this and `stop_profile` say when.
            profiler_kwargs: None: those of vLLM's are PyTorch's.

        Raises:
            ValidationError: another value, or a record has begun already.
        """
        check_session(profile_prefix, delay_iterations, max_iterations, profiler_kwargs)
        self._opened.profile.start(
            Path(folder or self._opened.profile_folder, profile_prefix or "")
        )

    def stop_profile(self) -> Path:
        """End the recording; a file for https://ui.perfetto.dev."""
        return self._opened.profile.stop()

    def sleep(self, level: int = 1, mode: str = ABORT) -> None:
        """Give the device memory away; programs stay compiled. What the prefix cache had is gone.

        Args:
            level: 1 keeps the weights in host memory, 2 reads them again at `wake_up`. 0 frees
                nothing: `enqueue` takes requests, which run after `wake_up`.
            mode: "abort" or "wait", as of `AsyncLLMEngine.sleep`: no request runs meanwhile. "keep"
                goes with level 0: those that have begun stand still.

        Raises:
            ValidationError: another level or mode, or requests run.
        """
        if level == 0 and not isinstance(level, bool):
            self._pause(MODES.checked("mode", mode))
            return
        check_mode(mode)
        if level == 2 and not self._opened.can_reload:
            raise ValidationError("level", level, "1: update_weights took weights of no folder")
        self._opened.sleeping.sleep(level)

    def wake_up(self, tags: Sequence[str] | None = None) -> bool:
        """Take the memory again, and go on once all of it is there; whether all is.

        Args:
            tags: some of "weights", "kv_cache" and "scheduling", which takes no memory; None: all.

        Raises:
            ValidationError: another tag.
        """
        self._opened.sleeping.wake_up(memory_tags(tags))
        is_awake = not self._opened.sleeping.is_sleeping
        if is_awake and self.client.is_paused:
            self.client.control(Action.RESUME)
        return is_awake

    def release_kv_cache_memory(self) -> None:
        """Free the pages of an engine that `sleep(level=0)` has paused; `wake_up` takes them again.

        What the prefix cache had is gone.

        Raises:
            ValidationError: it is not paused, requests are unfinished, or memory is freed already.
        """
        if not self.client.is_paused:
            raise ValidationError("engine", "running", "one that sleep(level=0) has paused")
        self._opened.sleeping.release_kv_cache()

    def _pause(self, mode: str) -> None:
        self.client.check_alive()
        self._opened.sleeping.check_awake()
        if mode != KEEP and self.client.has_work:
            raise ValidationError("mode", mode, f"{KEEP} while requests are unfinished")
        self.client.control(Action.PAUSE)

    def close(self) -> None:
        """Stop background work and give back the device memory; the LLM cannot be used any more."""
        self.client.close()

    def _check_ready(self, lora_request: LoRARequest | None) -> None:
        self.client.check_alive()
        self._opened.sleeping.check_awake()
        refuse_adapter(lora_request)

    def _tokenised(
        self, prompts: Sequence[Prompt], given: Mapping[str, Any] | None
    ) -> list[Prompt]:
        """Prompts, as tokens where `tokenization_kwargs` say how."""
        how = self._tokenization(given)
        return [how.apply(prompt, self.client) for prompt in prompts]

    def _tokenization(self, given: Mapping[str, Any] | None) -> Tokenization:
        return Tokenization.of(given, self.config.scheduler.max_model_len)
