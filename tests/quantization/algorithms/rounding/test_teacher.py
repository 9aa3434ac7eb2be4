from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from sparsebit.quantization import gptq
from sparsebit.quantization.algorithms.layer_visits import num_owners
from sparsebit.quantization.algorithms.rounding.learned_sites import find_sites, in_place
from sparsebit.quantization.algorithms.rounding.matching import Comparison, Matching
from sparsebit.quantization.algorithms.rounding.reconstruction import METHODS
from sparsebit.quantization.algorithms.rounding.teacher import Teacher
from tests.quantization.algorithms.rounding.test_reconstruction import batches, calibrated, float_model


@pytest.mark.parametrize("patched", [0.0, 0.5])
def test_it_answers_as_the_float_model_while_the_block_is_learned(patched: float) -> None:
    model, data = float_model(), batches()
    qmodel = calibrated(model, data)
    gptq(qmodel, data)  # changes weights and biases: the float model's are known
    seen: list[tuple[Tensor, Tensor, Tensor]] = []

    def visit(block: Any) -> None:
        generator = torch.Generator().manual_seed(0)
        owners = num_owners(qmodel.model)
        sites, _ = find_sites(block.block, METHODS["distill"], owners, qmodel.float_parameters, generator)
        matching = Matching(is_renewed=True, patched=patched, features=1.0)
        nodes = Comparison(block, matching, None).nodes
        teacher = Teacher(block, nodes, matching)
        with in_place(sites, list(block.block.modules.values())):
            with torch.no_grad():
                for bias, _ in sites.biases:
                    bias.add_(1.0)
            learned = teacher.run(block.inputs[0])
            inputs = teacher.renewed(block.inputs[0], generator)
            targets = teacher.targets(inputs)
            again = teacher.run(block.inputs[0])  # nothing of the teacher is left
        assert len(sites.biases) == 4 and len(targets) == 1 + len(nodes) and len(nodes) == 2
        torch.testing.assert_close(learned, again, rtol=0, atol=0)
        assert not torch.allclose(learned[0], block.targets[0][0], atol=0.1)
        seen.append((inputs[0], targets[0], block.inputs[0][0]))

    qmodel.visit_blocks(data, visit, blocks="network")
    ((inputs, targets, before),) = seen
    assert not torch.equal(inputs, before)
    with torch.no_grad():
        torch.testing.assert_close(targets, model(inputs))
