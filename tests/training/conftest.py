import pytest
from toys import build_toy

from kerneq.run.config import parse
from kerneq.training import train


@pytest.fixture
def small():
    """Three epochs of the toy on the embedded digits, with any changes."""

    def make(*overrides: str):
        return parse("", ["training.epochs=3", "training.batch_size=128", "optimizer.lr=0.1", *overrides])

    return make


@pytest.fixture
def run(tmp_path, small):
    """Train the toy in a folder of its own; returns the rows of its metrics."""

    def go(*overrides: str, folder="run", **keywords):
        return train(small(*overrides), tmp_path / folder, **{"build": build_toy, **keywords})

    return go
