"""A scheduling policy on the simulator: shortest answer first against those that come along.

The scheduler, the pages and the policy are the engine's own; the time of a step is estimated. Run
it with `python docs/examples/scheduler_experiment.py`.
"""

from jaxserve import EngineConfig
from jaxserve.simulation.devices import device_of
from jaxserve.simulation.policy_file import compare, table
from jaxserve.simulation.setting import read_model, settle
from jaxserve.simulation.simulator import Simulation
from jaxserve.simulation.step_time import Rates, Roofline
from jaxserve.simulation.workload import Workload

LOAD = Workload(num_prompts=300, request_rate=24.0, input_len=800, output_len=200, range_ratio=0.9)


