"""Every collective of the agent.  Called by the guard, on all ranks in one order."""

import torch
import torch.distributed as dist
from torch import Tensor

LEADER = 0
"""The rank that talks to the controller."""


class Ranks:
    """The processes of the job, on a gloo group of their own; a single process needs none."""

    def __init__(self) -> None:
        together = dist.is_available() and dist.is_initialized()
        self.size = dist.get_world_size() if together else 1
        self.rank = dist.get_rank() if together else LEADER
        # A group of its own: the job's collectives and ours must not be taken for one another.
        self._group = dist.new_group(backend="gloo") if self.size > 1 else None

    @property
    def leading(self) -> bool:
        """Whether this process speaks for the job."""
        return self.rank == LEADER

    def leave(self) -> None:
        """Let go of the group: one that outlives `destroy_process_group` aborts at exit."""
        self._group = None

    def total(self, values: Tensor) -> Tensor:
        """Return the sum of a float64 vector over all ranks, in place."""
        if self._group is not None:
            dist.all_reduce(values, group=self._group)
        return values

    def least(self, values: Tensor) -> Tensor:
        """Return the least of each element over all ranks, in place."""
        if self._group is not None:
            dist.all_reduce(values, op=dist.ReduceOp.MIN, group=self._group)
        return values

    def gather(self, payload: bytes) -> list[bytes]:
        """Return the payload of every rank, all of one length, in the order of the ranks."""
        if self._group is None:
            return [payload]
        mine = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
        theirs = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(theirs, mine, group=self._group)
        return [bytes(one.tolist()) for one in theirs]

    def share(self, payload: bytes, note: int) -> tuple[bytes, int]:
        """Return the leader's payload and note on every rank; one broadcast if it is empty."""
        return self._share_from(LEADER, payload, note)

    def share_from(self, rank: int, payload: bytes) -> bytes:
        """Return the payload of one rank on every rank."""
        return self._share_from(rank, payload, 0)[0]

    def _share_from(self, rank: int, payload: bytes, note: int) -> tuple[bytes, int]:
        if self._group is None:
            return payload, note
        head = torch.tensor([len(payload), note], dtype=torch.int64)
        dist.broadcast(head, rank, group=self._group)
        size, note = (int(number) for number in head)
        if size == 0:
            return b"", note
        body = torch.empty(size, dtype=torch.uint8)
        if self.rank == rank:
            body = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
        dist.broadcast(body, rank, group=self._group)
        return bytes(body.tolist()), note

    def agree(self, *, ready: bool) -> bool:
        """Return whether every rank is ready."""
        return bool(self.least(torch.tensor([int(ready)])).item())
