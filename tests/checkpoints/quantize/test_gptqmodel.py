"""AWQ and GPTQ tensors read by gptqmodel; transformers uses its layers for both."""

from __future__ import annotations

import numpy as np
import pytest

from checkpoints.quantize.gptq import gptq, hessian
from checkpoints.quantize.rounding import round_with_zeros
from checkpoints.quantize.schemes import SCHEMES
from checkpoints.quantize.tensors import stored_tensors
from tests.checkpoints.quantize.test_algorithms import correlated

torch = pytest.importorskip("torch", reason="needs the extra `test`")
pytest.importorskip("gptqmodel", reason="needs gptqmodel")

pytestmark = pytest.mark.slow

GROUP = 32
F16 = np.dtype(np.float16)
WEIGHT = np.random.default_rng(0).standard_normal((64, 128)).astype(np.float32)


@pytest.mark.parametrize("name", ["int4-awq", "int4-gptq"])
def test_products_are_those_of_the_rounded_weight(name: str) -> None:
    from gptqmodel.nn_modules.qlinear.torch import TorchLinear
    from gptqmodel.nn_modules.qlinear.torch_awq import AwqTorchLinear
    from gptqmodel.utils.model import convert_gptq_v1_to_v2_format_module

    is_gptq = name == "int4-gptq"
    rounded = round_with_zeros(WEIGHT, GROUP, F16)
    if is_gptq:
        rounded = gptq(WEIGHT, hessian(correlated(300, 128)), GROUP, F16)
        assert rounded.order is not None
    layer = (TorchLinear if is_gptq else AwqTorchLinear)(
        bits=4,
        group_size=GROUP,
        sym=is_gptq,
        desc_act=is_gptq,
        in_features=128,
        out_features=64,
        bias=False,
        register_buffers=True,
        dtype=torch.float16,
    )
    tensors = stored_tensors("m", SCHEMES[name], rounded, F16)
    layer.load_state_dict(
        {key[2:]: torch.from_numpy(np.ascontiguousarray(v)) for key, v in tensors.items()}
    )
    if is_gptq:  # what its loader does with `checkpoint_format` "gptq"
        convert_gptq_v1_to_v2_format_module(layer, 4, torch.int32)
    layer.eval()
    layer.post_init()
    with torch.inference_mode():
        found = layer(torch.eye(128, dtype=torch.float16)).float().numpy().T
    # the product of two float16 is rounded once, at sizes of up to 4.2
    assert np.abs(found - rounded.dequantized()).max() <= 2**-9
