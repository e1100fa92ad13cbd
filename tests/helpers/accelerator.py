"""A simulated accelerator: a torch device whose kernels compute on the CPU, and on which a tensor that was left on the
CPU is an error, as on a GPU. So is an operation that has no deterministic form there. It counts the bytes that it
holds, and how often a result is waited for.

``echo '[["unlearn", "copy_1", "--device", "sim"]]' | python -m tests.helpers.accelerator`` runs ``mpu`` with that
device, and prints a JSON list with an object for each command. torch allows one such device a process, so tests run it
in a process of its own.
"""

from __future__ import annotations

import gc
import io
import json
import sys
import weakref
from collections import Counter
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

NAME = "sim"
# What may read one device and write another; and indices, which CUDA takes from the CPU, too.
INDEXING = ("aten::index", "aten::index_put_", "aten::_index_put_impl_")
ACROSS = ("aten::copy_", "aten::_copy_from", "aten::_to_copy", *INDEXING)
ALIASES = ("aten::detach", "aten::alias", "aten::lift", "aten::lift_fresh")  # new objects for the same storage
COMPOSED = ("CompositeExplicitAutograd", "CompositeExplicitAutogradNonFunctional")
# For whose results the CPU waits: their values or sizes are read. Copies to the CPU are counted apart.
WAITED_FOR = (
    "aten::_local_scalar_dense", "aten::equal", "aten::is_nonzero", "aten::nonzero", "aten::masked_select",
    "aten::_unique2", "aten::unique_dim", "aten::unique_consecutive",
)  # fmt: skip
# What raises on CUDA under torch.use_deterministic_algorithms, by its documentation; cumsum, too, if it is of floats.
NOT_DETERMINISTIC = (
    "aten::put_", "aten::histc", "aten::kthvalue", "aten::nll_loss2d_forward", "aten::grid_sampler_2d_backward",
    "aten::_ctc_loss_backward", "aten::reflection_pad1d_backward", "aten::replication_pad1d_backward",
    "aten::adaptive_avg_pool2d_backward", "aten::_embedding_bag_dense_backward", "aten::upsample_linear1d_backward",
)  # fmt: skip
_cpu_tensors: dict[int, torch.Tensor] = {}  # storage on the device → its numbers on the CPU
_views: Counter[int] = Counter()  # storage on the CPU → on how many of the device its numbers are


@dataclass
class Meter:
    """Bytes on the device, now and at most, and how often the CPU waited for a result. ``strict``: whether what is not
    deterministic is refused, as in training."""

    allocated: int = 0
    peak: int = 0
    waits: int = 0
    strict: bool = False


METER = Meter()


def keep(tensor: torch.Tensor, numbers: torch.Tensor) -> None:
    """Make ``numbers`` those of ``tensor``, for as long as it or another tensor uses its storage."""
    storage, behind = tensor.untyped_storage(), numbers.untyped_storage()
    key, nbytes = behind._cdata, behind.nbytes()
    _cpu_tensors[storage._cdata] = numbers.detach()
    _views[key] += 1
    if _views[key] == 1:
        METER.allocated += nbytes
        METER.peak = max(METER.peak, METER.allocated)
    # It holds ``numbers``, so that no others get their place.
    weakref.finalize(storage, let_go, storage._cdata, key, nbytes, numbers).atexit = False


def let_go(root: int, key: int, nbytes: int, _: torch.Tensor) -> None:
    _cpu_tensors.pop(root, None)
    _views[key] -= 1
    if not _views[key]:
        METER.allocated -= nbytes
        del _views[key]


def storage_ptr(tensor: torch.Tensor) -> int:
    """The address of the numbers of ``tensor``, on the device or not."""
    storage = tensor.untyped_storage()
    numbers = _cpu_tensors.get(storage._cdata)
    return storage.data_ptr() if numbers is None else numbers.untyped_storage().data_ptr()


class Module:
    """What torch asks of ``torch.sim``."""

    def __init__(self) -> None:
        self.amp = type("amp", (), {})()

    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return True

    def is_bf16_supported(self) -> bool:
        return True

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    def device_count(self) -> int:
        return 1

    def current_device(self) -> int:
        return 0

    def set_device(self, device: object) -> None:
        pass

    def manual_seed_all(self, seed: int) -> None:
        pass

    manual_seed = manual_seed_all

    def _is_in_bad_fork(self) -> bool:
        return False

    def synchronize(self, device: object = None) -> None:
        pass

    def empty_cache(self) -> None:
        pass

    def get_rng_state(self, *_: object) -> torch.Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: torch.Tensor, *_: object) -> None:
        torch.set_rng_state(state)

    get_rng_state_all = get_rng_state
    set_rng_state_all = set_rng_state


def on_cpu(tensor: torch.Tensor) -> torch.Tensor:
    """The numbers of a tensor on the device, as a view."""
    cpu_tensor = _cpu_tensors[tensor.untyped_storage()._cdata]
    return (
        cpu_tensor if cpu_tensor.shape == tensor.shape else cpu_tensor.reshape(tensor.shape)
    )  # torch makes some views by itself


def from_cpu(numbers: torch.Tensor) -> torch.Tensor:
    """A tensor on the device with these numbers. A view of others' numbers stays one; its strides are not told."""
    tensor = torch._C._acc.create_empty_tensor(list(numbers.shape), numbers.dtype)
    keep(tensor, numbers)
    return tensor


def compute(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Any operation: on the CPU, with the numbers of what is on the device."""
    inputs = [x for x in tree_flatten((args, kwargs))[0] if isinstance(x, torch.Tensor)]
    here = [x for x in inputs if x.device.type == NAME]
    elsewhere = [x for x in inputs if x.device.type != NAME and x.ndim]
    name = op.name().split(".")[0]
    if here and elsewhere and name not in ACROSS:
        raise RuntimeError(f"{op.name()}: a tensor of shape {list(elsewhere[0].shape)} was left on the CPU")
    if METER.strict and (name in NOT_DETERMINISTIC or (name == "aten::cumsum" and args[0].is_floating_point())):
        raise RuntimeError(f"{op.name()} does not have a deterministic implementation on CUDA")
    METER.waits += name in WAITED_FOR
    if name == "aten::_copy_from":
        source, target = inputs
        METER.waits += target.device.type != NAME
        (on_cpu(target) if target.device.type == NAME else target).copy_(
            on_cpu(source) if source.device.type == NAME else source
        )
        return target

    if name.startswith("aten::_fused_"):  # reads gradients as they lie in memory
        for x in here:
            if not on_cpu(x).is_contiguous():
                keep(x, on_cpu(x).contiguous())

    def there(x: Any) -> Any:
        if isinstance(x, torch.Tensor) and x.device.type == NAME:
            return on_cpu(x)
        return torch.device("cpu") if isinstance(x, torch.device) and x.type == NAME else x

    requested_device = kwargs.get("device")
    result_on_cpu = (requested_device is not None and torch.device(requested_device).type != NAME) or name in (
        "aten::_local_scalar_dense",
        "aten::equal",
    )
    call = tree_map(there, (args, kwargs))
    if name in ("aten::view", "aten::_unsafe_view"):  # torch does not know the true strides
        results = call[0][0].reshape(call[0][1])
    elif name == "aten::as_strided":
        results = call[0][0].contiguous().as_strided(*call[0][1:])
    else:
        results = op(*call[0], **call[1])
    computed = [x for x in tree_flatten(call)[0] if isinstance(x, torch.Tensor)]
    storages = {x.untyped_storage()._cdata for x in computed}
    by_id = {id(on): x for on, x in zip(computed, inputs, strict=True)}

    def back(x: Any) -> Any:
        if not isinstance(x, torch.Tensor) or result_on_cpu:
            return x
        if id(x) in by_id:
            assert by_id[id(x)].shape == x.shape, f"{op.name()} changed the shape of its output"
            return by_id[id(x)]
        return from_cpu(x if x.untyped_storage()._cdata in storages else x.contiguous())

    return tree_map(back, results)


def register() -> None:
    """Make the device known to torch.

    What torch would compose of other operations is computed at once: it assumes strides that it does not know here.
    """
    _setup_privateuseone_for_python_backend(NAME, backend_module=Module())
    torch.inference_mode = torch.no_grad  # its tensors cannot be made from Python
    _libraries.append(torch.library.Library("_", "IMPL"))
    _libraries[0].fallback(compute, "PrivateUse1")
    _libraries.append(torch.library.Library("aten", "IMPL"))
    for name in torch._C._dispatch_get_all_op_names():
        has = partial(torch._C._dispatch_has_kernel_for_dispatch_key, name)
        if name.startswith("aten::") and name not in ALIASES and any(map(has, COMPOSED)):
            packet, _, overload = name.removeprefix("aten::").partition(".")
            op = getattr(getattr(torch.ops.aten, packet), overload or "default")
            _libraries[1].impl(name.removeprefix("aten::"), partial(compute, op), "PrivateUse1")


_libraries: list[torch.library.Library] = []


def run_all(commands: list[list[str]]) -> list[dict[str, Any]]:
    """Run commands of ``mpu`` one after the other. For each: whether it ``failed`` and what it then said, bytes on the
    device at its ``peak`` and ``left`` when it was done, and how often it ``waits``."""
    from transformers import pytorch_utils

    from mpu_cli.cli.main import main
    from mpu_cli.model import load as loading

    loading.WORTH_COLLECTING = 0  # as with a large model
    # A checkpoint writes shared weights once; by their own pointers, which are 0, all would be shared.
    pytorch_utils.storage_ptr = storage_ptr  # type: ignore[assignment]
    ran = []
    for arguments in commands:
        said = io.StringIO()
        METER.peak = before = METER.allocated
        METER.waits, METER.strict = 0, arguments[0] in ("unlearn", "finetune")
        with redirect_stderr(said), redirect_stdout(said):
            try:
                main(["--debug", *arguments])
                status: Any = 0
            except SystemExit as ended:
                status = ended.code
        remaining_bytes = METER.allocated - before
        gc.collect()  # or what one command leaves would be freed during another, whose figures it would spoil
        gc.freeze()  # what is left is modules, among which each training would look for garbage
        ran.append({
            "command": " ".join(arguments), "failed": said.getvalue() if status else "", "left": remaining_bytes,
            "peak": METER.peak - before, "waits": METER.waits,
        })  # fmt: skip
    return ran


if __name__ == "__main__":  # commands as JSON on standard input
    register()
    print(json.dumps(run_all(json.load(sys.stdin))))
