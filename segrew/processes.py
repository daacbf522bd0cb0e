"""The processes of one run under `accelerate launch` or `torchrun`.

Each process holds every model and all of the data, works on its share of the rows, and joins what it found with what
the others found, in the order of the rows: from there on all of them know what one process would. The first one
writes. Without a launch there is one process: its share is everything, and nothing here waits.
"""

import atexit
import os
from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass, replace
from datetime import timedelta
from typing import Any, TypeVar

import torch
from accelerate import PartialState
from accelerate.utils import broadcast_object_list, gather_object
from torch import Tensor, nn
from torch.nn.functional import pad

T = TypeVar("T")
# How long a process waits for the others: a reward function or a judge may be slow on one of them.
PATIENCE = timedelta(hours=2)


def state() -> PartialState:
    """Join the other processes, the first time that it is asked for.

    Raises:
        ValueError: several processes were asked for, and one was started.
    """
    several = ("RANK", "WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE")
    asked = os.environ.get("ACCELERATE_USE_CPU") == "True" and "MASTER_PORT" in os.environ
    if asked and not any(name in os.environ for name in several):
        raise ValueError(
            "`accelerate launch --cpu` starts one process, whatever --num_processes says. Start several with "
            "`accelerate launch --multi_gpu --num_processes N` (without a GPU they run on the CPU) or with "
            "`torchrun --standalone --nproc_per_node N`."
        )
    return PartialState(cpu=torch.accelerator.current_accelerator() is None, timeout=PATIENCE)


@atexit.register
def leave() -> None:
    """Part from the others at the end: a process that does not is now and then aborted by a thread still listening."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def count() -> int:
    """How many processes there are."""
    return state().num_processes


def rank() -> int:
    """The number of this one, from 0."""
    return state().process_index


def is_main() -> bool:
    """Whether this is the process that writes and prints."""
    return rank() == 0


def label(text: str) -> str:
    """The label of a progress bar where it is to be shown, and none in the other processes."""
    return text if is_main() else ""


def refuse_sharding(command: str) -> None:
    """Refuse a launch that would divide weights over processes where a command divides rows only.

    Raises:
        ValueError: it is one for FSDP or DeepSpeed.
    """
    for name in ("FSDP", "DEEPSPEED"):
        if os.environ.get(f"ACCELERATE_USE_{name}", "false").lower() == "true":
            raise ValueError(
                f"`segrew {command}` divides rows over processes, not weights: {name} is not supported. Launch it with "
                "configs/accelerate/multi_gpu.yaml, with --use_peft true where one accelerator is too small."
            )


def wait() -> None:
    """Wait until every process is here."""
    state().wait_for_everyone()


def share(items: Sequence[T], multiple: int = 1) -> list[T]:
    """This process's run of the items, in their order: the first process has some where there are any.

    Args:
        multiple: cut only between so many of them, such as the answers to one prompt.
    """
    groups = -(-len(items) // multiple)
    first, last = (-(-groups * k // count()) * multiple for k in (rank(), rank() + 1))
    return list(items[first:last])


def deal(items: Sequence[T]) -> list[T]:
    """Every n-th item, as cards are dealt: balanced where the items come longest first."""
    return list(items[rank() :: count()])


def gather(value: T) -> list[T]:
    """The values of all processes, in their order, on all of them. Tensors come on the CPU."""
    return [value] if count() == 1 else gather_object([moved(value, torch.device("cpu"))])


def gather_list(items: list[T]) -> list[T]:
    """The items of all processes, one after the other."""
    return [item for part in gather(items) for item in part]


def from_main(value: T) -> T:
    """The first process's value."""
    return value if count() == 1 else broadcast_object_list([value])[0]


def joined(own: T | None, device: torch.device) -> T:
    """The records of all processes as one, on all of them: their rows one after the other.

    Tensors have a row in their first dimension and are padded with 0 in the others; a list has an item for each row;
    tuples, dicts and dataclasses are joined member by member, unless they say how by a `joined` of their own.
    What else is in them is the same everywhere.

    Args:
        own: None of a process without rows. device: of what is returned.
    """
    if count() == 1:
        assert own is not None
        return own
    return moved(_together([part for part in gather(own) if part is not None], _joined), device)


def moved(record: T, device: torch.device) -> T:
    """Move every tensor of a record; what lists hold stays."""
    return _together([record], lambda parts: parts[0].to(device) if hasattr(parts[0], "to") else parts[0])


def _together(parts: list[Any], leaf: Callable[[list[Any]], Any]) -> Any:
    """A record whose members are what `leaf` makes of the same member of all parts."""
    first = parts[0]
    if isinstance(first, tuple):
        return tuple(_together(list(members), leaf) for members in zip(*parts, strict=True))
    if isinstance(first, dict):
        return {key: _together([part[key] for part in parts], leaf) for key in first}
    if is_dataclass(first) and not isinstance(first, type) and not hasattr(first, "joined"):
        names = [field.name for field in fields(first)]
        return replace(first, **{name: _together([getattr(part, name) for part in parts], leaf) for name in names})
    return leaf(parts)


def _joined(parts: list[Any]) -> Any:
    first = parts[0]
    if hasattr(first, "joined"):
        return first.joined(parts)
    if isinstance(first, Tensor):
        return joined_rows(parts)
    if isinstance(first, list):
        return [item for part in parts for item in part]
    if any(part != first for part in parts):
        raise ValueError(f"processes differ where they should agree: {', '.join(map(repr, parts))}.")
    return first


def joined_rows(parts: Sequence[Tensor]) -> Tensor:
    """Lay tensors one after the other along their first dimension, each as wide as the widest."""
    sizes = [max(part.shape[d] for part in parts) for d in range(1, parts[0].dim())]
    room = [[n for d in range(part.dim() - 1, 0, -1) for n in (0, sizes[d - 1] - part.shape[d])] for part in parts]
    return torch.cat([pad(part, by) for part, by in zip(parts, room, strict=True)])


def reduce(values: Tensor, how: str = "sum") -> Tensor:
    """Sum, or `max`, of each value over processes."""
    if count() > 1:
        operation = torch.distributed.ReduceOp.MAX if how == "max" else torch.distributed.ReduceOp.SUM
        torch.distributed.all_reduce(values, operation)
    return values


def sum_gradients(parameters: Sequence[nn.Parameter]) -> None:
    """Make each gradient the sum of those of all processes; a weight that has none anywhere keeps none."""
    if count() == 1:
        return
    present = torch.tensor([float(p.grad is not None) for p in parameters], device=parameters[0].device)
    for parameter, there in zip(parameters, reduce(present, "max").tolist(), strict=True):
        if there:
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            torch.distributed.all_reduce(parameter.grad)
