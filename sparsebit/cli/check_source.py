"""What `check --model` compares a file with: the float model, or the simulation of the folder saved from it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from sparsebit.cli.data import Inputs, load_data
from sparsebit.cli.loading import LoadingError, load_model
from sparsebit.cli.option_groups import DataOptions, Limits
from sparsebit.cli.options import Arguments
from sparsebit.cli.recording import Recording
from sparsebit.deploy.check import FileParity
from sparsebit.quantization.export_checks import check_parity, compare_model
from sparsebit.quantization.quant_model import QuantModel


@dataclass(frozen=True)
class Source:
    """The model by name, with its weights, and the folder of the quantized one; None: the float model itself."""

    model: str
    arguments: Arguments | None
    weights: Path | None
    folder: Path | None

    def __post_init__(self) -> None:
        if self.folder is not None and not self.folder.is_dir():
            raise LoadingError(
                f"--against {self.folder}: with --model it is the folder that quantize saved; to compare with a file, "
                "leave --model out"
            )
        if self.folder is not None and self.weights is not None:
            raise LoadingError(f"--weights {self.weights}: {self.folder} holds the weights")

    def __str__(self) -> str:
        return f"the simulation of {self.folder}" if self.folder is not None else f"{self.model} in float"

    def compared(
        self, file: Path, data: str, how: DataOptions, limits: Limits, recorded: Recording
    ) -> tuple[FileParity, str, QuantModel | None]:
        """What was found, the data in words, and the quantized model, where that is what it was compared with."""
        net = load_model(self.model, self.arguments, self.weights)
        recorded.expect(net, self.model)
        batches = load_data(data, how, Inputs.of(net))
        if self.folder is None:
            tolerance = limits.tolerance() if limits else None
            parity = compare_model(net, file, batches, num_samples=how.num_samples)
            fault = "" if tolerance is None else parity.fault(tolerance)
            return FileParity(parity, fault=fault), batches.description, None
        qmodel = QuantModel.load(self.folder, net, device="cpu")
        parity = check_parity(qmodel, file, batches, tolerance=limits.tolerance(), num_samples=how.num_samples)
        return FileParity(parity), batches.description, qmodel
