"""What classes for vLLM's V1 interface build on: states by place, and a callable a request."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np

from jaxserve.params.vllm_processor import (
    AdapterLogitsProcessor,
    BatchUpdate,
    MoveDirectionality,
    process_dict_updates,
)

ONE_WAY, SWAP = MoveDirectionality.UNIDIRECTIONAL, MoveDirectionality.SWAP


def came(place: int, add: int | None, prompt=(), output=()):
    return place, SimpleNamespace(add=add), list(prompt), output


class Adding(AdapterLogitsProcessor):
    """Adds a request's number, or the sum of the prompt, and the length of the output."""

    def is_argmax_invariant(self) -> bool:
        return False

    def new_req_logits_processor(self, params):
        if params.add == 0:
            return lambda prompt, output, logits: logits + sum(prompt) + len(output)
        if params.add is not None:
            return lambda output, logits: logits + params.add + len(output)
        return None


def test_states_follow_their_requests() -> None:
    entries: dict[int, int] = {}

    def update(**changes):
        none = {"removed": (), "added": (), "moved": ()}
        changed = BatchUpdate(batch_size=4, **(none | changes))
        return process_dict_updates(entries, changed, lambda params, *_: params.add)

    assert not process_dict_updates(entries, None, lambda *_: 1)
    assert update(added=[came(0, 10), came(1, None), came(2, 0)]) and entries == {0: 10, 2: 0}
    assert update(moved=[(0, 1, ONE_WAY)]) and entries == {1: 10, 2: 0}
    assert update(moved=[(1, 2, SWAP)]) and entries == {1: 0, 2: 10}
    assert update(moved=[(3, 1, ONE_WAY)]) and entries == {2: 10}  # the one at 1 is gone
    assert update(added=[came(2, None)]) and entries == {}
    assert not update(removed=[2])
    assert update(added=[came(0, 10)]) and update(added=[came(0, 10)]), "another request"


def test_a_callable_a_request_changes_its_row_alone() -> None:
    adding, output = Adding(None, None, False), [7]
    added = [came(0, 5, output=output), came(1, None), came(2, 0, [1, 2])]
    adding.update_state(BatchUpdate(3, (), added, ()))
    output.append(8)  # as the engine does
    logits = adding.apply(np.zeros((3, 2)))
    assert logits.tolist() == [[7, 7], [0, 0], [3, 3]]
