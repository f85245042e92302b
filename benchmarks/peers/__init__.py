"""jaxserve beside other engines: the same workload file, interleaved in one run.

    python -m benchmarks.peers --model MODEL
    python -m benchmarks.peers --model MODEL --peers transformers,vllm,openvino \\
        --python vllm=VENV/bin/python --python openvino=VENV/bin/python --output-json peers.json

Each engine runs in a process of its own and may have an interpreter of its own (`--python`), since
their requirements contradict one another. The parent writes the workload (prompts as token ids,
output lengths, most requests in flight) to a file, starts one worker an engine, and sends it one
JSON line a command ("run cell 2"); the worker answers with one JSON line (seconds, output tokens,
peak memory). So the rounds alternate between the engines while all are loaded; `--one-at-a-time`
loads one after the other where the memory does not hold them together.

Cells: batches of equal requests (prompt 32, output 128 tokens); a mixed workload (64 requests,
prompt and output lengths uniform in 8 .. 256, all queued at once, at most 16 in flight); prefill
(16 prompts of 512 with one output token, at most 4 in flight: output tokens are prompts); and long
(8 prompts of 1,800 with 64 outputs, all in flight). Greedy,
end-of-sequence ignored, prefix caches off; only the tokens that were asked for count. A round has
prompts of its own, and the first is not counted; the figures are medians. All engines have the same
type, slots, token budget of a step and cores; the report tells these rules. The fastest matrix
product and read are measured before and after: a cell that needs more than those fails the run. An
engine that is not installed, or fails, is a row with the reason.

- `workload.py`: the cells and their file. `adapters/`: one module an engine.
- `worker.py`: the process of one engine; imports that engine and the standard library.
- `process.py`: the parent's end of a worker. `rounds.py`: order of runs. `report.py`: the tables.
- `rules.py`: the rules in words. `limits.py`: what a cell needs at least, and the machine's limits.

`docs/benchmarks.md` says how each peer is installed.
"""
