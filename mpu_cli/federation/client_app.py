"""The data owner's courier: a Flower ClientApp that carries files between the SuperLink and the spool.

It needs the spool's folder and nothing else, ``--node-config 'spool="/path"'``. Records and training belong to ``mpu
watch``, which runs apart from it. Requests may come twice: Flower does not deliver again what a stopped node received.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from mpu_cli.federation.messages import Value, about, packed, pieces
from mpu_cli.federation.spool import Spool

Asked = dict[str, Value]
Answer = tuple[dict[str, Value], list[bytes]]

app = ClientApp()


def _held(spool: Spool, copy: str, _: Asked, __: list[bytes]) -> Answer:
    sizes = spool.held(copy)
    return {"names": list(sizes), "sizes": list(sizes.values())}, []


def _put(spool: Spool, copy: str, asked: Asked, data: list[bytes]) -> Answer:
    for name, offset, piece in zip(asked["names"], asked["offsets"], data, strict=True):
        spool.put(copy, name, offset, piece)
    return _held(spool, copy, asked, data)


def _complete(spool: Spool, copy: str, asked: Asked, _: list[bytes]) -> Answer:
    return {"wrong": spool.complete(copy, dict(zip(asked["names"], asked["digests"], strict=True)))}, []


def _state(spool: Spool, copy: str, _: Asked, __: list[bytes]) -> Answer:
    return {"state": spool.state(copy)}, []


def _made(spool: Spool, copy: str, _: Asked, __: list[bytes]) -> Answer:
    digests = spool.made(copy)
    return {"names": list(digests), "digests": list(digests.values())}, []


def _get(spool: Spool, copy: str, asked: Asked, _: list[bytes]) -> Answer:
    return {}, [spool.read(copy, asked["name"], asked["offset"], asked["count"])]


def _again(spool: Spool, copy: str, _: Asked, __: list[bytes]) -> Answer:
    spool.again(copy)
    return {}, []


def _forget(spool: Spool, copy: str, _: Asked, __: list[bytes]) -> Answer:
    spool.forget(copy)
    return {}, []


HANDLERS: dict[str, Callable[[Spool, str, Asked, list[bytes]], Answer]] = {
    "held": _held, "put": _put, "complete": _complete, "state": _state, "made": _made, "get": _get, "again": _again,
    "forget": _forget,
}  # fmt: skip


def _handle(message: Message, context: Context) -> Message:
    try:
        asked = about(message.content)
        spool = Spool(Path(str(context.node_config["spool"])))
        answered, data = HANDLERS[str(asked["kind"])](spool, str(asked["copy"]), asked, pieces(message.content))
        return Message(packed(answered, data), reply_to=message)
    except Exception as error:
        # Its text may hold paths of this machine, and what a courier raises reaches the other party.
        print(f"mpu: {type(error).__name__}: {str(error)[:500]!r}", file=sys.stderr, flush=True)
    raise RuntimeError("the courier cannot answer this request; its own output says why")


app.query()(_handle)
