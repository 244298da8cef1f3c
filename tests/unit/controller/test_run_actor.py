"""A run's actor without Ray: what it brings back from the journal."""

import asyncio
from pathlib import Path

from drive import SKIP_LOUD_LOSS

from trimtab.controller.engine.model import Layout, Observation
from trimtab.controller.run_actor import RunActor


def test_the_past_is_replayed_under_the_policy_of_then(tmp_path: Path) -> None:
    store = f"sqlite:///{tmp_path}/j.db"

    async def live() -> RunActor:
        actor = RunActor("r", ("p.yaml", SKIP_LOUD_LOSS), store, "127.0.0.1")
        await actor.register("session", 1, "AdamW", Layout(signals=("loss",)))
        for at in range(60):
            loss = 9.0 if at == 50 else 2.0 + at % 3 / 100
            actor._run.move(Observation(seq=at, step=at, values={"loss": loss}))
        assert await actor._write()  # and then it dies: no snapshot
        assert actor._server is not None
        assert actor._flusher is not None
        actor._flusher.cancel()
        await actor._server.stop(None)
        return actor

    before = asyncio.run(live())._run.state
    after = RunActor(
        "r", ("p.yaml", SKIP_LOUD_LOSS + "    mode: observe\n"), store, "127.0.0.1"
    )._run.state
    assert before.counts["decision", "loud-loss", "skip_batch", "act"] == 1
    assert after.counts == before.counts
    assert after.policy.version != before.policy.version


def test_ranks_that_register_together_are_one_epoch(tmp_path: Path) -> None:
    async def live() -> list[int]:
        store = f"sqlite:///{tmp_path}/j.db"
        actor = RunActor("r", ("p.yaml", SKIP_LOUD_LOSS), store, "127.0.0.1")
        layout = Layout(signals=("loss",))
        ranks = [actor.register("session", 8, "AdamW", layout) for _ in range(8)]
        answers = await asyncio.gather(*ranks)
        await actor.stop()
        return [epoch for epoch, _, _ in answers]

    assert asyncio.run(live()) == [0] * 8
