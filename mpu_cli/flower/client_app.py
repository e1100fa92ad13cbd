"""The data owner's Flower app: a Flower ClientApp that carries files between the SuperLink and the spool.

It needs the spool's folder and nothing else, ``--node-config 'spool="/path"'``. Records and training belong to ``mpu
watch``, which runs apart from it. Requests may come twice: Flower does not deliver again what a stopped node received.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from mpu_cli.flower.exchange import Value, about, message_content, pieces
from mpu_cli.flower.spool import Spool

RequestFields = dict[str, Value]
Answer = tuple[dict[str, Value], list[bytes]]

LOOK, LONGEST_WAIT = 0.5, 30.0  # seconds between looks at a copy that is worked on, and until an answer without news

app = ClientApp()


def _state(spool: Spool, copy: str, request: RequestFields, _: list[bytes]) -> Answer:
    """The state of a copy, after ``wait`` seconds at most if it is being worked on; with its files that are here while
    it arrives, and with those of its delta once that is done."""
    ends = time.monotonic() + min(float(request.get("wait", 0.0)), LONGEST_WAIT)
    while (state := spool.state(copy)) == "waiting" and time.monotonic() < ends:
        time.sleep(LOOK)
    if state == "done":
        names, sizes, digests = spool.delta_files(copy)
        return {"state": state, "names": names, "sizes": sizes, "digests": digests}, []
    received_sizes = spool.received_sizes(copy) if state == "arriving" else {}
    return {"state": state, "names": list(received_sizes), "sizes": list(received_sizes.values())}, []


def _put(spool: Spool, copy: str, request: RequestFields, data: list[bytes]) -> Answer:
    """Keep pieces of a copy; with the ``digests`` of all its ``files``, it is whole if they agree."""
    for name, offset, piece in zip(request.get("names") or (), request.get("offsets") or (), data, strict=True):
        spool.put(copy, name, offset, piece)
    if "digests" in request:
        spool.complete(copy, dict(zip(request["files"], request["digests"], strict=True)))
    return _state(spool, copy, {}, [])


def _get(spool: Spool, copy: str, request: RequestFields, _: list[bytes]) -> Answer:
    """Pieces of a delta's files."""
    byte_ranges = zip(request["names"], request["offsets"], request["counts"], strict=True)
    return {}, [spool.read(copy, name, offset, count) for name, offset, count in byte_ranges]


def _again(spool: Spool, copy: str, _: RequestFields, __: list[bytes]) -> Answer:
    spool.again(copy)
    return {}, []


def _forget(spool: Spool, _: str, request: RequestFields, __: list[bytes]) -> Answer:
    for copy in request["copies"]:
        spool.forget(copy)
    return {}, []


HANDLERS: dict[str, Callable[[Spool, str, RequestFields, list[bytes]], Answer]] = {
    "state": _state, "put": _put, "get": _get, "again": _again, "forget": _forget,
}  # fmt: skip


def _handle(message: Message, context: Context) -> Message:
    try:
        request = about(message.content)
        spool = Spool(Path(str(context.node_config["spool"])))
        answered, data = HANDLERS[str(request["kind"])](spool, str(request["copy"]), request, pieces(message.content))
        return Message(message_content(answered, data), reply_to=message)
    except Exception as error:
        # Its text may hold paths of this machine, and what a Flower app raises reaches the other party.
        print(f"mpu: {type(error).__name__}: {str(error)[:500]!r}", file=sys.stderr, flush=True)
    raise RuntimeError("the Flower app cannot answer this request; its own output says why")


app.query()(_handle)
