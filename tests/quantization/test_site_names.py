"""Sites are named by module path and op, in globs, reports, folders and files."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sparsebit.errors import CheckpointError
from sparsebit.quantization import QuantModel
from sparsebit.quantization.planning.sites import split_site
from tests.quantization.tiny import calibrated, qconfig, site, sites

X = torch.randn(2, 3, 8, 8)


class FunctionalNorm(nn.LayerNorm):
    """As DeiT models have it: a norm with a forward of its own."""

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        return self.proj(torch.matmul(torch.matmul(q, k.transpose(-2, -1)).softmax(-1), v))  # type: ignore[no-any-return]


class Block(nn.Module):
    def __init__(self, norm: type[nn.LayerNorm], extra: bool) -> None:
        super().__init__()
        self.norm1, self.attn, self.norm2 = norm(8), Attention(), norm(8)
        self.fc1, self.fc2, self.extra = nn.Linear(8, 16), nn.Linear(16, 8), extra

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        if self.extra:
            x = torch.sigmoid(torch.matmul(x, x.transpose(-2, -1)) + 1) @ x
        return x + self.fc2(F.gelu(self.fc1(self.norm2(x))))  # type: ignore[no-any-return]


class DeiT(nn.Module):
    def __init__(self, norm: type[nn.LayerNorm] = FunctionalNorm, depth: int = 2, extra: bool = False) -> None:
        super().__init__()
        self.patch_embed, self.cls_token = nn.Conv2d(3, 8, 4, 4), nn.Parameter(torch.zeros(1, 1, 8))
        self.blocks = nn.Sequential(*(Block(norm, extra and number == 0) for number in range(depth)))
        self.norm, self.head = norm(8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch_embed(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls_token.expand(x.shape[0], -1, -1), x], dim=1)
        return self.head(self.norm(self.blocks(x))[:, 0])  # type: ignore[no-any-return]


def switched_off(model: nn.Module, glob: str) -> list[str]:
    changes = {"A.SPECIFIC": [{glob: ["QUANTIZER.DISABLE", True]}]}
    coverage = QuantModel(model.eval(), qconfig(changes), example_inputs=X).coverage
    return [layer.name for layer in coverage.float_layers if "DISABLE" in layer.reason]


class TestGlobs:
    @pytest.mark.sample(3)
    @pytest.mark.parametrize("depth", [1, 2])
    @pytest.mark.parametrize("glob", ["*norm", "*norm*", "*.layer_norm"])
    def test_every_norm_that_is_a_function(self, glob: str, depth: int) -> None:
        blocks = [f"blocks.{block}.norm{norm}.layer_norm" for block in range(depth) for norm in (1, 2)]
        assert switched_off(DeiT(depth=depth), glob) == [*blocks, "norm.layer_norm"]

    def test_every_norm_that_is_a_layer(self) -> None:
        found = switched_off(DeiT(nn.LayerNorm), "*norm*")
        assert found == ["blocks.0.norm1", "blocks.0.norm2", "blocks.1.norm1", "blocks.1.norm2", "norm"]

    @pytest.mark.parametrize(
        ("glob", "found"),
        [
            ("*.softmax", ["blocks.0.attn.softmax", "blocks.1.attn.softmax"]),
            ("blocks.1.*matmul*", ["blocks.1.attn.matmul", "blocks.1.attn.matmul_1"]),
            ("blocks_1_attn_matmul_1", ["blocks.1.attn.matmul_1"]),
            ("cat", ["cat"]),
        ],
    )
    def test_functions_of_a_module(self, glob: str, found: list[str]) -> None:
        assert switched_off(DeiT(), glob) == found


def test_an_op_more_in_one_block_renames_nothing_in_another() -> None:
    plain, longer = (
        QuantModel(DeiT(extra=extra).eval(), qconfig({"A.QADD.ENABLE_QUANT": True}), example_inputs=X)
        for extra in (False, True)
    )
    outside = [{name for name in sites(qmodel) if not name.startswith("blocks.0.")} for qmodel in (plain, longer)]
    assert outside[0] == outside[1] and sites(longer) > {"blocks.0.sigmoid.input", "blocks.1.attn.matmul.input.0"}
    keys = [{key for key in qmodel.state_dict() if "blocks_1_" in key} for qmodel in (plain, longer)]
    assert keys[0] == keys[1] != set()


@pytest.mark.parametrize("backend", ["virtual", "onnxruntime"])
def test_names_and_sites_are_distinct(backend: str) -> None:
    class Parts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.a_b, self.cat = nn.Module(), Attention(), nn.Conv1d(8, 8, 1)
            self.a.b = Attention()

        def forward(self, x: Tensor) -> Tensor:
            x = self.a.b(x) + self.a_b(x)  # type: ignore[operator]
            x = self.cat(torch.cat([x, x.transpose(1, 2)], 1).transpose(1, 2))
            return self.a.b(x.transpose(1, 2))  # type: ignore[operator,no-any-return]

    x = torch.randn(2, 8, 8)
    changes = {"A.QADD.ENABLE_QUANT": True} if backend == "virtual" else {}
    qmodel = calibrated(Parts().eval(), [x], qconfig(changes, backend=backend))
    found = [quantizer.name for quantizer in qmodel.quantizers() if not quantizer.fake_fused]
    assert len(set(found)) == len(found)
    layers = {split_site(name)[0] for name in found}
    assert {"a.b.qkv", "a_b.qkv"} <= layers
    if backend == "virtual":
        assert {"a.b.matmul", "a.b.matmul_2", "a_b.matmul", "cat", "cat_1", "add"} <= layers


def _saved(qmodel: QuantModel, folder: Path) -> QuantModel:
    return QuantModel.load(qmodel.save(folder / "saved"), DeiT())


@pytest.mark.parametrize(
    "keep",
    [
        pytest.param(_saved, id="folder"),
        pytest.param(lambda qmodel, _: copy.deepcopy(qmodel), id="deepcopy"),
        pytest.param(lambda qmodel, _: pickle.loads(pickle.dumps(qmodel)), id="pickle"),
    ],
)
def test_names_are_kept(keep: Any, tmp_path: Path) -> None:
    qmodel = calibrated(DeiT().eval(), [X], qconfig())
    site(qmodel, "blocks.1.attn.softmax.input").set_bit(4)
    kept = keep(qmodel, tmp_path)
    assert [q.name for q in kept.quantizers()] == [q.name for q in qmodel.quantizers()]
    assert site(kept, "blocks.1.attn.softmax.input").spec.bits == 4
    assert torch.equal(kept(X), qmodel(X)) and kept.coverage == qmodel.coverage
    assert kept.dump_mermaid() == qmodel.dump_mermaid() and "blocks.1.attn.softmax" in kept.dump_mermaid()


def test_a_folder_of_another_model(tmp_path: Path) -> None:
    folder = calibrated(DeiT().eval(), [X], qconfig()).save(tmp_path / "saved")
    with pytest.raises(CheckpointError, match="differs from that of the model that was saved"):
        QuantModel.load(folder, DeiT(depth=1))
