"""The blocking front: `LLM(model).generate(prompts, params)`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from tqdm import tqdm

from jaxserve.config import EngineConfig
from jaxserve.engine import EngineStats
from jaxserve.errors import ValidationError
from jaxserve.inputs import InputProcessor, PreparedRequest, Prompt
from jaxserve.loading import load_engine
from jaxserve.observability.metrics import Metrics
from jaxserve.output_processor import OutputProcessor
from jaxserve.outputs import RequestOutput
from jaxserve.sampling_params import RequestOutputKind, SamplingParams
from jaxserve.tokenization.tokenizer import Tokenizer, check_template_variables

Message = Mapping[str, Any]


class LLM:
    """A model that generates in this process; use it from one thread.

    Args:
        model: folder with a Hugging Face `config.json`, safetensors weights and tokenizer.
        **settings: any field of `EngineConfig`, under vLLM's names: `tokenizer`,
            `skip_tokenizer_init`, `dtype`, `max_model_len`, `max_num_seqs`,
            `max_num_batched_tokens`, `gpu_memory_utilization`, `tensor_parallel_size`, `seed`,
            `load_format`, `block_size`, `num_pages`, ...

    Raises:
        ValidationError: names the setting that cannot be served.
        checkpoints.CheckpointError: the weights cannot be read or do not fit the model.
    """

    def __init__(self, model: str, **settings: Any):
        asked = EngineConfig.from_settings(model=str(model), **settings)
        loaded = load_engine(asked)
        self.config = loaded.config
        self.model_config = loaded.model_config
        self._engine = loaded.engine
        self.footprint = loaded.footprint
        self.startup_seconds = loaded.seconds
        self._tokenizer = loaded.tokenizer
        self.metrics = Metrics(self.config.served_model_name[0])
        self._inputs = InputProcessor(self.config, self.model_config, self._tokenizer)
        self._outputs = OutputProcessor(self._tokenizer, self.metrics)
        self._next_id = 0

    def get_tokenizer(self) -> Tokenizer:
        """The tokenizer.

        Raises:
            ValidationError: the engine was made with `skip_tokenizer_init`.
        """
        if self._tokenizer is None:
            raise ValidationError("skip_tokenizer_init", True, "False where a tokenizer is used")
        return self._tokenizer

    def stats(self) -> EngineStats:
        """A snapshot of the engine: queues, pages, steps so far, where their time went."""
        stats = self._engine.stats()
        return stats._replace(times=replace(stats.times, detokenise=self._outputs.seconds))

    def get_default_sampling_params(self) -> SamplingParams:
        return SamplingParams()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Complete prompts; returns one output a prompt, in the order of the prompts.

        Args:
            prompts: one prompt or a list. A prompt is text, a list of token ids,
                `{"prompt": text}` or `{"prompt_token_ids": ids}`.
            sampling_params: for all prompts, or one for each; defaults when None.
            use_tqdm: show a progress bar.

        Raises:
            ValidationError: a prompt or parameter that cannot be served; nothing is run then.
            EngineDeadError: the device failed, in this call or before, or the LLM was closed.
        """
        self._engine.check_alive()
        items = _as_list(prompts)
        params = self._params_for(items, sampling_params)
        prepared = [self._prepare(prompt, p) for prompt, p in zip(items, params)]
        return self._run(prepared, use_tqdm)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation or a list of them through the model's chat template.

        Raises:
            ValidationError: messages that the template refuses, besides what `generate` raises.
        """
        if not messages:
            raise ValidationError("messages", messages, "at least one message")
        single = isinstance(messages[0], Mapping)
        conversations: Any = [messages] if single else messages
        tokenizer = self.get_tokenizer()
        variables = chat_template_kwargs or {}
        check_template_variables(variables)
        prompts: list[Prompt] = []
        for conversation in conversations:
            text = tokenizer.apply_chat_template(
                list(conversation),
                chat_template=chat_template,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                tools=tools,
                **variables,
            )
            assert isinstance(text, str)
            # the template has placed the special tokens already
            tokens = tokenizer.encode(text, add_special_tokens=False)
            prompts.append({"prompt": text, "prompt_token_ids": tokens})
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm)

    def close(self) -> None:
        """Stop background work and give back the device memory; the LLM cannot be used any more."""
        self._engine.close()

    def _prepare(self, prompt: Prompt, params: SamplingParams) -> PreparedRequest:
        params = params.clone()
        params.output_kind = RequestOutputKind.FINAL_ONLY
        self._next_id += 1
        return self._inputs.prepare(prompt, params, str(self._next_id - 1))

    def _params_for(
        self, prompts: list[Prompt], params: SamplingParams | Sequence[SamplingParams] | None
    ) -> list[SamplingParams]:
        if params is None:
            params = self.get_default_sampling_params()
        if isinstance(params, SamplingParams):
            return [params] * len(prompts)
        allowed = f"SamplingParams, or a list with one a prompt ({len(prompts)})"
        if not isinstance(params, Sequence) or not all(
            isinstance(one, SamplingParams) for one in params
        ):
            raise ValidationError("sampling_params", params, allowed)
        if len(params) != len(prompts):
            raise ValidationError("sampling_params", f"{len(params)} items", allowed)
        return list(params)

    def _run(self, prepared: list[PreparedRequest], use_tqdm: bool) -> list[RequestOutput]:
        finished: dict[str, RequestOutput] = {}
        for request in prepared:
            self._outputs.add(request)
            for sequence in request.sequences:
                self._engine.add(sequence)
        bar = tqdm(total=len(prepared), desc="Processed prompts", disable=not use_tqdm)
        try:
            while self._engine.has_work:
                for output in self._step():
                    finished[output.request_id] = output
                    bar.update()
        finally:
            bar.close()
            self._abort_rest(prepared, finished)
        return [finished[request.request_id] for request in prepared]

    def _step(self) -> list[RequestOutput]:
        processed = self._outputs.process(self._engine.step())
        for sequence_id in processed.stopped:
            self._engine.abort(sequence_id)
        self.metrics.record_stats(self.stats())
        return processed.outputs

    def _abort_rest(
        self, prepared: list[PreparedRequest], finished: dict[str, RequestOutput]
    ) -> None:
        """After Ctrl-C or an error: leave no request behind that would run with the next call."""
        for request in prepared:
            if request.request_id not in finished:
                for sequence_id in self._outputs.abort(request.request_id)[1]:
                    self._engine.abort(sequence_id)


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, (str, Mapping)) or not isinstance(prompts, Iterable):
        return [prompts]
    items: list[Any] = list(prompts)
    one_prompt = bool(items) and all(isinstance(item, int) for item in items)
    return [items] if one_prompt else items
