"""How the entries of the table of metrics are accumulated; that one entry is enough is shown by test_recipes.py."""

import dataclasses

import pytest
import torch
from toys import solution

from kerneq.lab.training.metrics import Accumulator


def test_the_accumulator_gives_means_over_images_and_over_solves():
    accumulator = Accumulator(torch.device("cpu"))
    logits = torch.eye(4)
    accumulator.add(torch.tensor(2.0), logits, torch.tensor([0, 1, 2, 0]), {"a": solution(4), "b": solution(4)})
    accumulator.add(
        torch.tensor(1.0),
        logits[:2],
        torch.tensor([[0.0, 0.9, 0, 0.1], [0, 1, 0, 0]]),
        {"a": solution(2), "b": solution(2)},
    )
    got = accumulator.read(accumulator.sums)
    means = {"loss": 10 / 6, "accuracy": 4 / 6, "steps": 4, "residual": 1e-3, "unconverged": 4 / 12}
    assert got == {"images": 6, "backward_unconverged": None, **{k: pytest.approx(mean) for k, mean in means.items()}}


def test_backward_solves_are_counted_where_there_were_any():
    accumulator = Accumulator(torch.device("cpu"))
    solved = {name: dataclasses.replace(solution(4), backward=[]) for name in ("a", "b")}
    solved["b"].backward.append(solution(4))  # nothing led back through a
    accumulator.add(torch.tensor(2.0), torch.eye(4), torch.tensor([0, 1, 2, 0]), solved)
    assert accumulator.read(accumulator.sums)["backward_unconverged"] == 0.25


def test_a_model_without_an_equilibrium_has_no_solver_numbers():
    accumulator = Accumulator(torch.device("cpu"))
    accumulator.add(torch.tensor(1.0), torch.eye(2), torch.tensor([0, 1]), {})
    got = accumulator.read(accumulator.sums)
    assert got["loss"] == 1 and (got["steps"], got["residual"], got["unconverged"]) == (None, None, None)


def test_sums_go_on_where_they_were_saved_also_by_a_version_that_had_fewer():
    saved, restored = (Accumulator(torch.device("cpu")) for _ in range(2))
    saved.add(torch.tensor(2.0), torch.eye(4), torch.tensor([0, 1, 2, 0]), {"a": solution(4)})
    restored.restore(saved.sums, saved.entries)
    assert restored.read(restored.sums) == saved.read(saved.sums)
    entries = ("images", "loss", "accuracy", "solves", "steps", "residual", "unconverged")
    restored.restore(torch.tensor([4.0, 8.0, 3.0, 4.0, 16.0, 4e-3, 1.0]), entries)
    got, expected = (dict(one.read(one.sums)) for one in (restored, saved))
    assert got.pop("backward_unconverged") is None and expected.pop("backward_unconverged") is None
    assert got == pytest.approx(expected, rel=1e-6)


def test_a_metric_that_saved_sums_do_not_have_is_not_measured_until_the_next_epoch():
    accumulator = Accumulator(torch.device("cpu"))
    accumulator.restore(torch.tensor([4.0, 8.0, 4.0]), ("images", "loss", "solves"))
    assert accumulator.read(accumulator.sums)["loss"] == 2 and accumulator.read(accumulator.sums)["accuracy"] is None
    accumulator.reset()
    accumulator.add(torch.tensor(1.0), torch.eye(2), torch.tensor([0, 1]), {})
    assert accumulator.read(accumulator.sums)["accuracy"] == 1
