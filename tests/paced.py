"""A job on a real controller, one step at a turn of the test's own pace."""

from collections.abc import Iterator

from jobs import batch_of, loss_of, small_run

from trimtab.agent import Guard, GuardConfig

BAD_AT, JUMP_AT = 60, 90


def job_of(address: str, run: str) -> tuple[object, object, Guard]:
    model, optimizer, _, guard = small_run(
        GuardConfig(address=address, run=run, restore_every_steps=10),
        loader=lambda index: batch_of(index, scale=20.0 if index == BAD_AT else 1.0),
    )
    return model, optimizer, guard


def train(job: tuple[object, object, Guard], steps: int, start: int = 0) -> Iterator[int]:
    """Train one step a turn, each as long as a real one: the table of the last one is there."""
    model, optimizer, guard = job
    for step, batch in guard.steps(steps, start):
        if step == JUMP_AT and batch is not None:
            optimizer.param_groups[0]["lr"] *= 10  # type: ignore[attr-defined]
        optimizer.zero_grad()  # type: ignore[attr-defined]
        loss = loss_of(model, batch)  # type: ignore[arg-type]
        loss.backward()
        guard.observe(loss)
        optimizer.step()  # type: ignore[attr-defined]
        yield step


def fresh(guard: Guard) -> bool:
    """Return whether the newest table is based on the last step."""
    assert guard._channel is not None
    table = guard._channel.table
    return table is not None and table.seq == guard._seq - 1
