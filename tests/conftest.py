"""What several tests share: one controller for all that do not break it."""

from collections.abc import Iterator

import pytest
from serving import Served

POLICY = """
version: 1
defaults: {after: 0}
rules:
  - name: bad-batch
    when: loss > 50 * median(loss, 16)
    do: skip_batch
  - name: lr-jump
    when: lr > 3 * median(lr, 16)
    do:
      - skip_batch
      - scale_lr:
          by: median(lr, 16) / lr
  - name: lr-drop
    when: lr < 0.5 * median(lr, 16)
    for: 3 steps
    do:
      rollback: {skip: 5 batches, soak: 2 steps}
"""


@pytest.fixture(scope="session")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A controller that is up."""
    controller = Served(tmp_path_factory.mktemp("served"), POLICY)
    yield controller
    assert controller.stop() == 0


@pytest.fixture
def mortal(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A controller of this test's own, to be killed."""
    controller = Served(tmp_path_factory.mktemp("mortal"), POLICY)
    yield controller
    if controller.process.poll() is None:
        controller.stop()
