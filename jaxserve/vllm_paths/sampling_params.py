"""Parameters of sampling and of beam searches, at the path that vLLM has them."""

from jaxserve.params.beam_search_params import BeamSearchParams
from jaxserve.params.repetition_detection import RepetitionDetectionParams
from jaxserve.params.sampling_params import RequestOutputKind, SamplingParams
from jaxserve.params.structured_outputs_params import StructuredOutputsParams

__all__ = [
    "BeamSearchParams",
    "RepetitionDetectionParams",
    "RequestOutputKind",
    "SamplingParams",
    "StructuredOutputsParams",
]
