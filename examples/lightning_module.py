"""A model of the zoo inside a LightningModule, trained by Lightning's Trainer on handwritten digits."""

import argparse

import lightning
import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

import kerneq


class Digits(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = kerneq.models.build("geq-tiny", classes=10, channels=1)

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        x, y = batch
        logits, solutions = self.model(x, solutions=True)
        self.log("steps", torch.stack([s.steps.float().mean() for s in solutions.values()]).mean(), prog_bar=True)
        return F.cross_entropy(logits, y)

    def validation_step(self, batch: list[Tensor], index: int) -> None:
        x, y = batch
        self.log("accuracy", (self.model(x).argmax(1) == y).float().mean(), prog_bar=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def main(epochs: int, batches: int) -> None:
    lightning.seed_everything(0, verbose=False)
    digits = load_digits()
    x = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    data = TensorDataset(x, torch.tensor(digits.target))
    train, validation = torch.utils.data.random_split(data, [1500, 297])
    # No logger and no checkpoints, so that the example leaves nothing behind.
    trainer = lightning.Trainer(
        accelerator="cpu",
        max_epochs=epochs,
        limit_train_batches=batches,
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=False,
    )
    module = Digits()
    trainer.fit(module, DataLoader(train, batch_size=50, shuffle=True), DataLoader(validation, batch_size=297))
    accuracy = float(trainer.callback_metrics["accuracy"])
    print(f"validation accuracy {accuracy:.1%} at {float(trainer.callback_metrics['steps']):.1f} steps a solve")
    _, places = plt.subplots(1, 10, figsize=(10, 1.4), layout="constrained")
    for axes, picture, digit in zip(
        places, x[validation.indices], module.eval().model(x[validation.indices]).argmax(1), strict=False
    ):
        axes.imshow(picture[0].numpy(), cmap="gray_r")
        axes.set(title=int(digit), xticks=[], yticks=[])
    plt.savefig("lightning_module.png", dpi=80)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batches", type=int, default=30, help="training batches an epoch")
    main(**vars(parser.parse_args()))
