"""Parameters of a beam search: names and defaults are those of vLLM, and transformers' beside."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from jaxserve.config.settings import Integer, Number, Switch
from jaxserve.errors import ValidationError
from jaxserve.params.sampling_params import LARGEST_TEMPERATURE
from jaxserve.params.structured_outputs_params import StructuredOutputsParams

MAX_BEAM_WIDTH = 1024
# a length to the power of the penalty must be a finite float64
LARGEST_LENGTH_PENALTY = 32.0


@dataclass
class BeamSearchParams:
    """How the `beam_width` most likely continuations of a prompt are looked for.

    The search is that of transformers' `generate(num_beams=beam_width, do_sample=False)`.

    Attributes:
        beam_width: sequences that are followed at a time, and that are returned.
        max_tokens: most tokens to generate; None fills up to the engine's max_model_len.
        ignore_eos: go on after the end-of-sequence token.
        temperature: as vLLM has it. Beams are ranked by the model's own log-probabilities and
            nothing is drawn, so it changes nothing.
        length_penalty: a finished sequence counts with its log-probability divided by its
            generated tokens to this power: above 0 favours long ones, below 0 short ones.
        include_stop_str_in_output: let the text have the end-of-sequence token.
        early_stopping: when `beam_width` sequences have finished, True ends the search; False goes
            on while the best running one, finished at its present length, would be among them;
            "never" measures it by `max_tokens` instead where `length_penalty` is above 0.
        shrink_under_pressure: where pages are short, follow fewer beams from then on, the least
            likely ones being given up, instead of waiting for pages. As many sequences are
            returned, but they may not be those of a whole search.
        structured_outputs: what each text must be, or a mapping of the fields: among the tokens
            that may follow, the search is for the most likely ones. Where there are fewer than
            `beam_width` such texts, fewer sequences are returned.

    Raises:
        ValidationError: a value has the wrong type or lies outside its range.
    """

    beam_width: int
    max_tokens: int | None
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0
    include_stop_str_in_output: bool = False
    early_stopping: bool | Literal["never"] = False
    shrink_under_pressure: bool = False
    structured_outputs: StructuredOutputsParams | None = None

    def __post_init__(self) -> None:
        self.beam_width = Integer(1, MAX_BEAM_WIDTH).checked("beam_width", self.beam_width)
        if self.max_tokens is not None:
            self.max_tokens = Integer(1).checked("max_tokens", self.max_tokens)
        self.temperature = Number(0.0, LARGEST_TEMPERATURE).checked("temperature", self.temperature)
        self.length_penalty = Number(-LARGEST_LENGTH_PENALTY, LARGEST_LENGTH_PENALTY).checked(
            "length_penalty", self.length_penalty
        )
        for name in ("ignore_eos", "include_stop_str_in_output", "shrink_under_pressure"):
            Switch().checked(name, getattr(self, name))
        if not isinstance(self.early_stopping, bool) and self.early_stopping != "never":
            raise ValidationError("early_stopping", self.early_stopping, "true, false or 'never'")
        if self.structured_outputs is not None:
            self.structured_outputs = StructuredOutputsParams.of(self.structured_outputs)
