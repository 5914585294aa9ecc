"""`own-pictures` beside other ways to train on a folder: a linear probe, fine-tuning, and a ResNet-18 from scratch.

    python experiments/own_pictures.py PATH OUT.json [--rates 3e-4 1e-3] [--epochs 10]

The protocol, fixed before the first run. All four ways see the training pictures that `own-pictures` keeps, and choose
by those that it holds out; the test pictures are read once, at the end, by what was chosen.

- own-pictures: as the command chooses it, its last weights.
- probe: scikit-learn's LogisticRegressionCV (five folds, twelve penalties) on `model.features` of the same weights.
- fine-tuning, timm's usual recipe: all weights, from geq-5m-cifar100, with a new random head; AdamW (weight decay 0.05
  of matrices), cosine after a warm-up of a tenth of the steps, label smoothing 0.1, gradients clipped to norm 1, random
  resized crops and mirroring at 32 pixels, batches of 16 (64 from 1 000 pictures on), a tenth of the rate for the body.
  Ten epochs of 180 pictures, twenty of 40. The rate is the one of `--rates` with the best held-out accuracy (the first
  of equal ones); the weights are the last.
- scratch: timm's resnet18 (only where timm is installed) at 128 pixels, the same recipe at rate 1e-3, no lower rate for
  the body, for as many CPU seconds as the chosen fine-tuning took.

Seconds are those of the CPU, in one thread; the search over rates is counted apart.
"""

import argparse
import dataclasses
import importlib.util
import json
import math
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from sklearn.linear_model import LogisticRegressionCV
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import kerneq as kq
from kerneq.lab.data import Augment, Batches, Images, load
from kerneq.lab.run import machine
from kerneq.lab.run.config import Config
from kerneq.lab.training.build import split

WEIGHTS = "geq-5m-cifar100"
SCRATCH_SIZE, SCRATCH_RATE, SCRATCH_MOST = 128, 1e-3, 1000  # pixels, rate, epochs at most


def main(path: str, out: Path, rates: list[float], epochs: int) -> None:
    torch.set_num_threads(1)
    data, rows, models = f"folder:{path}", {}, {}
    began = time.process_time()
    with tempfile.TemporaryDirectory() as temporary:
        run = kq.train("own-pictures", Path(temporary) / "run", [f"data.name={data}", "device=cpu"])
        config, own = run.config(), kq.load(run.path, "last")
        seconds, held_out = time.process_time() - began, run.rows()[-1]["validation"]["accuracy"]
    rows["own-pictures"] = {"seconds": seconds, "held_out": held_out}
    models["own-pictures"] = classify_by(own, config.data.size)

    kept, held = split(load(data, "train", size=config.data.size), config)
    assert held is not None
    began, body = time.process_time(), kq.load(WEIGHTS)
    probe = LogisticRegressionCV(Cs=[10.0**n for n in range(-6, 6)], cv=5, max_iter=5000, use_legacy_attributes=False)
    probe.fit(*(part.numpy() for part in compute_features(body, kept)))
    models["probe"] = lambda images: torch.from_numpy(probe.predict(compute_features(body, images)[0].numpy()))
    rows["probe"] = {"seconds": time.process_time() - began, "held_out": share_right(models["probe"], held)}

    tried = {}
    for rate in rates:
        torch.manual_seed(0)  # of the new head
        began, model = time.process_time(), kq.load(WEIGHTS, classes=len(kept.classes))
        fine_tune(model, kept, rate, 0.1, lambda step, steps, spent: step / steps, epochs)
        seconds, classify = time.process_time() - began, classify_by(model, config.data.size)
        tried[rate] = (share_right(classify, held), seconds, classify)
    rate = max(tried, key=lambda each: tried[each][0])
    held_out, seconds, models["fine-tuning"] = tried[rate]
    rows["fine-tuning"] = {"seconds": seconds, "held_out": held_out, "rate": rate, "epochs": epochs}
    rows["fine-tuning"]["tried"] = {f"{each:g}": found[0] for each, found in tried.items()}

    if importlib.util.find_spec("timm"):
        models["scratch"] = train_from_scratch(data, config, seconds)
        rows["scratch"] = {"seconds": seconds, "held_out": share_right(models["scratch"], held)}

    test = load(data, "test", size=config.data.size)
    for name, classify in models.items():
        rows[name]["test"] = share_right(classify, test)
        print(f"{name:12} {rows[name]['test']:.1%} of {len(test)}, held out {rows[name]['held_out']:.1%}, ", end="")
        print(f"{rows[name]['seconds']:.0f} s of CPU")
    about = {"pictures": len(kept) + len(held), "held_out": len(held), "classes": list(kept.classes), "test": len(test)}
    out.write_text(json.dumps(machine(torch.device("cpu")) | about | {"ways": rows}, indent=2) + "\n")


def train_from_scratch(data: str, config: Config, seconds: float) -> Callable[[Images], Tensor]:
    """Train timm's resnet18 for so many CPU seconds."""
    import timm

    kept, _ = split(load(data, "train", size=SCRATCH_SIZE), config)
    torch.manual_seed(0)
    model = timm.create_model("resnet18", num_classes=len(kept.classes))
    fine_tune(model, kept, SCRATCH_RATE, 1.0, lambda step, steps, spent: spent / seconds, SCRATCH_MOST)
    return classify_by(model, SCRATCH_SIZE)


def fine_tune(
    model: nn.Module,
    images: Images,
    rate: float,
    lower: float,  # the body's rate, as a share of the head's
    share_done: Callable[[int, int, float], float],  # of step, steps and CPU seconds: it ends at 1
    epochs: int,
) -> None:
    """Train all weights by AdamW, in the recipe of the protocol."""
    head = [name for name, _ in model.named_parameters() if name.startswith(("head.", "fc."))]
    groups = [
        {
            "params": [p for name, p in model.named_parameters() if (name in head) == own and (p.dim() > 1) == matrix],
            "weight_decay": 0.05 if matrix else 0.0,
            "peak": rate if own else lower * rate,
        }
        for own in (True, False)
        for matrix in (True, False)
    ]
    optimizer = torch.optim.AdamW(groups, lr=rate)
    size = 16 if len(images) < 1000 else 64
    batches = Batches(images, size, Augment(area=0.35, flip=True), workers=0)
    began, step, steps = time.process_time(), 0, epochs * len(batches)
    model.train()
    for epoch in range(epochs):
        for x, labels in batches.epoch(epoch):
            done = share_done(step, steps, time.process_time() - began)
            if done >= 1:
                return
            multiple = done / 0.1 if done < 0.1 else (1 + math.cos(math.pi * (done - 0.1) / 0.9)) / 2
            for group in optimizer.param_groups:
                group["lr"] = max(multiple, 1 / steps) * group["peak"]
            loss = cross_entropy(model(x), labels, label_smoothing=0.1)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            step += 1


def classify_by(model: nn.Module, size: int) -> Callable[[Images], Tensor]:
    """A function that gives the likeliest class of each image, as the model sees it at so many pixels a side."""

    @torch.no_grad()
    def classify(images: Images) -> Tensor:
        model.eval()
        return torch.cat([model(x).argmax(1) for x, _ in whole_epoch(resize(images, size))])

    return classify


def resize(images: Images, size: int) -> Images:
    """The same picture files, to be decoded at another size."""
    return dataclasses.replace(images, pixels=dataclasses.replace(images.pixels, size=size))


def whole_epoch(images: Images) -> Iterator[tuple[Tensor, Tensor]]:
    """Every image once, in order."""
    return Batches(images, 64, shuffle=False, drop_last=False, workers=0).epoch(0)


@torch.no_grad()
def compute_features(model: nn.Module, images: Images) -> tuple[Tensor, Tensor]:
    """What the head gets for each image, and the labels."""
    return torch.cat([model.features(x) for x, _ in whole_epoch(images)]), images.labels  # type: ignore[operator]


def share_right(classify: Callable[[Images], Tensor], images: Images) -> float:
    """The accuracy on some images."""
    return float((classify(images) == images.labels).double().mean())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", help="a folder of pictures, as kerneq takes it")
    parser.add_argument("out", type=Path, help="the record to write")
    parser.add_argument("--rates", type=float, nargs="+", default=[3e-4, 1e-3], help="the head's, to choose from")
    parser.add_argument("--epochs", type=int, default=10)
    main(**vars(parser.parse_args()))
