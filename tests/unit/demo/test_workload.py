"""The demo's data are a pure function of (seed, index), and its causes are where they should be."""

import pytest
import torch

from trimtab.demo import workload

DATA = workload.corpus()


def test_a_batch_is_the_same_whenever_it_is_asked_for() -> None:
    first = workload.training_batch(DATA, "H", 3, 17)
    torch.rand(5)
    again = workload.training_batch(DATA, "H", 3, 17)
    other = workload.training_batch(DATA, "H", 3, 18)
    assert torch.equal(first[0], again[0])
    assert torch.equal(first[1], again[1])
    assert not torch.equal(first[0], other[0])
    assert first[0].shape == (workload.ROWS, workload.CONTEXT)
    assert torch.equal(first[0][:, 1:], first[1][:, :-1])


def test_no_validation_batch_is_one_that_was_trained_on() -> None:
    def drawn(inputs: torch.Tensor) -> bytes:
        return bytes(inputs.flatten().tolist())

    trained = {
        drawn(workload.training_batch(DATA, "H", seed, index)[0])
        for seed in range(3)
        for index in range(320)
    }
    validation = {
        drawn(workload.validation_batch(DATA, index)[0])
        for index in range(workload.VALIDATION_BATCHES)
    }
    assert len(trained) == 3 * 320
    assert len(validation) == workload.VALIDATION_BATCHES
    assert not trained & validation


@pytest.mark.parametrize(("cause", "foreign"), [("H", []), ("E", [250]), ("B", [*range(250, 258)])])
def test_only_the_causes_own_batches_differ_from_a_healthy_run(
    cause: str, foreign: list[int]
) -> None:
    differ = [
        index
        for index in range(245, 262)
        if not torch.equal(
            workload.training_batch(DATA, cause, 0, index)[0],
            workload.training_batch(DATA, "H", 0, index)[0],
        )
    ]
    assert differ == foreign == list(workload.foreign_batches(cause))


def test_the_lr_jumps_in_d_alone() -> None:
    assert [workload.lr_multiple("D", step) for step in (199, 200)] == [1.0, 10.0]
    assert workload.lr_multiple("E", 200) == 1.0


def test_the_model_is_the_one_that_was_measured() -> None:
    torch.manual_seed(0)
    model = workload.ByteGPT()
    assert sum(p.numel() for p in model.parameters()) == 513_536
    assert workload.validation_loss(model, DATA) == pytest.approx(5.55, abs=0.2)  # ln 256
