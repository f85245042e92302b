"""The blocking front: `LLM(model).generate(prompts, params)`."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any, Self

from jaxserve.boundary.processor_kwargs import with_kwargs
from jaxserve.boundary.prompt_spans import NO_ID
from jaxserve.client.blocking_requests import Bar
from jaxserve.client.call_arguments import list_of_prompts, one_a_prompt
from jaxserve.client.chat_prompts import Message, chat_prompts
from jaxserve.client.engine_calls import OpenedEngine
from jaxserve.client.input_processor import PreparedRequest
from jaxserve.client.instruments import Instruments
from jaxserve.client.likelihood import SCORING, Loglikelihood, parted, scores_of
from jaxserve.client.pooling_calls import PoolingCalls
from jaxserve.client.prompt_reader import Prompt
from jaxserve.config.engine_args import EngineArgs
from jaxserve.config.profiler_config import ProfilerConfig
from jaxserve.errors import ValidationError
from jaxserve.llm_engine import LLMEngine
from jaxserve.loading.live_weights import weights_of_folder, weights_of_tree
from jaxserve.models import Model
from jaxserve.models.store import save_model
from jaxserve.observability.pictures import Pictures
from jaxserve.outputs import BeamSearchOutput, BeamSearchSequence, RequestOutput
from jaxserve.parallel.mesh import make_mesh
from jaxserve.params.beam_search_params import BeamSearchParams
from jaxserve.params.lora_request import LoRARequest
from jaxserve.params.probes import Capture, Intervention
from jaxserve.params.prompts import TokensPrompt
from jaxserve.params.sampling_params import RequestOutputKind, SamplingParams
from jaxserve.request.queueing import Queueing


class LLM(PoolingCalls, Pictures):
    """A model that generates in this process; use it from one thread.

    Args:
        model: folder with a Hugging Face `config.json`, safetensors weights and tokenizer, or the
            id of a model on the hub.
        use_tqdm_on_load: whether a start that takes long says on standard error what it is doing.
        **settings: any field of `EngineConfig` (docs/settings.md). Other arguments of vLLM's `LLM`
            are passed over where they have no meaning here, and refused by name where they have
            (`vllm_arguments.py`).

    Attributes:
        client: serves its requests, one step a call of `outputs`.
        llm_engine: the same engine under the names that it has in vLLM.

    Raises:
        ValidationError: names the setting that cannot be served.
        checkpoints.CheckpointError: the weights cannot be read or do not fit the model.
    """

    def __init__(
        self,
        model: str,
        *,
        use_tqdm_on_load: bool | None = True,
        profiler_config: ProfilerConfig | Mapping[str, Any] | None = None,
        **settings: Any,
    ):
        opened = OpenedEngine(
            model, use_tqdm_on_load=use_tqdm_on_load, profiler_config=profiler_config, **settings
        )
        super().__init__(opened)
        self.model_config = opened.plan.model
        self.backends = opened.plan.backends
        self.footprint = opened.footprint
        self.startup_seconds = opened.seconds
        self.llm_engine = LLMEngine(opened)
        self._requests = opened.requests
        self._instruments = Instruments(self.client)

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs) -> Self:
        """An engine of vLLM's arguments; raises ValidationError for one that cannot be served."""
        return cls(**dataclasses.asdict(engine_args))

    def get_default_sampling_params(self) -> SamplingParams:
        """What `generate` takes where it is given none: the model's own, by `generation_config`."""
        return SamplingParams(**self.config.sampling_defaults)  # type: ignore[arg-type]

    @property
    def is_sleeping(self) -> bool:
        """Whether `wake_up` is needed before anything can be run."""
        return self._opened.sleeping.is_sleeping

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: Bar = True,
        lora_request: LoRARequest | None = None,
        priority: int | Sequence[int] | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
        timeout: float | None = None,
        capture: Capture | Sequence[str] | Sequence[Capture | None] | None = None,
        interventions: Sequence[Intervention] | Sequence[Sequence[Intervention]] | None = None,
    ) -> list[RequestOutput]:
        """Complete prompts; returns one output a prompt, in the order of the prompts.

        Args:
            prompts: one prompt or a list. A prompt is text, a list of token ids, or a mapping of
                one of the kinds in `jaxserve.params.prompts`.
            sampling_params: for all prompts, or one for each; defaults when None.
            use_tqdm: show a progress bar; or what makes it, as `functools.partial(tqdm, ...)`.
            lora_request: None, there are no adapters yet.
            priority: of all prompts or one a prompt, the smallest goes first; needs
                `scheduling_policy="priority"`.
            tokenization_kwargs: how prompts become tokens, see `Tokenization`: `add_special_tokens`
                of text, `truncate_prompt_tokens` and `truncation_side` of all.
            mm_processor_kwargs: how images become pixels, see `processor_kwargs`; a prompt's own go
                before them.
            timeout: seconds after which every request ends wherever it is, with the tokens that it
                has, finish_reason "abort" and stop_reason "timeout".
            capture: names of `sites()`, in which * stands for any part, or a `Capture`, for all
                prompts; or a list of one `Capture` or None a prompt. `RequestOutput.captured` has
                the arrays.
            interventions: changes inside the model, see `jaxserve.params.probes`: a list for all
                prompts, or a list of one list a prompt.

        Raises:
            ValidationError: a prompt or parameter that cannot be served; nothing is run then.
            QueueFullError: more prompts than a limit on the queue allows, if one was set.
            EngineDeadError: the device failed, in this call or before, or the LLM was closed.
        """
        prepared = self._prepare_all(
            prompts,
            sampling_params,
            lora_request,
            priority,
            timeout,
            tokenization_kwargs,
            mm_processor_kwargs,
            capture,
            interventions,
        )
        outputs = self._requests.run(prepared, use_tqdm)
        self._instruments.collect(prepared, outputs)
        return outputs

    def sites(self) -> dict[str, tuple[int, ...]]:
        """Names of what `capture` and `interventions` reach inside the model, and their shapes.

        They are in the order of the computation, each with its shape for one token. "logits" are of
        the generated tokens alone.
        """
        return self._instruments.sites()

    def loglikelihood(self, texts: Sequence[Any], *, use_tqdm: Bar = False) -> list[Loglikelihood]:
        """How likely texts are by the model, token by token; one answer a text, in their order.

        `score` is vLLM's, which compares texts.

        Args:
            texts: each a prompt, all of whose tokens but the first are scored; or a pair (context,
                continuation) of texts or of lists of ids, where those of the continuation are.
            use_tqdm: show a progress bar.

        Raises:
            ValidationError: no list, a pair without a token in one of its parts, or what `generate`
                refuses.
        """
        if isinstance(texts, str | tuple) or not isinstance(texts, Sequence):
            raise ValidationError("texts", texts, "a list of texts, or of pairs")
        tokenizer = None if self.config.asked.skip_tokenizer_init else self.get_tokenizer()
        parts = [parted(one, tokenizer) for one in texts]
        prompts: list[Any] = [
            {"prompt_token_ids": one} if isinstance(one, list) else one for one, _ in parts
        ]
        outputs = self.generate(prompts, SCORING, use_tqdm=use_tqdm)
        return [scores_of(one, first) for one, (_, first) in zip(outputs, parts, strict=True)]

    def update_weights(self, weights: Mapping[str, Any] | str | PathLike[str]) -> int:
        """Serve other weights of the same model; nothing is compiled.

        What the prefix cache had is gone. Both weights are in memory until the new ones are
        whole, and the old ones serve on if an error is raised.

        Args:
            weights: a pytree as `params` has it, whose arrays may be of another float type; or a
                folder of a model of the same shape.

        Returns:
            The number of updates so far, which outputs have as `weights_version`.

        Raises:
            ValidationError: weights of another model, or requests run.
            EngineDeadError: the engine was closed.
        """
        self._check_ready(None)
        if self.client.has_work:
            raise ValidationError("weights", "...", "no update while requests run")
        runner = self.client.engine.runner
        runner.require_one_process("update_weights")
        load: Callable[[], list[Model]] | None = None
        if isinstance(weights, str | PathLike):
            mesh = make_mesh(self.config.asked.tensor_parallel_size)
            load = partial(weights_of_folder, weights, self._opened.plan, mesh)
            models = load()
        else:
            models = [weights_of_tree(weights, runner.model())]
        self._opened.can_reload = load is not None
        runner.weights.set(models, load)
        self.client.reset_prefix_cache()
        self._requests.weights_version += 1
        return self._requests.weights_version

    def enqueue(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        lora_request: LoRARequest | None = None,
        priority: int | Sequence[int] | None = None,
        use_tqdm: Bar = True,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
        *,
        timeout: float | None = None,
    ) -> list[str]:
        """Begin requests that `wait_for_completion` answers; their ids, in order.

        They run when something waits: this call returns at once. Arguments and errors are those of
        `generate`; `use_tqdm` has no meaning here.
        """
        prepared = self._prepare_all(
            prompts,
            sampling_params,
            lora_request,
            priority,
            timeout,
            tokenization_kwargs,
            mm_processor_kwargs,
        )
        return self._requests.enqueue(prepared)

    def enqueue_chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        **how: Any,
    ) -> list[str]:
        """The same for conversations; `how` are further arguments of `chat`."""
        names = ("lora_request", "priority", "timeout", "use_tqdm", "mm_processor_kwargs")
        queueing = {name: how.pop(name) for name in names if name in how}
        cut = how.get("tokenization_kwargs")
        prompts = self._chat_prompts(messages, **how)
        return self.enqueue(prompts, sampling_params, tokenization_kwargs=cut, **queueing)

    def wait_for_completion(
        self, output_type: type | None = None, *, use_tqdm: Bar = True
    ) -> list[RequestOutput]:
        """The outputs of all requests that were enqueued, in that order.

        Args:
            output_type: RequestOutput or None; there is no other kind.
            use_tqdm: show a progress bar.

        Raises:
            ValidationError: another `output_type`.
            EngineDeadError: as `generate`.
        """
        if output_type not in (None, RequestOutput):
            raise ValidationError("output_type", output_type, "RequestOutput or None")
        self.client.check_alive()
        return self._requests.wait_for_enqueued(use_tqdm)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: Bar = True,
        lora_request: LoRARequest | None = None,
        priority: int | Sequence[int] | None = None,
        chat_template: str | None = None,
        chat_template_content_format: str = "auto",
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
        *,
        timeout: float | None = None,
        keep_control_tokens: bool = False,
    ) -> list[RequestOutput]:
        """Answer one conversation or a list of them through the model's chat template.

        Control tokens in the messages' text are text, unless `keep_control_tokens`. The template
        gets contents as text, with the `chat_template_content_format` "openai" as lists of parts.

        Raises:
            ValidationError: messages that the template refuses, besides what `generate` raises.
        """
        prompts = self._chat_prompts(
            messages,
            chat_template=chat_template,
            chat_template_content_format=chat_template_content_format,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            chat_template_kwargs=chat_template_kwargs,
            tokenization_kwargs=tokenization_kwargs,
            keep_control_tokens=keep_control_tokens,
        )
        return self.generate(
            prompts,
            sampling_params,
            use_tqdm=use_tqdm,
            lora_request=lora_request,
            priority=priority,
            tokenization_kwargs=tokenization_kwargs,
            mm_processor_kwargs=mm_processor_kwargs,
            timeout=timeout,
        )

    def _chat_prompts(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        *,
        chat_template: str | None = None,
        chat_template_content_format: str = "auto",
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        keep_control_tokens: bool = False,
    ) -> list[TokensPrompt]:
        return chat_prompts(
            self.get_tokenizer(),
            messages,
            chat_template_kwargs,
            add_special_tokens=bool(self._tokenization(tokenization_kwargs).add_special_tokens),
            content_format=chat_template_content_format,
            chat_template=chat_template,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            keep_control_tokens=keep_control_tokens,
        )

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams,
        lora_request: LoRARequest | None = None,
        use_tqdm: Bar = False,
        concurrency_limit: int | None = None,
        priority: int | Sequence[int] | None = None,
    ) -> list[BeamSearchOutput]:
        """The most likely continuations of each prompt, the best first.

        Args:
            prompts: as for `generate`.
            params: of all prompts.
            lora_request, use_tqdm, priority: as for `generate`.
            concurrency_limit: vLLM's, passed over: searches share the engine's slots.

        Raises:
            ValidationError: as `generate`; also for a `beam_width` that `max_logprobs` forbids.
            EngineDeadError: as `generate`.
        """
        if not isinstance(params, BeamSearchParams):
            raise ValidationError("params", params, "BeamSearchParams")
        self._check_ready(lora_request)
        items, now = list_of_prompts(prompts), time.monotonic()
        urgency = one_a_prompt("priority", 0 if priority is None else priority, int, len(items))
        prepared = [
            self._requests.prepare(prompt, params, Queueing(now, urgent))
            for prompt, urgent in zip(items, urgency, strict=True)
        ]
        return [self._beams(output, params) for output in self._requests.run(prepared, use_tqdm)]

    def _beams(self, output: RequestOutput, params: BeamSearchParams) -> BeamSearchOutput:
        found = []
        for one in output.outputs:
            assert one.finish_reason is not None
            # None where an error has ended the search
            score = -math.inf if one.cumulative_logprob is None else one.cumulative_logprob
            tokens = shown = output.prompt_token_ids + one.token_ids
            if one.finish_reason == "stop" and not params.include_stop_str_in_output:
                shown = tokens[:-1]
            text = None
            if not self.config.asked.skip_tokenizer_init:
                text = self.client.tokenizer.decode([one for one in shown if one != NO_ID])
            found.append(BeamSearchSequence(tokens, score, text, one.finish_reason))
        return BeamSearchOutput(found)

    def save(self, path: str | PathLike[str]) -> None:
        """Keep the model as it is loaded, quantised or not, in a store that any mesh restores from.

        Args:
            path: folder: absent, empty, or a store, which is replaced when all is written.

        Raises:
            checkpoints.CheckpointError: the folder holds something else, or there is no room.
            ValidationError: the LLM sleeps, or weights are on the host (`cpu_offload_gb`).
            EngineDeadError: as `generate`.
        """
        self.client.check_alive()
        self._opened.sleeping.check_awake()
        asked = self.config.asked
        if self._opened.plan.streamed:
            allowed = "none where a model is saved: a store has each layer apart"
            raise ValidationError("cpu_offload_gb", asked.cpu_offload_gb, allowed)
        weights = self.client.engine.runner.model()
        settings = self.config.model
        save_model(
            weights,
            Path(path),
            dtype=settings.dtype,
            model_folder=Path(self._opened.plan.model_path),
            made_up=asked.load_format == "dummy" and not self._requests.weights_version,
        )

    def _check_ready(self, lora_request: LoRARequest | None) -> None:
        super()._check_ready(lora_request)
        if stepped := self._opened.stepped:
            allowed = "none: run llm_engine.step until has_unfinished_requests is false"
            raise ValidationError("unfinished requests", len(stepped), allowed)

    def _prepare_all(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        lora_request: LoRARequest | None,
        priority: int | Sequence[int] | None,
        timeout: float | None,
        tokenization_kwargs: Mapping[str, Any] | None,
        mm_processor_kwargs: Mapping[str, Any] | None,
        capture: Any = None,
        interventions: Any = None,
    ) -> list[PreparedRequest]:
        self._check_ready(lora_request)
        items = self._tokenised(list_of_prompts(prompts), tokenization_kwargs)
        items = [with_kwargs(prompt, mm_processor_kwargs) for prompt in items]
        if sampling_params is None:
            sampling_params = self.get_default_sampling_params()
        params = one_a_prompt("sampling_params", sampling_params, SamplingParams, len(items))
        urgency = one_a_prompt("priority", 0 if priority is None else priority, int, len(items))
        now, prepared = time.monotonic(), []
        every = [given.clone() for given in params]
        self._instruments.begin()
        for own in every:
            self._instruments.take(own)
        self._instruments.take_probes(every, capture, interventions)
        for prompt, own, urgent in zip(items, every, urgency, strict=True):
            own.output_kind = RequestOutputKind.FINAL_ONLY
            prepared.append(self._requests.prepare(prompt, own, Queueing(now, urgent, timeout)))
        self._instruments.check_bytes(prepared)
        self._instruments.ready()
        return prepared
