"""Kernel GLMs on what the head of a network that ships sees of CIFAR pictures, beside logistic regression.

The first pictures of the training split are fitted, and the first of the test split are asked once. The network has
seen every training picture with its label, so what is fitted is surer than what is asked: of all methods alike.
"""

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from common import Experiment, Figures, Job, Record, Result, main
from sklearn.linear_model import LogisticRegression, LogisticRegressionCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

import kerneq
from kerneq.lab.data import load
from kerneq.lab.evaluate.classification import calibrate
from kerneq.settings import setting
from kerneq.sklearn import KernelGLMClassifier


@dataclasses.dataclass(frozen=True)
class Features:
    """What is fitted, and what it is asked."""

    weights: str = setting("geq-5m-cifar10", "a model that ships with kerneq")
    data: str = setting("cifar10", "its data set")
    train: int = setting(1000, "the first training pictures, to fit", low=20)
    test: int = setting(1000, "the first test pictures, to ask", low=20)
    centres: int = setting(300, "of the kernel GLM of low rank", low=1)
    seed: int = setting(0, "of folds, of centres, and of the samples whose evidence is looked at", low=0)
    device: str = setting("auto", "auto, cpu, cuda or cuda:N")


@torch.no_grad()
def extract(settings: Features, job: Job) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray], np.ndarray]:
    """The features and labels of both splits, and the network's own logits of the test pictures."""
    kept = job.saved.load("features") or {"rows": []}
    model = kerneq.load(settings.weights, device=job.device)
    mean, std = (torch.as_tensor(each).view(1, -1, 1, 1) for each in (model.mean, model.std))
    splits = {name: load(settings.data, name) for name in ("train", "test")}
    pixels = torch.cat([splits[name].in_memory()[: getattr(settings, name)] for name in splits])
    rows: list[torch.Tensor] = kept["rows"]
    for start in range(50 * len(rows), len(pixels), 50):
        x = (pixels[start : start + 50].float() / 255 - mean) / std
        rows.append(model.features(x.to(job.device)).double().cpu())
        job.report(min(1.0, (start + 50) / len(pixels)), "")
        if job.saved.due():
            job.saved.save("features", {"rows": rows})
    X = torch.cat(rows)
    job.saved.save("features", {"rows": rows})
    logits = X[settings.train :].to(job.device, torch.float32)
    logits = model.get_submodule("head")(logits).double().cpu()
    parts = (slice(None, settings.train), slice(settings.train, None))
    inputs = {name: X[part].numpy() for name, part in zip(splits, parts, strict=True)}
    labels = {name: splits[name].labels[: getattr(settings, name)].numpy() for name in splits}
    return inputs, labels, logits.softmax(1).numpy()


def methods(settings: Features) -> dict[str, Callable[[], Any]]:
    """What is fitted: on features that are scaled to unit variance, all choices made on the training pictures."""
    seed = settings.seed
    few = {"lam": "auto", "centres": settings.centres, "random_state": seed}
    return {
        "LogisticRegression()": lambda: LogisticRegression(max_iter=5000),
        "LogisticRegressionCV, 5 folds, log-loss": lambda: LogisticRegressionCV(
            cv=5, scoring="neg_log_loss", max_iter=5000
        ),
        'KernelGLMClassifier("linear", lam=1)': lambda: KernelGLMClassifier("linear", lam=1.0),
        'KernelGLMClassifier(lam="auto")': lambda: KernelGLMClassifier(lam="auto", random_state=seed),
        f'KernelGLMClassifier(lam="auto", centres={settings.centres})': lambda: KernelGLMClassifier(**few),
    }


def measure(p: np.ndarray, labels: np.ndarray, seconds: float | None) -> dict[str, Any]:
    """Accuracy, log-loss and calibration error of probabilities."""
    found = calibrate(torch.as_tensor(p).clamp(min=1e-300).log(), torch.as_tensor(labels))
    return {"accuracy": float((p.argmax(1) == labels).mean()), "nll": found.nll, "ece": found.ece, "seconds": seconds}


def run(settings: Features, job: Job) -> Result:
    """Fit and ask every method."""
    X, y, own = extract(settings, job)
    rows = {"the network's own head": measure(own, y["test"], None)}
    for name, make in methods(settings).items():
        model, start = make_pipeline(StandardScaler(), make()), time.perf_counter()
        model.fit(X["train"], y["train"])
        rows[name] = measure(model.predict_proba(X["test"]), y["test"], time.perf_counter() - start)
        job.report(1.0, f"{name}: {rows[name]}")
    return {"rows": rows}


def draw(records: Sequence[Record[Features]]) -> Figures:
    """No figure: the table says it."""
    return {}


def summarise(settings: Features, result: Result) -> list[str]:
    """A line a method."""
    return [
        f"{name:55s} {100 * row['accuracy']:5.1f} % right, NLL {row['nll']:.4f}, ECE {row['ece']:.4f}"
        for name, row in result["rows"].items()
    ]


EXPERIMENT = Experiment("features", Features, run, draw, summarise, label=lambda settings: "features")

if __name__ == "__main__":
    main(EXPERIMENT)
