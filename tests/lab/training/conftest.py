import pytest
from toys import StopAt, build_toy, metrics, resumptions, same_state

from kerneq.lab.run import Stopped
from kerneq.lab.run.config import parse
from kerneq.lab.training import train


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


@pytest.fixture
def stop_and_resume(tmp_path, run):
    """Train once through, and once stopped in the second epoch and resumed: the same run; returns its rows."""

    def go(*overrides: str, **keywords):
        rows = run(*overrides, folder="whole", **keywords)
        with pytest.raises(Stopped, match="Stopped after step .*--resume"):
            run(*overrides, folder="stopped", loggers=[StopAt(1)], **keywords)
        run(*overrides, folder="stopped", resume=True, **keywords)
        assert resumptions(tmp_path / "stopped") == [rows[0]["step"] + 1]  # begun anew, it would be the same run too
        assert same_state(tmp_path / "whole", tmp_path / "stopped")
        assert metrics(tmp_path / "whole") == metrics(tmp_path / "stopped")
        return rows

    return go
