"""The architectures that jaxserve serves: an entry names module, weight map and config reader."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from jaxserve.config.named_object import OBJECT_NAME, object_of_name
from jaxserve.errors import UnsupportedModelError
from jaxserve.models import gemma2, gemma3, llama, llava, mixtral, olmo2, phi3, qwen2_vl, qwen3_moe
from jaxserve.models.classifiers import classifier_of
from jaxserve.models.config import ModelConfig
from jaxserve.models.protocol import Model
from jaxserve.models.sources import Source, Stack


@dataclass(frozen=True, slots=True)
class Encoding:
    """What makes embeddings of an image, which take places of token ids.

    Attributes:
        module: (config, dtype) -> the module, with zeros in it, that `Encoder` calls with rows of
            images as `ModelConfig.images` says.
        source: (place of a parameter, config) -> as of `Family`.
        is_optional: whether the architecture is also that of folders with the text model alone.
    """

    module: Callable[..., Any]
    source: Callable[..., Any]
    is_optional: bool = False


@dataclass(frozen=True, slots=True)
class Family:
    """One Hugging Face architecture.

    Attributes:
        architecture: the name in `architectures` of config.json; of a family outside the package
            `module:NAME`, whatever its record says.
        model_type: the name in `model_type`, used when `architectures` is absent.
        read_config: (architecture, parsed config.json) -> ModelConfig or a subclass of it; raises
            UnsupportedModelError for what is not implemented.
        model: (config, dtype, form) -> the module, with zeros in it.
        source: (place of a parameter, config) -> the checkpoint's tensors that it is made of.
        passed_over: how names of tensors begin that are no part of the language model.
        encoding: of a model that reads images, whose tensors are among these.
    """

    architecture: str
    model_type: str
    read_config: Callable[[str, Mapping[str, Any]], ModelConfig]
    model: Callable[..., Model]
    source: Callable[..., Source | Stack]
    passed_over: tuple[str, ...] = ()
    encoding: Encoding | None = None


_DECODERS = (
    Family("LlamaForCausalLM", "llama", llama.LLAMA.read, llama.Llama, llama.source),
    Family("MistralForCausalLM", "mistral", llama.MISTRAL.read, llama.Llama, llama.source),
    Family("Qwen2ForCausalLM", "qwen2", llama.QWEN2.read, llama.Llama, llama.source),
    Family("Qwen3ForCausalLM", "qwen3", llama.QWEN3.read, llama.Llama, llama.source),
    Family("Olmo2ForCausalLM", "olmo2", olmo2.read_config, olmo2.Olmo2, olmo2.source),
    Family("Phi3ForCausalLM", "phi3", phi3.read_config, phi3.Llama, phi3.source),
    Family("Gemma2ForCausalLM", "gemma2", gemma2.read_config, gemma2.Gemma2, gemma2.source),
    Family("Gemma3ForCausalLM", "gemma3_text", gemma3.read_config, gemma3.Gemma3, gemma3.source),
    Family(
        "Gemma3ForConditionalGeneration",
        "gemma3",
        gemma3.read_image_config,
        gemma3.Gemma3,
        gemma3.source,
        passed_over=gemma3.IMAGE_MODULES,
        encoding=Encoding(gemma3.GemmaEncoder, gemma3.encoder_source, is_optional=True),
    ),
    *(
        Family(
            architecture,
            model_type,
            read_config,
            llama.Llama,
            llama.source,
            passed_over=llava.IMAGE_MODULES,
            encoding=Encoding(encoder, llava.encoder_source),
        )
        for architecture, model_type, read_config, encoder in (
            ("LlavaForConditionalGeneration", "llava", llava.read_config, llava.LlavaEncoder),
            (
                "LlavaNextForConditionalGeneration",
                "llava_next",
                llava.read_next_config,
                llava.LlavaNextEncoder,
            ),
        )
    ),
    *(
        Family(
            architecture,
            model_type,
            read_config,
            qwen2_vl.Qwen2VL,
            llama.source,
            passed_over=qwen2_vl.IMAGE_MODULES,
            encoding=Encoding(qwen2_vl.QwenEncoder, qwen2_vl.encoder_source),
        )
        for architecture, model_type, read_config in (
            ("Qwen2VLForConditionalGeneration", "qwen2_vl", qwen2_vl.QWEN2_VL),
            ("Qwen2_5_VLForConditionalGeneration", "qwen2_5_vl", qwen2_vl.QWEN2_5_VL),
        )
    ),
    Family(
        "Qwen3MoeForCausalLM",
        "qwen3_moe",
        qwen3_moe.read_config,
        qwen3_moe.SparseDecoder,
        qwen3_moe.source,
    ),
    Family(
        "MixtralForCausalLM", "mixtral", mixtral.read_config, mixtral.SparseDecoder, mixtral.source
    ),
)
# those of one `model_type` in this order: it names a model that generates where it stands alone
FAMILIES = (
    *_DECODERS,
    *(classifier_of(one) for one in _DECODERS if one.architecture.endswith("ForCausalLM")),
)


def family_of(config: ModelConfig) -> Family:
    """The family whose reader made a config."""
    found = (family for family in FAMILIES if family.architecture == config.architecture)
    return next(found, None) or _own_family(config.architecture)


def _own_family(name: str) -> Family:
    """The family outside the package that `module:NAME` names."""
    record = object_of_name("hf_overrides.architectures", name, "a Family", Family)
    return replace(record, architecture=name)


def find_family(
    architectures: list[str] | None, model_type: str | None, *, may_be_own: bool = False
) -> Family:
    """Returns the family that a config.json names.

    Args:
        architectures: the `architectures` field; its first supported entry wins.
        model_type: the `model_type` field, looked at only when `architectures` is absent or empty.
        may_be_own: the field is the operator's and may name a family as `module:NAME`.

    Raises:
        UnsupportedModelError: no implemented architecture is named.
        ValidationError: a family outside the package cannot be imported.
    """
    allowed = f"one of {', '.join(family.architecture for family in FAMILIES)}"
    if architectures:
        if not isinstance(architectures, list):
            raise UnsupportedModelError("architectures", architectures, f"a list with {allowed}")
        if may_be_own and OBJECT_NAME.fullmatch(str(architectures[0])):
            return _own_family(architectures[0])
        for family in FAMILIES:
            if family.architecture in architectures:
                return family
        raise UnsupportedModelError("architectures", architectures, allowed)
    for family in FAMILIES:
        if family.model_type == model_type:
            return family
    if model_type is None:
        raise UnsupportedModelError("architectures", architectures, allowed)
    types = ", ".join(family.model_type for family in FAMILIES)
    raise UnsupportedModelError("model_type", model_type, f"one of {types}")
