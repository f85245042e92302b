"""The quantisation schemes that a layer can have, and their names in files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

KEEP = "keep"


@dataclass(frozen=True, slots=True)
class Scheme:
    """A way to quantise the weights of a linear layer.

    Attributes:
        name: the name that users give.
        method: quant_method of the files.
        bits: bits of a weight.
        needs_text: whether activations of a calibration text decide.
        grouped: whether a row has a scale for each group of inputs.
        format: of compressed-tensors; "" for other methods.
        activations: that compressed-tensors prescribes: None, "token" (rounded to 8 bits by each
            token's numbers) or "tensor" (by one scale of the file).
    """

    name: str
    method: str
    bits: int
    needs_text: bool = False
    grouped: bool = False
    format: str = ""
    activations: str | None = None

    @property
    def is_float(self) -> bool:
        return self.format == "float-quantized"


_CT = "compressed-tensors"
SCHEMES = {
    scheme.name: scheme
    for scheme in (
        Scheme("int8", _CT, 8, format="pack-quantized"),
        Scheme("int8-dynamic", _CT, 8, format="int-quantized", activations="token"),
        Scheme(
            "int8-static", _CT, 8, needs_text=True, format="int-quantized", activations="tensor"
        ),
        Scheme("int4-awq", "awq", 4, needs_text=True, grouped=True),
        Scheme("int4-gptq", "gptq", 4, needs_text=True, grouped=True),
        Scheme("int4-dynamic", _CT, 4, grouped=True, format="pack-quantized"),
        Scheme("fp8", _CT, 8, format="float-quantized", activations="token"),
    )
}


def quantization_config(
    modules: Mapping[str, Scheme], kept: Sequence[str], group: int
) -> dict[str, Any]:
    """The quantization_config of config.json.

    Args:
        modules: scheme of each quantised module by its name, all of one method.
        kept: names of the linear modules that are not quantised.
        group: inputs that share a scale, where a scheme is grouped.
    """
    schemes = list(dict.fromkeys(modules.values()))
    if schemes[0].method == "awq":
        return {
            "quant_method": "awq",
            "bits": 4,
            "group_size": group,
            "zero_point": True,
            "version": "gemm",
            "modules_to_not_convert": [name for name in kept if name != "lm_head"] or None,
        }
    if schemes[0].method == "gptq":
        others = [name for name in kept if name != "lm_head"]
        config: dict[str, Any] = {
            "quant_method": "gptq",
            "bits": 4,
            "group_size": group,
            "desc_act": True,
            "sym": True,
            "damp_percent": 0.01,
            "static_groups": False,
            "true_sequential": False,
            "lm_head": False,
            "checkpoint_format": "gptq",
        }
        if others:
            # exceptions as GPTQModel writes them
            config["dynamic"] = {f"-:^{name.replace('.', chr(92) + '.')}$": {} for name in others}
        return config
    formats = list(dict.fromkeys(scheme.format for scheme in schemes))
    groups = {}
    for number, scheme in enumerate(schemes):
        own = [name for name, other in modules.items() if other == scheme]
        groups[f"group_{number}"] = {
            "targets": ["Linear"] if len(schemes) == 1 else own,
            "format": scheme.format,
            "weights": _weights(scheme, group),
            "input_activations": _activations(scheme),
            "output_activations": None,
        }
    return {
        "quant_method": _CT,
        "format": formats[0] if len(formats) == 1 else "mixed-precision",
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": list(kept),
        "kv_cache_scheme": None,
    }


def _weights(scheme: Scheme, group: int) -> dict[str, Any]:
    return {
        "num_bits": scheme.bits,
        "type": "float" if scheme.is_float else "int",
        "symmetric": True,
        "strategy": "group" if scheme.grouped else "channel",
        "group_size": group if scheme.grouped else None,
        "dynamic": False,
    }


def _activations(scheme: Scheme) -> dict[str, Any] | None:
    if scheme.activations is None:
        return None
    return {
        "num_bits": 8,
        "type": "float" if scheme.is_float else "int",
        "symmetric": True,
        "strategy": scheme.activations,
        "dynamic": scheme.activations == "token",
    }
