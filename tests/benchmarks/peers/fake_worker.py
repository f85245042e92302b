"""A worker without an engine: `python fake_worker.py BEHAVIOUR WORKLOAD`, behaviours below."""

from __future__ import annotations

import json
import os
import sys
import time


def main() -> None:
    behaviour, workload = sys.argv[1:]
    with open(workload) as file:
        rounds = json.load(file)["rounds"]
    say = lambda message: print(json.dumps(message), flush=True)  # noqa: E731
    if behaviour == "missing":
        say({"event": "unavailable", "reason": "not installed: No module named 'quick'"})
        sys.exit(1)
    if behaviour == "dies at once":
        print("the engine's last words", file=sys.stderr)
        sys.exit(3)
    if behaviour == "silent":
        time.sleep(60)
    if behaviour == "babbles":
        print("hello", flush=True)
    if behaviour == "converts":
        time.sleep(0.2)
        say({"event": "converted", "seconds": 0.2})
    say({"event": "ready", "versions": {"quick": "1.0"}, "peak_rss_mib": 5.0})
    for line in sys.stdin:
        asked = json.loads(line)
        number = asked["run"]
        cell = rounds[asked["round"]][number]
        if number and behaviour == "fails in cell 1":
            say({"error": "RuntimeError: out of memory"})
            continue
        if behaviour == "long":
            time.sleep(60)
        if number and behaviour == "dies in cell 1":
            os.abort()
        say(
            {
                "seconds": 0.5,
                "tokens": sum(cell["output_lens"]),
                "first_tokens": [prompt[0] for prompt in cell["prompts"]],
                "peak_rss_mib": 7.0,
                "figures": {},
            }
        )


if __name__ == "__main__":
    main()
