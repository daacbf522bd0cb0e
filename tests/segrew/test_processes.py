"""Shares and their joining, for processes that are made up; tests/policy has real ones."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from segrew import cli, processes
from segrew.segmentation import Segmentation


@dataclass(frozen=True)
class Found:
    names: list[str]
    rewards: Tensor
    bad: Tensor
    units: dict[str, Segmentation]
    weights: tuple[float, ...] = (1.0,)
    nothing: None = None


def found(names: list[str], ids: list[list[int]]) -> Found:
    units = Segmentation(torch.tensor(ids))
    rewards = torch.arange(float(units.ids.numel())).view(units.ids.shape) + 1
    return Found(names, rewards, torch.ones(len(names), dtype=torch.bool), {"rule": units})


@pytest.fixture
def three(monkeypatch):
    """Act as one of three processes."""

    def act(rank: int) -> None:
        monkeypatch.setattr(processes, "rank", lambda: rank)

    monkeypatch.setattr(processes, "count", lambda: 3)
    return act


@pytest.mark.parametrize("count", [0, 1, 2, 3, 7, 12])
@pytest.mark.parametrize("multiple", [1, 4])
def test_shares_are_even_whole_groups_in_order_and_the_first_has_some(three, count, multiple):
    items, shares, dealt = list(range(count * multiple)), [], []
    for rank in range(3):
        three(rank)
        shares.append(processes.share(items, multiple))
        dealt += processes.deal(items)
    assert [item for own in shares for item in own] == items == sorted(dealt)
    assert all(len(own) % multiple == 0 for own in shares) and bool(shares[0]) == bool(items)
    assert max(map(len, shares)) - min(map(len, shares)) <= multiple


def test_records_are_joined_row_after_row(three, monkeypatch):
    parts = [found(["a", "b"], [[0, 0, 1], [0, -1, -1]]), None, found(["c"], [[0, 1, 2, 3]])]
    monkeypatch.setattr(processes, "gather", lambda _: parts)
    whole = processes.joined(parts[0], torch.device("cpu"))
    assert whole.names == ["a", "b", "c"] and whole.weights == (1.0,) and whole.nothing is None
    assert whole.rewards.tolist() == [[1, 2, 3, 0], [4, 5, 6, 0], [1, 2, 3, 4]]
    assert whole.bad.dtype == torch.bool and whole.bad.shape == (3,)
    units = whole.units["rule"]
    assert units.ids.tolist() == [[0, 0, 1, -1], [0, -1, -1, -1], [0, 1, 2, 3]]
    assert units.counts.tolist() == [2, 1, 4] and units.size == 4


def test_settings_that_differ_between_processes_are_refused(three, monkeypatch):
    parts = [(torch.ones(1), "even"), (torch.ones(1), "last")]
    monkeypatch.setattr(processes, "gather", lambda _: parts)
    with pytest.raises(ValueError, match="differ where they should agree: 'even', 'last'"):
        processes.joined(parts[0], torch.device("cpu"))


def test_one_process_keeps_what_it_has():
    own = found(["a"], [[0]])
    assert processes.joined(own, torch.device("cpu")) is own
    assert processes.share("abc") == processes.deal("abc") == ["a", "b", "c"] and processes.is_main()
    assert processes.gather(own) == [own] and processes.from_main(own) is own
    weight = torch.nn.Parameter(torch.ones(2))
    processes.sum_gradients([weight])
    assert weight.grad is None and processes.reduce(torch.tensor(3.0)) == 3


def test_a_launch_that_starts_one_process_instead_of_several_is_refused(monkeypatch):
    """What `accelerate launch --cpu --num_processes 2` sets for the only process that it starts."""
    monkeypatch.setenv("ACCELERATE_USE_CPU", "True")
    monkeypatch.setenv("MASTER_PORT", "29500")
    with pytest.raises(ValueError, match=r"starts one process.*torchrun"):
        processes.state()
    monkeypatch.setenv("RANK", "0")
    assert processes.count() == 1


@pytest.mark.parametrize("name", ["FSDP", "DEEPSPEED"])
def test_launches_that_divide_weights_are_refused(monkeypatch, name):
    processes.refuse_sharding("ppo")
    monkeypatch.setenv(f"ACCELERATE_USE_{name}", "true")
    with pytest.raises(ValueError, match=f"`segrew ppo` divides rows .* {name} is not supported"):
        processes.refuse_sharding("ppo")


def test_commands_that_do_not_divide_their_rows_run_once_or_not_at_all(monkeypatch, capsys):
    assert set(cli.DIVIDED) < set(cli.COMMANDS)
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert cli.main(["report", "--run_dirs", "x"]) == 2
    assert "runs in one process" in capsys.readouterr().err
