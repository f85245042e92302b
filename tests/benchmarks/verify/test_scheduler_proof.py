"""The proof of the scheduler: it holds, and it fails where pages or tokens get lost."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.verify.scheduler_proof import main, prove
from jaxserve.memory.manager import PageManager
from jaxserve.memory.page_pool import PagePool
from jaxserve.scheduling.beams import BeamGroups
from jaxserve.scheduling.scheduler import Scheduler


@pytest.mark.slow
def test_what_was_done_is_printed(capsys) -> None:
    assert main(["--operations", "6000", "--seed", "3"]) == 0
    printed = capsys.readouterr().out
    assert "6,000 operations" in printed
    done = {line[13:]: int(line[:12].replace(",", "")) for line in printed.splitlines()[:-1]}
    names = "preemptions", "prompt tokens found", "forked", "forced", "aborted", "groups"
    for name in (*names, "pages to the host", "pages back", "pages that found no room there"):
        assert done[name] > 10, name
    assert done["pages that windows have passed"] > 1000
    assert done["sequences found by searches"] > 100
    assert done["beams given up for want of pages"] > 2
    assert sum(count for name, count in done.items() if name.startswith("searches aborted")) > 5
    assert done["tokens"] > 2500 and done["requests"] > 500


def leak(self: PagePool, pages: list[int], kept: Any = PagePool.release) -> None:
    kept(self, pages[:-1])


def seen_still(self: PageManager, request: Any, kept: Any = PageManager._pass_window) -> None:
    request.num_computed += self.page_size
    kept(self, request)
    request.num_computed -= self.page_size


def never(self: PageManager, request: Any) -> None:
    pass


def stale(self: PageManager, request: Any, num_tokens: int, kept: Any = PageManager.keep) -> None:
    kept(self, request, len(request.pages) * self.page_size)


def twice(
    self: Scheduler, plan: Any, tokens: Any, counts: Any, kept: Any = Scheduler.commit
) -> Any:
    seen = kept(self, plan, tokens, counts)
    seen.requests += seen.requests[:1]
    seen.tokens += seen.tokens[:1]
    return seen


def forgotten(self: BeamGroups, group: Any, member: Any, kept: Any = BeamGroups._drop) -> None:
    if member.candidates is None:
        kept(self, group, member)


@pytest.mark.parametrize(
    ("owner", "name", "broken"),
    [
        (PagePool, "release", leak),
        (PageManager, "keep", stale),
        (PageManager, "_pass_window", seen_still),
        (PageManager, "_pass_window", never),
        (Scheduler, "commit", twice),
        (BeamGroups, "_drop", forgotten),
    ],
)
def test_what_is_wrong_is_seen(monkeypatch, owner: Any, name: str, broken: Any) -> None:
    monkeypatch.setattr(owner, name, broken)
    kinds = AssertionError, KeyError, IndexError, TypeError, ValueError
    with pytest.raises(kinds) as failure:
        prove(3000, seed=2)
    assert "of seed 2" in failure.value.__notes__[0]
