"""A scheduling policy on the simulator: shortest answer first beside those that come along.

Scheduler, pages and policies are the engine's own; what a step takes is estimated, by the data
sheet of a device that need not be here. Run it with `python docs/examples/scheduler_experiment.py`.
"""

from jaxserve import EngineConfig
from jaxserve.scheduling.policies import FirstComeFirstServed
from jaxserve.simulation.devices import device_of
from jaxserve.simulation.policy_file import compare, table
from jaxserve.simulation.setting import find_model, settle
from jaxserve.simulation.simulator import Simulation
from jaxserve.simulation.step_time import Rates, Roofline
from jaxserve.simulation.workload import Workload

LOAD = Workload(num_prompts=400, request_rate=40.0, input_len=1000, output_len=200, range_ratio=0.9)


class ShortAnswersFirst(FirstComeFirstServed):
    """Requests that ask for the fewest tokens first, by arrival among equals."""

    def key(self, request):
        return request.asked.num_output_asked, request.order

    def rank(self, num_prompt, priority, num_output=0):
        return num_output


def main():
    asked = EngineConfig(model="llama-3-8b", max_num_seqs=32, max_model_len=4096)
    model, quantised = find_model(asked)
    setting = settle(asked, model, device_of("h100"), quantised)
    times = Roofline(setting, Rates.of_data_sheet(setting.device))

    def serve(config):
        return Simulation(setting, times, config).run(LOAD.requests())

    rows = compare(serve, setting.config.asked, [f"{__name__}:ShortAnswersFirst"])
    print(table(rows))
    print(f"\n{times.source}")
    found = {row["scheduling_policy"].split(":")[-1]: row["median_queue_ms"] for row in rows}
    print("the median wait is shorter:", found["ShortAnswersFirst"] < found["fcfs"])


if __name__ == "__main__":
    main()
