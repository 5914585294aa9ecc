"""The command `kerneq predict`."""

import sys
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from ..console import complain, printable, progress_bars, say, show_table
from .arguments import AsJson, Checkpoint, Device, RunFolder


def predict(
    run: RunFolder,
    pictures: Annotated[
        list[Path],  # one that may not be read is for `Predictor.read` to refuse, or the others would get no prediction
        Argument(help="Picture files, or folders of them.", metavar="IMAGE", readable=False),
    ],
    checkpoint: Checkpoint = "best",
    top: Annotated[int, Option(help="How many classes to show for each picture.", min=1)] = 5,
    device: Device = "auto",
    as_json: AsJson = False,
    as_csv: Annotated[bool, Option("--csv", help="Print CSV instead of a table, a row for each picture.")] = False,
    certify: Annotated[
        bool, Option("--certify", help="Also how far a picture may change and provably keep its class; slow.")
    ] = False,
    saliency: Annotated[
        Path | None, Option(help="Also draw where the model looks, into this PNG file.", metavar="FILE")
    ] = None,
) -> None:
    """Classify picture files: classes, probabilities, and whether the equilibrium was found."""
    from .. import prediction
    from ..run import write_atomically
    from ..run.config import ConfigError

    check_outputs(as_json, as_csv, saliency)
    with progress_bars() as progress:
        predictor = prediction.Predictor(run, checkpoint, device, progress)
        try:
            predictions, failures = predictor.predict_files(pictures, top, certify)
        except TypeError as error:
            if not certify:
                raise
            raise ConfigError(f"--certify: {error}") from None
    trained = predictor.trained
    if as_json:
        print(prediction.to_json(trained, run, predictions, failures))
    elif as_csv:
        print(prediction.to_csv(predictions, min(top, len(trained.classes))), end="")
    elif predictions:
        show_table(prediction.make_table(predictions, f"{trained.config.model.name}, {checkpoint} weights of {run}"))
        for doubt in prediction.describe_doubts(predictions, trained.named):
            say(doubt, "yellow")
    if saliency is not None and predictions:
        write_atomically(saliency, prediction.draw_maps(predictor, predictions))
        first = f"the first {prediction.SHOWN}" if len(predictions) > prediction.SHOWN else "all"
        say(f"Where it looks, {first} of the pictures: {saliency}", stderr=True)
    for _, problem in failures:
        complain(problem)
    if failures:
        sys.exit(1)


def check_outputs(as_json: bool, as_csv: bool, saliency: Path | None) -> None:
    """Refuse options that contradict each other, and a file for the maps that would be overwritten."""
    from ..run.config import ConfigError

    if as_json and as_csv:
        raise ConfigError("--json and --csv exclude each other: choose one.")
    if saliency is not None and (saliency.suffix.lower() != ".png" or saliency.exists()):
        raise ConfigError(f"--saliency takes the name of a new .png file, got {printable(str(saliency))}.")
