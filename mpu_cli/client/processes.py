"""Training in several processes: what only the first computes, because the weights may be whole only there."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from accelerate import PartialState
from accelerate.utils import broadcast_object_list

Value = TypeVar("Value")


def from_first(make: Callable[[], Value]) -> Value:
    """What ``make`` returns in the first process, given to all. Tensors in it have to be on the CPU."""
    state = PartialState()
    if state.num_processes == 1:
        return make()
    object_list = [make() if state.is_main_process else None]
    broadcast_object_list(object_list)
    return object_list[0]  # type: ignore[return-value] # of the first process
