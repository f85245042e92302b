"""Reading an optimised TPU module."""

from __future__ import annotations

import base64

from benchmarks.verify.prove.tpu import mosaic_uses


def line(name: str, module: bytes, *spaces: tuple[int, int]) -> str:
    used = ",".join(
        f'{{"memory_space":"{space}","offset":"0","size":"{size}"}}' for space, size in spaces
    )
    body = base64.b64encode(module).decode()
    return (
        f'  %{name} = bf16[8,128] custom-call(%a), custom_call_target="tpu_custom_call", '
        f'backend_config={{"scoped_memory_configs":[{{"memory_space":"1","offset":"0",'
        f'"size":"16777216"}}],"custom_call_config":{{"body":"{body}"}},'
        f'"used_scoped_memory_configs":[{used}]}}\n'
    )


def test_kernels_are_read_with_what_they_use() -> None:
    hlo = (
        line("paged_decode.1", b"..tpu.matmul..tpu.enqueue_dma..", (1, 393216), (5, 77))
        + line("paged_decode.2", b"..tpu.matmul..tpu.enqueue_dma..", (1, 393216))
        + line("paged_write", b"..tpu.enqueue_dma..")
        + '%c = f32[2] custom-call(%a), custom_call_target="Sharding"\n'
    )
    decode, write = mosaic_uses(hlo)
    assert (decode.name, decode.source, decode.vmem) == ("paged_decode", "mosaic_tpu", 393216)
    assert decode.instructions == {"matmul": 1, "dma": 1}
    assert decode.registers is None
    assert decode.shared is None
    assert (write.name, write.vmem, write.instructions) == ("paged_write", 0, {"dma": 1})
