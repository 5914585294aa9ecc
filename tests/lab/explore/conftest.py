"""A run to watch, and the server of its page."""

import threading
from collections.abc import Iterator

import pytest
from helpers import trained

from kerneq.lab.evaluate import TrainedRun
from kerneq.lab.explore import Server


@pytest.fixture(scope="session")
def run(tmp_path_factory) -> TrainedRun:
    """Two branches after an epoch on the embedded digits."""
    settings = ["model.name=geq-tiny", "training.ema=0.9"]
    return TrainedRun.open(trained(tmp_path_factory.mktemp("explore") / "tiny", *settings), device="cpu")


@pytest.fixture
def server(run) -> Iterator[Server]:
    with Server(run) as server:
        thread = threading.Thread(target=server.run)
        thread.start()
        yield server
        server.tasks.put(None)
        thread.join()
