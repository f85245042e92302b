"""One grammar is compiled in a process of its own, which nothing outlives.

llguidance takes time and memory without a bound to compile some short texts, and leaves the stack
of others. The process is a fork of one that has the tokens: it begins in milliseconds, what it may
take is counted for this grammar alone, and it can be killed, which a thread cannot.
"""

from __future__ import annotations

import json
import math
import os
import random
import resource
import signal
import time
from pathlib import Path
from typing import Any, NoReturn

from jaxserve.grammars.matchers import GrammarError, mask_of, new_matcher
from jaxserve.grammars.notation import in_notation
from jaxserve.processes.oom_score import offer_to_oom_killer

CPU_SECONDS = 1
MEMORY_BYTES = 64 << 20  # beside what the process has when it begins
LEAST_THREAD_STACK = 2 << 20  # of a thread where the main one has no limit
TOKEN_SECONDS = 0.1  # of CPU time, at any of the first tokens
WALK_TOKENS, WALK_SECONDS = 16, 0.2  # which are so many, or take so long together
WALL_SECONDS = 5.0  # for what gets little of a processor
SHORT_SECONDS = 0.1  # after which others go first, by NICER
NICER = 10
OOM_SCORE = 1000  # of 1000: where memory runs out, the kernel ends this process first
OUT = 1  # where the verdict is written

COMPILES, REFUSED = 0, 3  # exit codes
SLOW = f"a constraint that compiles in {CPU_SECONDS} s of processor time"
LARGE = f"a constraint that compiles in {MEMORY_BYTES >> 20} MiB of memory"
DEEP = "a constraint that is less nested, or has shorter chains of rules"
COSTLY = f"a constraint that takes less than {TOKEN_SECONDS:g} s of processor time at a token"
LATE = f"a constraint that compiles in {WALL_SECONDS:g} s"
BROKEN = "a constraint that compiles, which this one does not: "


class Trial:
    """A process that compiles one grammar. The process that makes it must have one thread alone.

    Args:
        table: of the tokens, as `token_table` gave it.
        text: of the grammar.

    Attributes:
        reader: the descriptor from which `read` reads.
        due: when `pass_time` is to be called, of `time.monotonic`.
        is_long: others go first.
        notation: the text as it compiles, once it does; None: as it was.
        note: what of it has no meaning, in words or "".
        is_late: it was killed because it took WALL_SECONDS, or by the kernel, for want of memory.
    """

    def __init__(self, table: Any, text: str):
        self.reader, writer = os.pipe()
        self._begin = time.monotonic()
        self.due = self._begin + SHORT_SECONDS
        self.is_long = self.is_late = False
        self.notation: str | None = None
        self.note = ""
        self._said = b""
        self._pid = os.fork()
        if self._pid == 0:
            _compile(table, text, writer)
        os.close(writer)

    def read(self) -> bool:
        """Take in what the process says; False once it has ended."""
        data = os.read(self.reader, 1 << 16)
        self._said += data
        return bool(data)

    def pass_time(self) -> None:
        """It has taken long enough to let others go first, or to be killed."""
        if self.is_long:
            self.is_late, self.due = True, math.inf
            self.kill()
            return
        self.is_long, self.due = True, self._begin + WALL_SECONDS
        os.setpriority(os.PRIO_PROCESS, self._pid, os.getpriority(os.PRIO_PROCESS, 0) + NICER)

    def kill(self) -> None:
        os.kill(self._pid, signal.SIGKILL)

    def close(self) -> str | None:
        """The verdict of a process that has ended, or was killed; None: the grammar compiles."""
        os.close(self.reader)
        _, status = os.waitpid(self._pid, 0)
        if self.is_late:
            return LATE
        code, said = os.waitstatus_to_exitcode(status), self._said.decode(errors="replace")
        if code == COMPILES:
            self.notation, self.note = json.loads(said)
            return None
        if code == REFUSED:
            return said
        self.is_late = code == -signal.SIGKILL
        return _ended_by(-code)


def _ended_by(number: int) -> str:
    """What a grammar was not that has ended its process by a signal."""
    match number:
        case signal.SIGXCPU:
            return SLOW
        case signal.SIGABRT | signal.SIGKILL:  # no memory: the allocator gives up, or the kernel
            return LARGE
        case signal.SIGSEGV | signal.SIGBUS:
            return DEEP
        case _:
            return f"{BROKEN}it ended its process ({number})"


def _compile(table: Any, text: str, writer: int) -> NoReturn:
    """In the new process: compile within limits, say what is wrong, end."""
    code, said = REFUSED, LARGE
    try:
        _limit(writer)
        notation, note = in_notation(text)
        if _is_quick(new_matcher(table, notation)):
            code, said = COMPILES, json.dumps([None if notation == text else notation, note])
        else:
            said = COSTLY
    except GrammarError as error:
        said = f"{BROKEN}{error}"
    except MemoryError:
        pass
    except ValueError as error:
        said = str(error)
    except BaseException as error:  # also what a panic of llguidance is raised as
        said = f"{BROKEN}llguidance fails with {type(error).__name__}"
    finally:
        with open(OUT, "wb", closefd=False) as out:
            out.write(said.encode())
        os._exit(code)


def _is_quick(matcher: Any) -> bool:
    """Whether a few tokens, of which each may be any that is allowed, cost little each.

    Raises GrammarError if there is no first token. llguidance's own limits bound what later ones
    cost, but for grammars of many ambiguous rules, which mostly show here.
    """
    begin = before = time.process_time()
    choose = random.Random(0)
    mask = mask_of(matcher)
    for _ in range(WALK_TOKENS):
        matcher.compute_ff_tokens()
        now = time.process_time()
        if now - before > TOKEN_SECONDS:
            return False
        if matcher.is_stopped() or now - begin > WALK_SECONDS:
            break
        before = now
        matcher.consume_token(_one_of(mask, choose))
        mask = b"" if matcher.is_stopped() else matcher.compute_bitmask()
    return True


def _one_of(mask: bytes, choose: random.Random) -> int:
    """Any of the tokens of a mask."""
    bits = int.from_bytes(mask, "little")
    place = choose.randrange(bits.bit_length())  # the next one from there, which is below the last
    rest = bits >> place
    return place + (rest & -rest).bit_length() - 1


def _limit(writer: int) -> None:
    """Keep nothing but the pipe, and take no more than one grammar may."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 2)  # where an allocator that gives up says so
    os.dup2(writer, OUT)
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    offer_to_oom_killer(OOM_SCORE)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _set_soft(resource.RLIMIT_STACK, _stack_bytes())
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS + 1))
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
    except FileNotFoundError:
        return  # not Linux, where the limit means nothing
    _set_soft(resource.RLIMIT_AS, pages * resource.getpagesize() + MEMORY_BYTES)


def _stack_bytes() -> int:
    """Half of what a thread of the engine has, which compiles the text after this process."""
    soft, _ = resource.getrlimit(resource.RLIMIT_STACK)
    return (LEAST_THREAD_STACK if soft == resource.RLIM_INFINITY else soft) // 2


def _set_soft(kind: int, limit: int) -> None:
    soft, hard = resource.getrlimit(kind)
    if soft == resource.RLIM_INFINITY or limit < soft:
        resource.setrlimit(kind, (limit, hard))
