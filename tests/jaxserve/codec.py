"""Messages as strict JSON: what cannot cross a process fails here."""

from __future__ import annotations

import json
from typing import Any

from pydantic import TypeAdapter

from jaxserve.messages import Abort, AddGroup, Begun, Control, Header, Message, StepOutput

BODIES: dict[str, Any] = {
    kind.kind: TypeAdapter(kind) for kind in (AddGroup, Abort, Begun, Control, StepOutput)
}


def encode(message: Message) -> bytes:
    body = BODIES[message.header.kind].dump_json(message.body, warnings="error")
    return json.dumps(message.header).encode() + b"\n" + body


def decode(data: bytes) -> Message:
    head, body = data.split(b"\n", 1)
    header = Header(*json.loads(head))
    return Message(header, BODIES[header.kind].validate_json(body, strict=True))
