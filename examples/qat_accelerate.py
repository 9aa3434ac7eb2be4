"""Scikit-learn's digits at 2 bits, trained in a loop of your own with accelerate, in one process or several.

    python examples/qat_accelerate.py
    torchrun --nproc-per-node 2 examples/qat_accelerate.py     # or: accelerate launch; on CPUs too

`Accelerator()` makes the processes known to each other. Then the model is calibrated, every rank on its own part of the
data, and all get the same scales; only then `prepare` wraps it.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import set_seed
from qat_digits import CONFIG, accuracy, arguments, told
from torch.utils.data import DataLoader, TensorDataset

from sparsebit.cli.digits import load_digits, train
from sparsebit.quantization import QuantModel, parse_qconfig


def main() -> None:
    options = arguments(__doc__)

    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    digits = load_digits()
    model = train(digits, epochs=options.float_epochs, seed=0)
    set_seed(0)

    qmodel = QuantModel(model, parse_qconfig(CONFIG))
    qmodel.prepare_calibration()
    with torch.no_grad():
        for images in digits.train_images[accelerator.process_index :: accelerator.num_processes].split(64):
            qmodel(images)
    qmodel.init_QAT()
    scores = {"float": accuracy(model, digits), "calibrated": accuracy(qmodel, digits)}

    loader = DataLoader(TensorDataset(digits.train_images, digits.train_labels), batch_size=32, shuffle=True)
    optimizer = torch.optim.Adam(qmodel.parameters(), lr=options.lr)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.epochs)
    wrapped, optimizer, loader = accelerator.prepare(qmodel, optimizer, loader)
    for _ in range(options.epochs):
        wrapped.train()
        for images, labels in loader:
            loss = F.cross_entropy(wrapped(images), labels)
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
        schedule.step()

    trained = accelerator.unwrap_model(wrapped)
    trained.save(options.save)  # on all ranks: one writes
    scores["trained"] = accuracy(trained, digits)
    if accelerator.is_main_process:
        print(told(scores, options.save, accelerator.num_processes, as_json=options.json))
    accelerator.end_training()


if __name__ == "__main__":
    main()
