"""Scikit-learn's digits at 2 bits, trained in a Lightning loop, in one process or several.

    python examples/qat_lightning.py
    torchrun --nproc-per-node 2 examples/qat_lightning.py     # on CPUs too

The model is calibrated in `setup`, when the processes know each other and the parameters are not yet wrapped: every
rank runs its own part of the data, and all get the same scales.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import lightning
import torch
import torch.nn.functional as F
from qat_digits import CONFIG, accuracy, arguments, told
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from sparsebit.cli.digits import Digits, load_digits, train
from sparsebit.quantization import QuantModel, parse_qconfig


class QuantizedClassifier(lightning.LightningModule):
    def __init__(self, model: nn.Module, digits: Digits, lr: float) -> None:
        super().__init__()
        self.qmodel = QuantModel(model, parse_qconfig(CONFIG))
        self.digits, self.lr, self.scores = digits, lr, {"float": accuracy(model, digits)}

    def setup(self, stage: str) -> None:
        self.qmodel.prepare_calibration()
        with torch.no_grad():
            for images in self.digits.train_images[self.global_rank :: self.trainer.world_size].split(64):
                self.qmodel(images)
        self.qmodel.init_QAT()
        self.scores["calibrated"] = accuracy(self.qmodel, self.digits)
        self.qmodel.train()  # Lightning trains modules in the mode that it finds them in

    def training_step(self, batch: tuple[Tensor, Tensor], _: int) -> Tensor:
        images, labels = batch
        return F.cross_entropy(self.qmodel(images), labels)

    def configure_optimizers(self) -> tuple[list[Any], list[Any]]:
        optimizer = torch.optim.Adam(self.qmodel.parameters(), lr=self.lr)
        return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, self.trainer.max_epochs)]


def main() -> None:
    options = arguments(__doc__)

    digits = load_digits()
    model = train(digits, epochs=options.float_epochs, seed=0)
    lightning.seed_everything(0, verbose=False)
    trainer = lightning.Trainer(
        devices=int(os.environ.get("LOCAL_WORLD_SIZE", 0)) or "auto",  # torchrun's, on CPUs too
        max_epochs=options.epochs,
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=sys.stderr.isatty(),
    )
    loader = DataLoader(TensorDataset(digits.train_images, digits.train_labels), batch_size=32, shuffle=True)
    classifier = QuantizedClassifier(model, digits, options.lr)
    trainer.fit(classifier, loader)
    classifier.qmodel.save(options.save)  # on all ranks: one writes
    classifier.scores["trained"] = accuracy(classifier.qmodel, digits)
    if trainer.is_global_zero:
        print(told(classifier.scores, options.save, trainer.world_size, as_json=options.json))


if __name__ == "__main__":
    main()
