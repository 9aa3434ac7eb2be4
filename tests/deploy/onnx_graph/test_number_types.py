from __future__ import annotations

import pytest

from sparsebit.deploy.onnx_graph.number_types import ACTIVATION_WIDTHS, num_bits, storage_for
from sparsebit.errors import DeploymentError
from sparsebit.numerics.spec import TensorSpec
from tests.parameters import listed

WIDTHS = frozenset({2, 4, 8, 16})
CONTAINERS = {1: 2, 2: 2, 3: 4, 4: 4, **dict.fromkeys(range(5, 9), 8), **dict.fromkeys(range(9, 17), 16)}


@pytest.mark.parametrize("bits", range(1, 17))
@pytest.mark.parametrize("symmetric", [True, False], ids=["symmetric", "affine"])
def test_the_narrowest_type_that_holds_all_codes(bits: int, symmetric: bool) -> None:
    spec = TensorSpec(bits, symmetric)
    storage = storage_for(spec.qmin, spec.qmax, WIDTHS, "fc.weight")
    assert storage.name == f"{'INT' if symmetric else 'UINT'}{CONTAINERS[bits]}"
    assert storage.low <= spec.qmin and spec.qmax <= storage.high
    assert num_bits(spec.qmin, spec.qmax) == bits


@pytest.mark.parametrize("bits", range(2, 17))
def test_a_narrow_grid_has_the_bits_of_the_whole_one(bits: int) -> None:
    spec = TensorSpec(bits, True, narrow=True)
    assert num_bits(spec.qmin, spec.qmax) == bits
    assert storage_for(spec.qmin, spec.qmax, WIDTHS, "").width == CONTAINERS[bits]


def test_activations_have_8_or_16_bits_in_a_file() -> None:
    assert [storage_for(0, (1 << bits) - 1, ACTIVATION_WIDTHS, "").name for bits in (2, 7, 8, 9, 16)] == listed("""
        UINT8 | UINT8 | UINT8 | UINT16 | UINT16
    """)


def test_a_bias_is_int32_wherever_it_stands() -> None:
    assert storage_for(-(1 << 31), (1 << 31) - 1, frozenset({8}), "fc.bias").name == "INT32"


@pytest.mark.parametrize(("bits", "opset"), [(2, 25), (4, 21), (8, 13), (16, 21)])
def test_the_opset_of_a_type(bits: int, opset: int) -> None:
    spec = TensorSpec(bits, True)
    assert storage_for(spec.qmin, spec.qmax, WIDTHS, "").opset == opset


def test_too_many_bits_name_the_site() -> None:
    with pytest.raises(DeploymentError, match=r"layer1\.conv\.weight: 16 bits; .* has 8"):
        storage_for(-(1 << 15), (1 << 15) - 1, frozenset({4, 8}), "layer1.conv.weight")
