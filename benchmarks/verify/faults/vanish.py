"""Clients that close their connections in the middle of their streams, all at once."""

from __future__ import annotations

import asyncio
import json
import resource
import time

from benchmarks.verify.edge_load import Client, request, running_server

COMPLETIONS = "/v1/completions"
IDLE_S = 60.0
SIZES = ("--max-num-seqs", "8", "--max-num-batched-tokens", "128", "--max-queue-wait", "none")


async def _begin(port: int, index: int) -> asyncio.StreamWriter:
    """A stream of which the first bytes have come, or that waits."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    body = {"prompt": [5, index % 1000 + 3], "max_tokens": 400, "ignore_eos": True, "stream": True}
    writer.write(request(COMPLETIONS, body))
    await writer.drain()
    if index == 0:
        await reader.read(100)
    return writer


async def meet(clients: int) -> tuple[int, float, bool]:
    """Let clients vanish from a server.

    Returns what is still busy after a minute, seconds until nothing was, and whether a request
    afterwards got what it got before.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, max(soft, 4 * clients)), hard))
    body = {"prompt": "Once upon a time", "max_tokens": 40, "seed": 3, "ignore_eos": True}
    with running_server(*SIZES) as server:
        client = Client(server.port)
        before = await client.post(COMPLETIONS, body)
        writers = await asyncio.gather(*[_begin(server.port, index) for index in range(clients)])
        await asyncio.sleep(0.5)
        begin, busy = time.monotonic(), False
        for writer in writers:
            writer.transport.abort()
        try:
            await asyncio.to_thread(server.wait_until_idle, IDLE_S)
        except RuntimeError:
            busy = True
        seconds = time.monotonic() - begin
        after = await client.post(COMPLETIONS, body)
        client.close()
    same = json.loads(before.body)["choices"] == json.loads(after.body)["choices"]
    return int(busy), seconds, same
