"""The simulated engine: the scheduler's own plans, and what clients would see of them."""

from __future__ import annotations

import math

import numpy as np
import pytest

from jaxserve.errors import ValidationError
from jaxserve.observability.load_trace import KEY_PAGE, TracedRequest
from jaxserve.scheduling.plan import StepPlan
from jaxserve.simulation.gaps import Gaps
from jaxserve.simulation.served import Served
from jaxserve.simulation.setting import Setting
from jaxserve.simulation.simulator import Simulation
from jaxserve.simulation.step_time import StepSeconds
from jaxserve.simulation.workload import Workload
from tests.load_traces import small_setting

STEP_S = 0.01


class Even:
    """Every step takes as long."""

    intake, handover, source = 0.0, 0.0, "even"

    def __init__(self, before: float = 0.0, after: float = 0.0):
        self._before, self._after = before, after
        self.plans: list[tuple[int, tuple[int, ...]]] = []

    def first_delivery(self) -> float:
        return 0.0

    def of(self, plan: StepPlan, num_pages: int) -> StepSeconds:
        self.plans.append((plan.num_decode, tuple(plan.rows.lengths)))
        return StepSeconds(STEP_S, self._before, self._after)


def run(load: Workload | list[TracedRequest], setting: Setting | None = None, **how) -> Served:
    setting = setting or small_setting()
    requests = load.requests() if isinstance(load, Workload) else load
    return Simulation(setting, Even(), **how).run(requests)


def settings(**changed) -> Setting:
    return small_setting(**changed)


def test_a_request_alone_takes_its_steps():
    """With overlap the host has the tokens of a step while the next one runs."""
    served = run([TracedRequest(1.0, 200, 5)])
    assert served.first[0] == pytest.approx(1.0 + 2 * STEP_S), "200 tokens are two steps of 128"
    assert served.last[0] == pytest.approx(1.0 + 6 * STEP_S)
    assert served.started[0] == 1.0 and served.gaps.count == 4
    assert served.gaps.percentile(50) == pytest.approx(STEP_S, rel=0.005)


def test_a_request_that_comes_within_a_step_waits_for_the_one_behind_it():
    """The step after the one that runs is with the device already."""
    first = TracedRequest(0.0, 10, 50)
    together = run([first, TracedRequest(0.095, 10, 1)])
    waits = together.started[1] - 0.095
    assert waits == pytest.approx(0.005), "it is planned when the step in progress ends"
    assert together.first[1] == pytest.approx(0.1 + 2 * STEP_S), "and runs behind the next"
    alone = run([first, TracedRequest(0.095, 10, 1)], settings(overlap=False))
    assert alone.first[1] == pytest.approx(0.1 + STEP_S)


def test_the_server_reads_requests_one_after_the_other():
    times = Even()
    times.intake = 0.004
    load = [TracedRequest(1.0, 10, 1)] * 3 + [TracedRequest(2.0, 10, 1)]
    served = Simulation(small_setting(), times).run(load)
    assert served.started[0] == pytest.approx(1.004)
    assert served.started[2] >= 1.012, "the third is read behind the two before it"
    assert served.started[3] == pytest.approx(2.004), "and one that comes alone waits for none"
    times.intake, times.handover = 0.0, 0.004
    served = Simulation(small_setting(), times).run(load)
    assert [*served.started] == pytest.approx([1.004] * 3 + [2.004]), "they are handed over at once"


def test_every_token_but_the_first_has_a_gap_also_after_preemptions():
    load = Workload(60, 400.0, input_len=150, output_len=60, range_ratio=0.8)
    served = run(load, settings(num_pages=66))
    assert served.num_preemptions > 0 and served.done.all()
    assert served.gaps.count == sum(served.output_tokens) - 60
    assert max(served.pages) <= 65


@pytest.mark.parametrize("caching", [True, False])
def test_prompts_that_begin_alike_are_found_where_there_is_a_cache(caching):
    load = Workload(40, 20.0, input_len=20, output_len=4, prefix_len=160, num_prefixes=2)
    served = run(load, settings(enable_prefix_caching=caching))
    assert served.num_found == (38 * 160 if caching else 0)


def test_outputs_with_keys_are_found_by_the_next_turn():
    """Keys beyond the prompt are of the output, as a recorder writes them."""
    keys = tuple(f"k{n}" for n in range(6))  # 96 tokens
    first = TracedRequest(0.0, 40, 60, keys=keys)
    second = TracedRequest(10.0, 110, 4, keys=keys)
    served = run([first, second])
    assert served.num_found == 6 * KEY_PAGE
    assert run([first, second._replace(keys=())]).num_found == 0


def test_clients_that_send_no_more_at_once_wait_for_each_other():
    load = Workload(30, math.inf, input_len=20, output_len=10)
    served = run(load, max_concurrency=3)
    assert max(served.running) == 3 and served.done.all()
    assert max(run(load).running) == 8
    begun = sorted(served.sent)
    assert begun[0] == begun[2] == 0.0 < begun[3]


def test_admission_is_that_of_a_server():
    load = Workload(100, math.inf, input_len=20, output_len=10)
    served = run(load, settings(max_num_queued_reqs=10))
    assert served.num_refused == 90 and int(served.done.sum()) == 10
    served = run(Workload(100, 1000.0, input_len=64, output_len=50), settings(max_queue_wait=0.2))
    assert 0 < served.num_refused < 100
    waited = served.samples()["queue"]
    assert waited.max() <= 0.2 + 2 * STEP_S


def test_priorities_go_first_where_the_policy_says_so():
    load = Workload(90, math.inf, input_len=40, output_len=20, num_priorities=3)
    served = run(load, settings(scheduling_policy="priority"))
    waits = [served.samples(np.asarray(served.priority) == one)["ttft"].mean() for one in range(3)]
    assert waits[0] < waits[1] < waits[2]
    equal = run(load)
    waits = [equal.samples(np.asarray(equal.priority) == one)["ttft"].mean() for one in range(3)]
    assert max(waits) < 1.2 * min(waits)


def test_two_clients_share_the_slots():
    many = [TracedRequest(0.0, 20, 40, client="many") for _ in range(40)]
    served = run([*many, TracedRequest(0.5, 20, 4, client="one")])
    alone = run([*many, TracedRequest(0.5, 20, 4, client="many")])
    assert served.samples()["ttft"][-1] < alone.samples()["ttft"][-1] / 3


def test_a_run_is_exact():
    load = Workload(50, 30.0, input_len=60, output_len=20, range_ratio=0.5)
    assert run(load).last == run(load).last


def test_a_request_that_no_context_holds_is_refused():
    with pytest.raises(ValidationError, match=r"workload='1000 \+ 25 tokens'.*1024"):
        run([TracedRequest(0.0, 1000, 25)])


def test_gaps_are_counted_to_a_quarter_of_a_percent():
    rng = np.random.default_rng(0)
    drawn = rng.lognormal(-4, 1, 20_000)
    gaps, now = Gaps(1), 0.0
    gaps.begin(0, now)
    for gap in drawn:
        now += gap
        gaps.took([0], now)
    for percent in (1, 50, 99, 99.9):
        exact = float(np.percentile(drawn, percent))
        assert gaps.percentile(percent) == pytest.approx(exact, rel=0.006)
    assert gaps.mean == pytest.approx(drawn.mean()) and gaps.count == len(drawn)
    assert gaps.deviation == pytest.approx(drawn.std(), rel=1e-6)


@pytest.mark.slow
def test_the_plans_are_those_of_a_live_engine(make_llm, model_folder):
    """All requests wait from the start, so that no clock plays a part."""
    lengths = [(30, 9), (3, 4), (60, 12), (17, 1), (5, 20), (41, 7), (8, 3)]
    llm = make_llm(model_folder("llama_gqa"), num_pages=40)
    prompts = [[2 + number] * prompt for number, (prompt, _) in enumerate(lengths)]
    plans: list[tuple[int, tuple[int, ...]]] = []
    engine = llm.client.engine
    before = engine.on_dispatch

    def note(number, plan):
        plans.append((plan.num_decode, tuple(plan.rows.lengths)))
        before(number, plan)

    engine.on_dispatch = note
    from jaxserve import SamplingParams

    llm.generate(
        prompts,
        [SamplingParams(max_tokens=output, ignore_eos=True) for _, output in lengths],
        use_tqdm=False,
    )
    config = llm.client.config
    setting = small_setting(
        max_num_seqs=config.scheduler.max_num_seqs,
        max_num_batched_tokens=config.scheduler.max_num_batched_tokens,
        max_model_len=config.scheduler.max_model_len,
        block_size=config.cache.page_size,
        num_pages=config.cache.num_pages,
    )
    scheduler = engine.scheduler
    assert setting.limits == scheduler.limits
    assert setting.shapes == (*engine.runner.programs.wanted,)
    times = Even()
    requests = [TracedRequest(0.0, prompt, output) for prompt, output in lengths]
    served = Simulation(setting, times).run(requests)
    assert times.plans == plans and len(plans) > 20
    assert served.num_preemptions == scheduler.num_preemptions
