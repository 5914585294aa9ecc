import copy
import functools

import pytest
import torch
from torch import nn
from toys import Toy, build_toy, solution

from kerneq.run.config import Optimizer
from kerneq.training import Folder, checkpoint, train
from kerneq.training.average import Average
from kerneq.training.data import prepare
from kerneq.training.meter import Meter
from kerneq.training.optimizer import momentum, sgd
from kerneq.training.process import Process

without_dropout = functools.partial(build_toy, dropout=0.0)


def test_the_toy_learns_the_digits(run):
    rows = run("training.epochs=10", "training.ema=0.9", build=without_dropout)
    assert rows[-1]["train"]["loss"] < rows[0]["train"]["loss"] / 2
    assert rows[-1]["validation"]["accuracy"] > 0.85


def test_a_step_is_that_of_plain_sgd_on_the_same_batch(tmp_path, small, run):
    config = small(
        "training.epochs=1",
        "training.batch_size=1293",
        "optimizer.nesterov=false",
    )
    train(config, tmp_path / "run", build=without_dropout)
    got, _ = checkpoint.load(Folder(tmp_path / "run").checkpoint("last"))
    torch.manual_seed(0)
    images, batches, _ = prepare(config, Process(0, 1, torch.device("cpu")))
    model = without_dropout(config, images)
    [(x, target)] = batches.epoch(0)
    nn.functional.cross_entropy(model(x), target).backward()
    for name, parameter in model.named_parameters():
        decay = 5e-4 if parameter.dim() > 1 else 0.0
        want = parameter - 0.1 * (parameter.grad + decay * parameter)
        torch.testing.assert_close(got[f"model.{name}"], want)


@pytest.mark.parametrize("decay_all", [False, True])
def test_weight_decay_spares_norms_and_biases_unless_asked(decay_all):
    model = Toy(1, 10)
    optimizer = sgd(model, Optimizer(decay_all=decay_all, weight_decay=0.1))
    decays = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    assert len(decays) == len(list(model.parameters()))
    for name, parameter in model.named_parameters():
        spared = not decay_all and (name.startswith("norm") or name.endswith("bias"))
        assert decays[id(parameter)] == (0.0 if spared else 0.1), name
    assert momentum(model, optimizer) == {}


def test_the_average_follows_its_formula_and_copies_whole_numbers():
    model = Toy(1, 10).double()
    average = Average(model, decay=0.5)
    want = copy.deepcopy(average.values)
    for step in range(4):
        with torch.no_grad():
            for tensor in model.state_dict().values():
                tensor.add_(1)
        average.update(model, step)
        delta = min(0.5, (1 + step) / (10 + step))
        for name, value in model.state_dict().items():
            mean = delta * want[name] + (1 - delta) * value
            want[name] = mean if value.is_floating_point() else value.clone()
    for name, value in average.values.items():
        torch.testing.assert_close(value, want[name], rtol=1e-12, atol=1e-12)


def test_the_average_is_in_the_model_for_a_while_and_leaves_no_trace():
    model = Toy(1, 10)
    average = Average(model, decay=0.9)
    own = {
        name: tensor.add_(0.1 if tensor.is_floating_point() else 1).clone()
        for name, tensor in model.state_dict().items()
    }
    with average.applied(model):
        assert all(torch.equal(t, average.values[n]) for n, t in model.state_dict().items())
    assert all(torch.equal(t, own[n]) for n, t in model.state_dict().items())


def test_the_meter_gives_means_over_images_and_over_solves():
    meter = Meter(torch.device("cpu"))
    logits = torch.eye(4)
    meter.add(torch.tensor(2.0), logits, torch.tensor([0, 1, 2, 0]), {"a": solution(4), "b": solution(4)})
    meter.add(
        torch.tensor(1.0),
        logits[:2],
        torch.tensor([[0.0, 0.9, 0, 0.1], [0, 1, 0, 0]]),
        {"a": solution(2), "b": solution(2)},
    )
    got = meter.read()
    assert (got.images, got.loss, got.accuracy) == (6, pytest.approx(10 / 6), pytest.approx(4 / 6))
    assert (got.steps, got.residual, got.unconverged) == (4, pytest.approx(1e-3), pytest.approx(4 / 12))


def test_a_model_without_an_equilibrium_has_no_solver_numbers():
    meter = Meter(torch.device("cpu"))
    meter.add(torch.tensor(1.0), torch.eye(2), torch.tensor([0, 1]), {})
    assert (meter.read().steps, meter.read().residual, meter.read().unconverged) == (None, None, None)


def test_the_best_weights_are_the_averaged_ones_that_were_validated(tmp_path, run):
    rows = run("training.ema=0.99", "training.epochs=4")
    _, facts = checkpoint.load(Folder(tmp_path / "run").checkpoint("best"))
    accuracies = [row["validation"]["accuracy"] for row in rows]
    assert facts["best"] == max(accuracies)
    assert facts["epoch"] == accuracies.index(max(accuracies)) + 1
    run("training.ema=0.99", "training.epochs=1", folder="short")
    best, last = (checkpoint.load(Folder(tmp_path / "short").checkpoint(w))[0] for w in ("best", "last"))
    assert all(torch.equal(best[f"model.{n}"], last[f"average.{n}"]) for n in Toy(1, 10).state_dict())


def test_with_nothing_held_out_every_image_trains_and_the_last_weights_are_the_best(tmp_path, run):
    rows = run("data.validation=0", "training.epochs=2", "training.batch_size=100")
    assert [row["validation"] for row in rows] == [None, None]
    assert rows[0]["train"]["images"] == 1400
    assert checkpoint.load(Folder(tmp_path / "run").checkpoint("best"))[1]["epoch"] == 2


def test_bfloat16_channels_last_compiled_and_clipped_training_runs(run):
    built = []

    def build(config, images):
        built.append(build_toy(config, images))
        return built[-1]

    settings = (
        "training.amp=true",
        "training.channels_last=true",
        "training.compile=true",
        "training.clip=0.5",
    )
    rows = run(*settings, "training.label_smoothing=0.1", "training.epochs=2", build=build)
    assert rows[-1]["train"]["loss"] < rows[0]["train"]["loss"]
    assert built[0].compiled
    assert built[0].stem.weight.is_contiguous(memory_format=torch.channels_last)


def test_deterministic_mode_is_switched_on_and_off_again(run):
    run("training.deterministic=true", "training.epochs=1", folder="a")
    assert torch.are_deterministic_algorithms_enabled()
    run("training.epochs=1", folder="b")
    assert not torch.are_deterministic_algorithms_enabled()
