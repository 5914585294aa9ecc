"""The commands of `kerneq kglm`: read settings, run, write numbers and figures, say what came out."""

import dataclasses
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console

from kerneq.kglm.experiments.settings import device_of, read, record


def mnist(file: str, changes: Sequence[str], output: Path, threads: int) -> None:
    from kerneq.kglm.experiments import mnist_figure
    from kerneq.kglm.experiments.mnist import Mnist, compare

    settings, console = read(Mnist, *_split(file, changes)), _console(threads)
    device, start = device_of(settings.device), time.perf_counter()
    result = compare(settings, device, lambda done: console.print(f"{done} of {settings.images} images"))
    result["seconds"]["all"] = time.perf_counter() - start
    record(output, settings, device, result)
    mnist_figure.draw(settings, result, device, output / "closest.png")
    console.print(
        f"{result['images']} images, {result['pixels']} pixels: the equilibrium and Newton's method disagree on "
        f"{result['disagreements']} pixels that are not provable ties; {result['ties']} provable ties; largest "
        f"difference of f {result['largest_gap']:.1e}. {result['seconds']['all']:.0f} s. {output}/result.json"
    )
    if settings.single:
        console.print(
            f"In float32 the sign of f differs from Newton's in float64 on {result['float32_pixels']} pixels; σ(f) "
            f"is ½ to the last bit on {result['float32_halves']} pixels of {result['float32_images']} images (the "
            "paper's disagreements are such pixels, on 11 images)."
        )


def _split(file: str, changes: Sequence[str]) -> tuple[str, Sequence[str]]:
    """A first argument with `=` in it is a change, not a file."""
    return ("", [file, *changes]) if "=" in file and not Path(file).exists() else (file, changes)


def _console(threads: int) -> Console:
    if threads:
        torch.set_num_threads(threads)
    return Console(highlight=False, soft_wrap=True)


def smooth(file: str, changes: Sequence[str], output: Path, threads: int) -> None:
    from kerneq.kglm.experiments import smooth_figure
    from kerneq.kglm.experiments.smooth import SCHEMES, Smooth, run

    settings, console = read(Smooth, *_split(file, changes)), _console(threads)
    device, start = device_of(settings.device), time.perf_counter()
    result = run(settings, device, console.print)
    result["seconds"] = time.perf_counter() - start
    record(output, settings, device, result)
    smooth_figure.draw(settings, result, output)
    errors = torch.tensor(result["errors"])
    for column, scheme in enumerate(SCHEMES):
        first, last = errors[0, :, column], errors[-1, :, column]
        console.print(
            f"{scheme}: test MSE {first.mean():.4f} ± {first.std():.4f} before training, "
            f"{last.mean():.4f} ± {last.std():.4f} after {settings.epochs} epochs ({settings.seeds} seeds)"
        )
    console.print(f"{result['seconds']:.0f} s. {output}/result.json")


def denoise(file: str, changes: Sequence[str], output: Path, threads: int) -> None:
    from kerneq.kglm.experiments import denoise_figure
    from kerneq.kglm.experiments.denoise import Denoise, run
    from kerneq.kglm.experiments.denoise_table import table

    settings, console = read(Denoise, *_split(file, changes)), _console(threads)
    device, start = device_of(settings.device), time.perf_counter()
    result = run(settings, device, console.print)
    result["seconds"] = time.perf_counter() - start
    rows = table(result, sorted({0, min(3, settings.epochs), settings.epochs}))
    result["table"] = [dataclasses.asdict(row) for row in rows]
    record(output, settings, device, result)
    denoise_figure.draw(settings, result, output)
    models = 2 * settings.norms * settings.seeds
    console.print(f"{result['source']}: {models} models of {result['parameters']} parameters")
    for row in rows:
        console.print(
            f"epoch {row.epoch}, {row.scheme}: log MSE {row.mean:.2f} ± {row.deviation:.2f} at norm {row.norm:.2g}, "
            f"{row.failed} failed"
        )
    console.print(f"{result['seconds']:.0f} s. {output}/result.json")


def mnist_train(file: str, changes: Sequence[str], output: Path, threads: int) -> None:
    from kerneq.kglm.experiments import mnist_train_figure
    from kerneq.kglm.experiments.mnist_train import MnistTrain, run

    settings, console = read(MnistTrain, *_split(file, changes)), _console(threads)
    device, start = device_of(settings.device), time.perf_counter()
    result = run(settings, device, console.print)
    result["seconds"] = time.perf_counter() - start
    record(output, settings, device, result)
    mnist_train_figure.draw(result, output / "training.png")
    first, last = result["test"][0], result["test"][-1]
    console.print(
        f"test error before training: kernel {first[0]:.4f}, random {first[1]:.4f}; after {settings.steps} steps: "
        f"{last[0]:.4f}, {last[1]:.4f}. {result['seconds']:.0f} s. {output}/result.json"
    )


def cost(file: str, changes: Sequence[str], output: Path, threads: int) -> None:
    from kerneq.kglm.experiments.cost import Cost, draw, run

    settings, console = read(Cost, *_split(file, changes)), _console(threads)
    device = device_of(settings.device)
    result = run(settings, device)
    record(output, settings, device, result)
    draw(result, output / "cost.png")
    for kind, key in (("dense", "widths"), ("convolutional", "channels")):
        kernel, random = (result[kind][scheme][-1] for scheme in ("kernel", "random"))
        console.print(f"{kind}, {result[key][-1]} {key}: kernel {kernel:.2g} s, random {random:.2g} s")
    console.print(f"{output}/result.json")
