"""The data position moves back with a rollback, whatever hands out the batches."""

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from trimtab.agent.data import DataPosition

# torchdata 0.11 names what torch 2.13 has deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")


def shuffled(workers: int = 0) -> Any:
    generator = torch.Generator().manual_seed(5)
    return StatefulDataLoader(
        list(range(20)), batch_size=4, shuffle=True, generator=generator, num_workers=workers
    )


def taken(position: DataPosition, batches: int) -> list[list[int]]:
    return [position.take().tolist() for _ in range(batches)]


@pytest.mark.parametrize("workers", [0, 1])
def test_a_loader_with_state_hands_out_the_same_batches_again(workers: int) -> None:
    position = DataPosition(shuffled(workers))
    assert position.movable
    taken(position, 2)
    here = position.now()
    first = taken(position, 6)  # into the next epoch, which is shuffled anew
    assert first[:3] != first[3:]
    position.move(here, skip=0)
    assert taken(position, 6) == first
    assert position.index == 8


def test_batches_are_left_out_by_their_absolute_id() -> None:
    position = DataPosition(shuffled())
    taken(position, 2)
    here = position.now()
    first = taken(position, 5)
    position.move(here, skip=2)
    assert position.index == 4
    assert taken(position, 3) == first[2:]


def test_a_point_can_be_returned_to_more_than_once() -> None:
    position = DataPosition(shuffled())
    taken(position, 3)
    here = position.now()
    runs = []
    for _ in range(3):
        position.move(here, skip=1)
        runs.append(taken(position, 3))
    assert runs[0] == runs[1] == runs[2]


@pytest.mark.parametrize("loader", [lambda index: [index], [[0], [1], [2], [3]]])
def test_batches_by_index_need_no_state(loader: Any) -> None:
    position = DataPosition(loader)
    position.take()
    here = position.now()
    position.take()
    position.move(here, skip=1)
    assert position.take() == [2]


def test_a_plain_loader_cannot_be_moved() -> None:
    assert not DataPosition(DataLoader([1, 2, 3])).movable
