"""A deterministic engine answers bit for bit as it answers a request alone."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path as FilePath
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

from benchmarks.determinism.requests import Asked, Told, difference
from benchmarks.determinism.schedules import SETTINGS, Arrival, drawn, fitting, run
from benchmarks.determinism.serving import asked_and_alone, deterministic_engine
from checkpoints import bundled_model_path
from jaxserve import LLM, EngineConfig, PoolingParams, SamplingParams
from jaxserve.config.deterministic import check_device
from jaxserve.config.engine_config import ONLINE_QUANTIZATIONS
from jaxserve.errors import ValidationError
from jaxserve.execution.programs import Program, ProgramQuery
from jaxserve.loading.engine_build import load_engine
from jaxserve.models import norms
from pallas_kernels import native
from pallas_kernels.linear import api as linear_api
from pallas_kernels.native.paths import Path
from pallas_kernels.paged_attention import native as native_attention
from pallas_kernels.paged_attention.xla import decode as xla_attention
from tests.quantized_models import CASES as QUANTIZED
from tests.quantized_models import quantize_folder

MODEL = str(bundled_model_path())
SCHEDULES = 300  # of a case, of which there are as many as shares of the slow tests
REQUESTS = 64
MOST = 12  # requests of a schedule


class Known(NamedTuple):
    """Requests and their answers alone."""

    requests: list[Asked]
    answers: list[Told]


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"linear_backend": "xla"}, "linear_backend"),
        ({"decode_backend": "xla"}, "decode_backend"),
        ({"prefill_backend": "xla"}, "prefill_backend"),
        ({"tensor_parallel_size": 2}, "tensor_parallel_size"),
        ({"features": ["some.module:Feature"]}, "features"),
        ({"logits_processors": ["some.module:function"]}, "logits_processors"),
    ],
)
def test_what_it_rules_out_is_refused_by_name(settings: dict[str, Any], named: str) -> None:
    with pytest.raises(ValidationError, match=f"{named}=.*with deterministic"):
        EngineConfig(model=MODEL, deterministic=True, **settings)
    EngineConfig(model=MODEL, **settings)


@pytest.mark.parametrize(
    ("platform", "dtype", "settings", "named"),
    [
        ("rocm", "bfloat16", {}, "deterministic=True"),
        ("tpu", "float32", {}, "dtype='float32'"),
        ("gpu", "bfloat16", {"is_sparse": True}, "deterministic=True.*experts"),
        ("gpu", "bfloat16", {"quantization": "int8"}, "quantization='int8'"),
        ("gpu", "bfloat16", {"kv_cache_dtype": "fp8"}, "kv_cache_dtype='fp8'"),
        ("tpu", "bfloat16", {"limit_mm_per_prompt": 2}, "limit_mm_per_prompt=2"),
    ],
)
def test_what_was_not_read_of_other_devices_is_refused_by_name(
    platform: str, dtype: str, settings: dict[str, Any], named: str
) -> None:
    def check(dtype: str, is_sparse: bool = False, **settings: Any) -> None:
        config = EngineConfig(model=MODEL, deterministic=True, **settings)
        check_device(
            config,
            platform,
            dtype,
            is_quantized=config.quantization is not None,
            is_sparse=is_sparse,
            reads_images=bool(config.limit_mm_per_prompt),
        )

    with pytest.raises(ValidationError, match=f"{named}.*on platform {platform}"):
        check(dtype, **settings)
    if platform != "rocm":
        check("bfloat16")


def test_an_engine_refuses_before_it_loads() -> None:
    with pytest.raises(ValidationError, match=r"dtype=.float16.*with deterministic"):
        load_engine(EngineConfig(model=MODEL, deterministic=True, dtype="float16"))


@pytest.fixture(scope="module", params=["bfloat16", "float32"])
def dtype(request: pytest.FixtureRequest) -> str:
    if not native.availability().available:
        pytest.skip(f"native kernels: {native.availability().reason}")
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def known(dtype: str) -> Known:
    with deterministic_engine(MODEL, dtype) as engine:
        return Known(*asked_and_alone(engine, random.Random(1), REQUESTS, 2000))


def wrong(engine: LLM, known: Known, count: int, seed: int) -> list[str]:
    """What differs in so many schedules."""
    rng, found = random.Random(seed), []
    served = fitting(known.requests, engine.config.scheduler.max_model_len)
    for _ in range(count):
        arrivals = drawn(rng, served, MOST)
        if rng.random() < 0.3:
            engine.reset_prefix_cache()
        for place, answer in run(engine, known.requests, arrivals).answers.items():
            index = arrivals[place].index
            text = difference(known.answers[index], answer)
            if text is not None:
                found.append(f"request {index}, {known.requests[index].params!r}: {text}")
    return found


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("settings", SETTINGS)
def test_random_schedules(dtype: str, known: Known, settings: str, seed: int) -> None:
    with deterministic_engine(MODEL, dtype, **SETTINGS[settings]) as engine:
        assert not wrong(engine, known, SCHEDULES, seed)


@pytest.mark.slow
def test_products_by_the_rows_of_a_step_are_found(
    known: Known, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same schedules see what an engine does whose sums follow the rows of its steps."""
    monkeypatch.setattr(linear_api, "Path", SimpleNamespace(ONE_ORDER=Path.BY_ROWS))
    with deterministic_engine(MODEL, dtype) as engine:
        assert wrong(engine, known, 20, seed=0)


@pytest.mark.slow
def test_attention_by_the_slots_of_a_program_is_found(
    known: Known, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same schedules see attention whose order of summation follows the slots of a program."""
    decode = native_attention.decode

    def by_slots(q: Any, *operands: Any) -> Any:
        return (decode if len(q) <= 4 else xla_attention.decode)(q, *operands)

    monkeypatch.setattr(native_attention, "decode", by_slots)
    with deterministic_engine(MODEL, dtype) as engine:
        assert wrong(engine, known, 20, seed=0)


def run_any_program(engine: LLM, patch: pytest.MonkeyPatch) -> None:
    """Have steps run on programs by chance, where an engine takes the cheapest that it has by then.

    So what a program that is compiled late would change is found at once.
    """
    table, rng = engine.client.engine.runner.programs, random.Random(2)

    def chosen(wanted: ProgramQuery) -> Program:
        return rng.choice([p for p in table.programs if wanted.fits(p.layout.shape)])

    patch.setattr(table, "select", chosen)


EVERY_PROGRAM = 100


@pytest.mark.slow
def test_any_program_that_holds_a_step_gives_the_same_bits(
    known: Known, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"max_num_seqs": 16, "max_num_batched_tokens": 256, "compile_ahead": EVERY_PROGRAM}
    with deterministic_engine(MODEL, dtype, **settings) as engine:
        run_any_program(engine, monkeypatch)
        assert not wrong(engine, known, 40, seed=1)


@pytest.mark.slow
def test_a_norm_by_the_program_is_found(
    known: Known, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """XLA's norms, whose sums follow the program; what bfloat16 rounds away is not found so."""
    if dtype != "float32":
        pytest.skip("the type of the norm's sums")
    monkeypatch.setattr(norms, "native_norm", norms.rms_norm)
    settings = {"max_num_seqs": 16, "max_num_batched_tokens": 256, "compile_ahead": EVERY_PROGRAM}
    with deterministic_engine(MODEL, dtype, **settings) as engine:
        run_any_program(engine, monkeypatch)
        assert wrong(engine, known, 10, seed=1)


FEW: dict[str, Any] = {
    "max_model_len": 512,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 64,
    "prefill_chunk": 37,
    "num_pages": 60,
    "compile_ahead": EVERY_PROGRAM,
    "skip_tokenizer_init": True,
}
# cases of `tests.tiny_models`, or of `tests.quantized_models`
FORMS: list[tuple[str, dict[str, Any]]] = [
    ("qwen3_moe", {}),
    ("mixtral", {}),
    ("gemma2", {}),
    ("gemma3", {}),
    ("olmo2", {}),
    *(("llama_gqa", {"quantization": name}) for name in ONLINE_QUANTIZATIONS),
    *(("llama_gqa", {"kv_cache_dtype": name}) for name in ("int8", "fp8")),
    *((name, {}) for name in ("awq", "gptq-act-order", "w8a8", "fp8-block")),
]


@pytest.mark.slow
@pytest.mark.parametrize(("case", "settings"), FORMS)
def test_families_and_formats(
    case: str,
    settings: dict[str, Any],
    dtype: str,
    model_folder: Callable[..., FilePath],
    tmp_path: FilePath,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each alone and among others, on programs by chance, with few pages and small chunks."""
    quantized = QUANTIZED.get(case)
    wide = {"hidden_size": 128, "intermediate_size": 256} if quantized or settings else {}
    folder = model_folder("llama_gqa" if quantized else case, max_position_embeddings=1024, **wide)
    if quantized is not None:
        config, pack = quantized
        folder, _ = quantize_folder(folder, tmp_path, config, lambda module: pack)
    with deterministic_engine(str(folder), dtype, **FEW | settings) as engine:
        known = Known(*asked_and_alone(engine, random.Random(7), 40, 450))
        run_any_program(engine, monkeypatch)
        assert not wrong(engine, known, 20, seed=1)


@pytest.fixture(scope="module")
def engine(dtype: str) -> Iterator[LLM]:
    with deterministic_engine(MODEL, dtype, num_pages=160) as made:
        yield made


@pytest.mark.slow
def test_a_chat_is_answered_warm_as_cold(engine: LLM) -> None:
    """Turns find the pages that rows of decode steps have filled, and that chunks have."""
    rng, prompt = random.Random(3), [5, 6, 7] * 20
    params = SamplingParams(temperature=0.9, seed=4, max_tokens=40, logprobs=3, ignore_eos=True)
    turns, warm = [], []
    found = engine.stats().pages.num_found
    for _ in range(5):
        turns.append(Asked([*prompt], params))
        warm.append(run(engine, turns, [Arrival(len(turns) - 1, 0, None)]).answers[0])
        prompt += [*warm[-1][1][0], *(rng.randrange(5, 2000) for _ in range(9))]
    assert engine.stats().pages.num_found - found > 300
    for index, answer in enumerate(warm):
        engine.reset_prefix_cache()
        assert difference(run(engine, turns, [Arrival(index, 0, None)]).answers[0], answer) is None


@pytest.mark.slow
def test_a_request_without_a_seed_gets_one_by_its_prompt(engine: LLM) -> None:
    params = SamplingParams(temperature=1.5, max_tokens=12, ignore_eos=True, n=2)
    first, other, again = (
        engine.generate([prompt], params, use_tqdm=False)[0].outputs
        for prompt in ([9, 8, 7], [9, 8, 6], [9, 8, 7])
    )
    assert [one.token_ids for one in first] == [one.token_ids for one in again]
    assert first[0].token_ids != first[1].token_ids != other[0].token_ids
    assert first[0].token_ids != other[0].token_ids


@pytest.mark.slow
def test_means_are_those_of_an_engine_that_is_not(engine: LLM, dtype: str) -> None:
    prompts = [[*range(5, 5 + length)] for length in (1, 90, 700)]
    with LLM(MODEL, dtype=dtype, enable_embeddings=True) as usual:
        for pooling in ("mean", "last", "cls"):
            params = PoolingParams(pooling=pooling)
            vectors = [
                [output.outputs.data for output in one.encode(prompts, params, use_tqdm=False)]
                for one in (engine, usual)
            ]
            for one, other in zip(*vectors, strict=True):
                assert one == pytest.approx(other, abs=2e-2 if dtype == "bfloat16" else 1e-4)
