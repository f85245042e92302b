"""Pictures of an engine: its pages, its last requests, and where their time went.

Run it with `python docs/examples/page_map.py [FOLDER]`; it needs matplotlib (the extra `bench`).
"""

import sys
import tempfile
from pathlib import Path

from checkpoints import bundled_model_path
from jaxserve import LLM, SamplingParams


def main():
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp())
    llm = LLM(str(bundled_model_path()), max_num_seqs=8, max_model_len=256, num_pages=96)
    params = SamplingParams(max_tokens=48, seed=1, ignore_eos=True)
    head = "Write a story with these words, one sentence for each of them: Carla, bear, "
    words = ("kite.", "boat.", "lamp.", "shoe.", "tree.", "drum.")
    llm.generate([head + words[0]], params, use_tqdm=False)  # the others find its pages
    outputs = llm.generate([head + word for word in words], params, use_tqdm=False)
    found = [output.num_cached_tokens for output in outputs]
    print("prompt tokens found in the prefix cache:", found)
    llm.plot_pages(folder / "pages.png")
    llm.plot_timeline(folder / "timeline.png")
    llm.plot_latency(folder / "latency.png")
    llm.trace(folder / "trace.json")  # for https://ui.perfetto.dev
    print(llm.explain(outputs[-1].request_id))
    made = sorted(path.name for path in folder.iterdir())
    print(f"in {folder}: {', '.join(made)}")
    print("pages were shared:", max(found) > 0)
    llm.close()


if __name__ == "__main__":
    main()
