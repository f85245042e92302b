"""The whole path in one minute, on any supported jax and without torch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from jaxserve import LLM, SamplingParams

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "eos_token_id": 2,
}
SETTINGS = {
    "max_num_seqs": 4,
    "max_num_batched_tokens": 32,
    "compile_ahead": 2,
    "compile_in_background": False,
}


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_dummy_weights_overlap_and_no_overlap_agree(tmp_path: Path, dtype: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    prompts = [[5, 6, 7] * n for n in (1, 7, 15, 30)]
    params = [
        SamplingParams(temperature=t, seed=3, max_tokens=20, ignore_eos=True, detokenize=False)
        for t in (0.0, 0.8, 1.0, 0.0)
    ]
    seen = []
    for overlap in (True, False):
        llm = LLM(
            model=str(tmp_path),
            load_format="dummy",
            dtype=dtype,
            skip_tokenizer_init=True,
            overlap=overlap,
            num_pages=30,
            block_size=8,
            max_model_len=128,
            **SETTINGS,
        )
        outputs = llm.generate(prompts, params, use_tqdm=False)
        seen.append([output.outputs[0].token_ids for output in outputs])
        llm.close()
    assert seen[0] == seen[1]
    assert all(len(tokens) == 20 for tokens in seen[0])


# in a process of its own
PROGRAM = f"""
import sys
import jaxserve
assert "jax" not in sys.modules, "jax"
from checkpoints import bundled_model_path
from jaxserve import LLM, SamplingParams
from jaxserve.async_engine import AsyncEngine

llm = LLM(model=str(bundled_model_path()), max_model_len=256, **{SETTINGS})
messages = [[{{"role": "user", "content": text}}] for text in ("What is 2 + 3?", "Hello!")]
outputs = llm.chat(messages, SamplingParams(temperature=0.0, max_tokens=40), use_tqdm=False)
assert "5" in outputs[0].outputs[0].text
assert all(output.outputs[0].finish_reason == "stop" for output in outputs)
assert all(output.outputs[0].text for output in outputs)
llm.close()
bad = {{"torch", "starlette", "uvicorn", "pydantic", "typer"}} & set(sys.modules)
assert not bad, bad
"""


@pytest.mark.slow
def test_the_bundled_model_answers_without_torch() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
