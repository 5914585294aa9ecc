"""A run that starts from trained weights: a new head, fitted to what they make of the training images."""

import dataclasses
import time
from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from ...loading import find_folder, load_weights, read_weights, select_head
from ...models import AbstractModel
from ..console import describe_seconds
from ..data import Images, rank_in_class
from ..run import TrainingError
from ..run.config import Config
from .build import make_batches
from .process import Process

STRENGTHS = (3.0, 0.3, 0.03, 0.003)  # weights of ½‖W‖² beside the mean loss, of which cross-validation chooses
FITTED = 2000  # images, at most, that the head is fitted to: the training that follows sees all
FOLDS = 5
TOGETHER = 64  # images in a batch of which the features are computed


def begin_from_weights(
    model: AbstractModel, images: Images, config: Config, process: Process, announce: Callable[[str], None]
) -> None:
    """Give `model` the weights of the run `config.start.run`, all but the head, which is fitted to the images.

    Training the rest with a random head would first spoil the weights (Kumar et al., 2022).
    """
    path, weights, _ = read_weights(find_folder(config.start.run), "best")
    load_weights(model, weights | select_head(model), path)
    head = model.get_submodule("head")
    if not isinstance(head, nn.Linear):
        raise TrainingError(f"The head of {config.model.name} cannot be fitted: `start.run` is for other models.")
    features, labels = compute_features(model, images.sample(FITTED), config, process, announce)
    ranks = torch.from_numpy(rank_in_class(images.sample(FITTED), config.seed))
    weight, bias, accuracy = fit_head(features, labels, ranks, head.out_features)
    with torch.no_grad():
        head.weight.copy_(weight)
        cast(Tensor, head.bias).copy_(bias)
    if accuracy is not None:
        announce(f"the head alone, by {FOLDS}-fold cross-validation on {len(labels)} training pictures: {accuracy:.1%}")


@torch.no_grad()
def compute_features(
    model: AbstractModel, images: Images, config: Config, process: Process, announce: Callable[[str], None]
) -> tuple[Tensor, Tensor]:
    """What the head gets for each image, float64 (images, features), and the labels; both on the host."""
    found: list[Tensor] = []
    hook = model.get_submodule("head").register_forward_pre_hook(lambda head, inputs: found.append(inputs[0].cpu()))
    config = dataclasses.replace(config, training=dataclasses.replace(config.training, batch_size=TOGETHER))
    batches, began = make_batches(images, config, Process(process.device), train=False), time.monotonic()
    model.eval()
    try:
        for number, (x, _) in enumerate(batches.epoch(0)):
            with process.autocast(config.training.amp):
                model(x)
            left = (time.monotonic() - began) * (len(batches) - 1)
            if number == 0 and left > 10:
                announce(f"fitting the head to {len(images):,} pictures, {describe_seconds(left)}")
    finally:
        hook.remove()
    return torch.cat(found).double(), images.labels.cpu()


def fit_head(features: Tensor, labels: Tensor, ranks: Tensor, classes: int) -> tuple[Tensor, Tensor, float | None]:
    """The weight (classes, features) and bias (classes) of multinomial logistic regression, and its accuracy on folds.

    Image i of its class is in fold `ranks[i]` modulo their number. The strength of its penalty is that with the lowest
    loss on the folds, the second where a class has a single image.
    """
    mean, std = features.mean(0), features.std(0, correction=0) + 1e-6
    x, folds = (features - mean) / std, min(FOLDS, int(labels.bincount(minlength=classes).min()))
    accuracy, strength = None, STRENGTHS[1]
    if folds > 1:
        held = ranks % folds
        losses = {}
        for each in STRENGTHS:
            logits = x.new_zeros(len(x), classes)
            for fold in range(folds):
                w, b = regress(x[held != fold], labels[held != fold], classes, each)
                logits[held == fold] = x[held == fold] @ w.mT + b
            losses[float(cross_entropy(logits, labels))] = each, float((logits.argmax(1) == labels).double().mean())
        strength, accuracy = losses[min(losses)]
    w, b = regress(x, labels, classes, strength)
    return w / std, b - (w / std) @ mean, accuracy


def regress(x: Tensor, labels: Tensor, classes: int, strength: float) -> tuple[Tensor, Tensor]:
    """The minimum of the mean cross-entropy + strength · ½‖W‖² over W (classes, features) and b (classes)."""
    w, b = (x.new_zeros(classes, *rest).requires_grad_() for rest in ((x.shape[1],), ()))
    optimizer = torch.optim.LBFGS([w, b], max_iter=200, tolerance_grad=1e-6, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        optimizer.zero_grad()
        with torch.enable_grad():
            value = cross_entropy(x @ w.mT + b, labels) + strength / 2 * w.square().sum()
            torch.autograd.backward(value)
        return value

    optimizer.step(loss)  # type: ignore[no-untyped-call]
    return w.detach(), b.detach()
