"""The commands about trained runs: evaluate, predict, features, report and export."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from ..console import complain, describe_seconds, printable, progress_bars, say, show_table
from .arguments import AsJson, Checkpoint, Device, RunFolder, RunFolders
from .errors import Failures

if TYPE_CHECKING:
    from ..evaluate import Measurements
    from ..evaluate.parts import PlannedPart
    from ..run import Run


def evaluate(
    folders: RunFolders,
    part: Annotated[
        list[str] | None, Option(help="Only this part, and more with another --part; a wrong name lists them.")
    ] = None,
    everything: Annotated[
        bool, Option("--all", help="Every part that applies and is not yet measured, with a plan of how long it takes.")
    ] = False,
    checkpoint: Checkpoint = "best",
    device: Device = "auto",
) -> None:
    """Measure trained runs on the test images; also written to RUN/evaluation.json and RUN/evaluation/."""
    from ..evaluate import PARTS, NotApplicableError, TrainedRun, make_plan, measure_part
    from ..evaluate.parts import find_part
    from ..run import Stopped, find_runs

    names = list(dict.fromkeys(part or [name for name, entry in PARTS.items() if everything or entry.usual]))
    for name in names:
        find_part(name)  # a wrong one is refused before anything is measured
    runs = find_runs(folders)
    failures = Failures(several=len(runs) > 1)
    for run in runs:
        with failures.of(run):
            progress = progress_bars()
            trained = TrainedRun.open(run.path, checkpoint, device, progress=progress)
            todo = names
            if everything and not part:
                plan = make_plan(trained)
                show_plan(run, plan)
                todo = [step.name for step in plan if not step.left_out]
            done: list[str] = []
            for name in todo:
                try:
                    with progress:
                        measured = measure_part(trained, name)
                except NotApplicableError as error:
                    if part:  # asked for by name
                        raise
                    if everything:
                        say(f"{run.path}, {name}: {error}")
                    continue
                except KeyboardInterrupt:
                    written = f"{', '.join(done)} in {run.path}" if done else "nothing"
                    more = ": the same command goes on with the rest" if everything else ""
                    raise Stopped(f"Interrupted while it measured {name}. Written: {written}{more}.") from None
                with failures.of(run):  # the results are printed, even if they cannot be written
                    show_measurements(measured)
                    done.append(name)
    if len(runs) > 1:
        compare(runs, failures)
    if failures.codes:
        sys.exit(failures.codes[0])


def show_plan(run: "Run", plan: "Sequence[PlannedPart]") -> None:
    """Print what will be measured and how long it takes, and what is left out and why."""
    from ..tables import plan_table

    total = sum(step.seconds or 0.0 for step in plan)
    count = sum(not step.left_out for step in plan)
    if count:
        parts = "1 part" if count == 1 else f"{count} parts"
        say(f"{run.path}: {parts}, {describe_seconds(total)} in all; Ctrl-C keeps those that are done", "bold")
    else:
        say(f"{run.path}: nothing is left to measure", "bold")
    show_table(plan_table(plan))


def show_measurements(measured: "Measurements[Any]") -> None:
    """Print what was measured, and write it into the folder of its run, but not into that of weights that ship."""
    from ..evaluate import PARTS
    from ..tables import summary_table

    path = measured.trained.run.path
    say(f"{path}: {PARTS[measured.name].sentence}", "bold")
    show_table(summary_table(measured.evidence.summary()))
    files = ", ".join(str(path / file) for file in measured.write())
    say(f"Written to {files}" if files else "Not written: these weights are part of the installation.")


def compare(runs: "Sequence[Run]", failures: Failures) -> None:
    """Print the metrics of the runs side by side, and below them the means over seeds."""
    from ..tables import comparison_table, describe_seeds

    whole = []
    for run in runs:
        with failures.of(run):  # where evaluation.json is damaged, the others are compared
            run.test()
            whole.append(run)
    if whole:
        show_table(comparison_table(whole))
        for sentence in describe_seeds(whole):
            say(sentence)


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
    threshold: Annotated[
        str,
        Option(help="Answer none of them below this confidence, 0 to 1; auto: the one that kerneq evaluate chose."),
    ] = "",
    saliency: Annotated[
        Path | None, Option(help="Also draw where the model looks, into this PNG file.", metavar="FILE")
    ] = None,
) -> None:
    """Classify picture files: classes, probabilities, and whether the equilibrium was found."""
    from .. import prediction
    from ..evaluate import NotApplicableError
    from ..run import write_atomically
    from ..run.config import ConfigError

    check_outputs(as_json, as_csv, saliency)
    with progress_bars() as progress:
        predictor = prediction.Predictor(run, checkpoint, device, progress)
        try:
            predictions, failures = predictor.predict_files(pictures, top, certify, predictor.find_threshold(threshold))
        except NotApplicableError as error:
            raise ConfigError(str(error)) from None
    trained = predictor.trained
    if as_json:
        print(prediction.format_json(trained, run, predictions, failures))
    elif as_csv:
        print(prediction.format_csv(predictions, min(top, len(trained.classes))), end="")
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


def features(
    run: RunFolder,
    pictures: Annotated[Path, Argument(help="A picture file, or a folder of them.", metavar="PATH", readable=False)],
    output: Annotated[Path, Argument(help="The .npy file to write.", metavar="OUT.npy")],
    checkpoint: Checkpoint = "best",
    device: Device = "auto",
) -> None:
    """Write what a trained model's linear head sees of picture files: an array (pictures, features) for NumPy.

    The names of the pictures, in the order of the rows, go into a .json file beside it.
    """
    import io

    import numpy

    from ..prediction import Predictor
    from ..run import write_atomically
    from ..run.config import ConfigError
    from ..run.files import write_json

    names = output.with_suffix(".json") if output.name else output
    if output.suffix != ".npy" or output.exists() or names.exists():
        raise ConfigError(
            f"OUT.npy is the name of a new .npy file, with a new .json beside it, got {printable(str(output))!r}."
        )
    with progress_bars() as progress:
        predictor = Predictor(run, checkpoint, device, progress)
        rows, files, failures = predictor.extract_features([pictures])
    if files:
        written = io.BytesIO()
        numpy.save(written, rows.numpy())
        write_atomically(output, written.getvalue())
        trained = predictor.trained
        header = {"run": str(run), "checkpoint": trained.checkpoint, "epoch": trained.epoch}
        write_json(names, header | {"pictures": [str(file) for file in files]})
        say(f"Written to {output}: {len(rows)} pictures, {rows.shape[1]} features; their names are in {names}")
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


def report(
    folders: RunFolders,
    output: Annotated[
        Path, Option(help="One .html file, .md with its figures beside it, or .json: the results alone.")
    ] = Path("report.html"),
    title: Annotated[str, Option(help="The title of the page.")] = "kerneq report",
) -> None:
    """Write one self-contained page about some runs: results beside the papers', curves, and all that was measured."""
    from ..report import render

    render(folders, output, title)
    say(f"Written to {output}")


def export(
    run: RunFolder,
    folder: Annotated[Path, Argument(help="The folder to write.", metavar="FOLDER")],
    checkpoint: Checkpoint = "best",
    onnx: Annotated[
        int, Option(help="Also write model.onnx, with so many plain steps in every solve.", metavar="STEPS", min=0)
    ] = 0,
) -> None:
    """Write a small copy of a trained run to hand on: weights in half precision, records, and a model card."""
    from ..evaluate import TrainedRun
    from ..evaluate import export as export_run
    from ..evaluate.onnx import check_installed, write_onnx

    if onnx:
        check_installed()
    written = export_run(run, folder, checkpoint)
    say(f"Written to {folder}; its card is {written.path / 'README.md'}")
    if onnx:
        file = written.path / "model.onnx"
        words = write_onnx(TrainedRun.open(written.path, device="cpu"), file, onnx)
        say(f"Written to {file}: pixels in [0, 1] ↦ logits; {words}")
