"""A trained run as a small folder to hand on: weights in half precision, records, and a model card."""

import hashlib
import shutil
from pathlib import Path

import torch

from ..run import Run, TrainingError, write_atomically
from ..run.checkpoint import save
from ..run.config import write
from .trained import TrainedRun

RECORDS = ("config.toml", "classes.json", "environment.json", "metrics.jsonl", "evaluation.json", "evaluation/*.json")


def export(path: Path | str, folder: Path, checkpoint: str = "best") -> Run:
    """Write a run's best or last weights and its records to a new `folder`, which can be used wherever a run can.

    Matrices and convolutions are stored in half precision, norms, biases and statistics, which are small and span more
    than half precision does, as they are. The norms of W are measured once more and stored, so that whoever loads the
    weights need not wait for that.
    """
    if folder.exists():
        raise TrainingError(f"{folder} already exists: choose another folder.")
    trained = TrainedRun.open(path, checkpoint, "cpu")
    trained.model.load_state_dict({name: halved(value).float() for name, value in trained.model.state_dict().items()})
    with torch.no_grad():
        trained.model(torch.zeros(1, *trained.seen.shape))
    weights = {f"model.{name}": halved(value) for name, value in trained.model.state_dict().items()}
    too_large = [name for name, value in weights.items() if not bool(value.float().isfinite().all())]
    if too_large:
        raise TrainingError(f"`{too_large[0]}` does not fit into half precision: its numbers reach beyond 65504.")
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        for folder_of in ("checkpoints", "evaluation"):
            (partial / folder_of).mkdir(parents=True)
        for file in (path for pattern in RECORDS for path in trained.run.path.glob(pattern)):
            shutil.copyfile(file, partial / file.relative_to(trained.run.path))
    except OSError as error:
        raise TrainingError(f"{folder} could not be written: {error.strerror}.") from None
    facts = {"epoch": trained.epoch, "config": write(trained.run.config())}
    save(Run(partial).checkpoint("best"), weights, facts)
    write_atomically(partial / "README.md", card(Run(partial), folder.name).encode())
    partial.rename(folder)
    return Run(folder)


def halved(value: torch.Tensor) -> torch.Tensor:
    """A matrix or a convolution in half precision, anything else as it is."""
    return value.half() if value.is_floating_point() and value.dim() > 1 else value


def card(run: Run, name: str) -> str:
    """The model card of an exported run, from its own records."""
    config, environment, rows, evaluation = run.config(), run.environment(), run.rows(), run.evaluation()
    digest = hashlib.sha256(run.checkpoint("best").read_bytes()).hexdigest()
    size = run.checkpoint("best").stat().st_size / 1e6
    held_out = "no image was held out" if config.data.validation == 0 else f"{config.data.validation:.0%} held out"
    scores = evaluation.get("scores", {}).get("test", {})
    epochs = "1 epoch" if len(rows) == 1 else f"{len(rows)} epochs"
    lines = [f"# {name}", ""]
    if scores:
        lines.append(
            f"**{scores['accuracy']:.2%} on the {scores['images']} test images of {config.data.name}** "
            f"(loss {scores['loss']:.4f}), by `kerneq evaluate` of the run that was exported."
        )
    else:
        lines.append("Not evaluated on test images: `kerneq evaluate` does it.")
    calibration = evaluation.get("calibration", {})
    if calibration:
        lines.append(f"Expected calibration error {calibration['ece']:.3f}, Brier score {calibration['brier']:.3f}.")
    lines += [
        "",
        "| | |",
        "|---|---|",
        f"| model | {config.model.name}, {evaluation.get('parameters', 'unknown')} parameters |",
        f"| training data | the training images of {config.data.name}, {held_out} |",
        f"| recipe | {epochs}, seed {config.seed}; every setting in config.toml, every epoch in metrics.jsonl |",
        f"| trained on | {environment.get('device', 'unknown')}, {run.seconds():.0f} s, "
        f"PyTorch {environment.get('torch', 'unknown')}, {environment.get('started', 'unknown')} |",
        f"| weights | checkpoints/best.safetensors, {size:.1f} MB, matrices in half precision |",
        f"| SHA-256 | `{digest}` |",
        "",
        "```",
        f"kerneq predict {name} photo.jpg        # classes and probabilities",
        f'model = kerneq.load("{name}")          # an nn.Module in eval()',
        "```",
        "",
        f"**Limits.** It knows the {len(run.classes()) or 'few'} classes of {config.data.name} and always names one of "
        "them, whatever the picture shows; pictures are cut to their central square and brought to the size of the "
        "training pictures. Its probabilities were not calibrated for pictures from elsewhere.",
        "",
    ]
    return "\n".join(lines)
