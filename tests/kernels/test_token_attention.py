"""The attention of one token: the kernels against torch's attention, interpreted on a CPU and on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from types import ModuleType

import pytest
import torch
from torch import Tensor

MISFITS = ((2, 1, 1, 199), (3, 1, 1, 200), (2, 8, 1, 200), (200,))
TOLERANCES = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


@pytest.fixture
def kernels(load_kernels: Callable[[str], ModuleType]) -> ModuleType:
    return load_kernels("token_attention")


def tensors(
    device: str,
    *,
    batch: int = 2,
    heads: tuple[int, int] = (8, 2),
    places: int = 200,
    width: int = 64,
    value_width: int | None = None,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    query = torch.randn(batch, 1, heads[0], width, device=device).transpose(1, 2)
    key = torch.randn(batch, heads[1], places, width, device=device)
    value = torch.randn(batch, heads[1], places, value_width or width, device=device)
    return query.to(dtype), key.to(dtype), value.to(dtype)


def assert_equal(kernels: ModuleType, given: tuple[Tensor, ...], mask: Tensor | None, processors: int = 16) -> None:
    query, key, value = given
    found = kernels.in_parts(query, key, value, mask, 0.125, processors)
    wanted = kernels.definition(query.double(), key.double(), value.double(), mask, 0.125)
    assert found.dtype == query.dtype and found.shape == wanted.shape
    limit = TOLERANCES[query.dtype]
    torch.testing.assert_close(found.double(), wanted, rtol=limit, atol=limit)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("processors", [1, 16, 1000])
def test_any_number_of_parts_gives_torch_attention(
    kernels: ModuleType, device: str, dtype: torch.dtype, processors: int
) -> None:
    if device == "cpu" and dtype == torch.bfloat16:
        pytest.skip("triton's interpreter multiplies bfloat16 as whole numbers")
    assert_equal(kernels, tensors(device, dtype=dtype), None, processors)


@pytest.mark.parametrize("sizes", [
    {"heads": (4, 4)}, {"heads": (3, 1)}, {"heads": (32, 1)}, {"heads": (7, 7), "batch": 1, "places": 1},
    {"width": 80, "value_width": 24}, {"width": 8}, {"places": 64}, {"places": 65},
], ids=str)  # fmt: skip
def test_sizes_that_fill_no_tile(kernels: ModuleType, device: str, sizes: dict[str, int]) -> None:
    assert_equal(kernels, tensors(device, **sizes), None)


def test_excluded_places_are_not_read(kernels: ModuleType, device: str) -> None:
    query, key, value = tensors(device)
    mask = torch.zeros(2, 1, 1, 200, dtype=torch.bool, device=device)
    mask[0, ..., :3] = True
    mask[1, ..., 60:180:3] = True
    shared = mask[:1]
    for given in (mask, shared, shared.expand(2, -1, -1, -1)):
        assert_equal(kernels, (query, key, value), given)
    for free in (key, value):
        free[:, :, 190:] = torch.nan
    found = kernels.in_parts(query, key, value, mask, 0.125, 16)
    wanted = kernels.definition(query, key[:, :, :190], value[:, :, :190], mask[..., :190], 0.125)
    torch.testing.assert_close(found, wanted, rtol=2e-6, atol=2e-6)


def test_without_a_place_the_answer_is_zero_as_that_of_torch(kernels: ModuleType, device: str) -> None:
    query, key, value = tensors(device, batch=2)
    mask = torch.ones(2, 1, 1, 200, dtype=torch.bool, device=device)
    mask[1] = False
    found = kernels.in_parts(query, key, value, mask, 0.125, 16)
    assert not found[1].any() and found[0].all()
    assert_equal(kernels, (query, key, value), mask)


def test_far_scores_neither_overflow_nor_vanish(kernels: ModuleType, device: str) -> None:
    query, key, value = tensors(device)
    key[:, :, 100] = 1e4 * query[:, ::4, 0]  # of the first of the heads that share it
    found = kernels.in_parts(query, key, value, None, 0.125, 16)
    torch.testing.assert_close(found[:, ::4, 0], value[:, :, 100])
    key[:, :, 100] *= -1
    found = kernels.in_parts(query, key, value, None, 0.125, 16)
    without = [torch.cat([tensor[:, :, :100], tensor[:, :, 101:]], 2) for tensor in (key, value)]
    wanted = kernels.definition(query, *without, None, 0.125)
    torch.testing.assert_close(found[:, ::4], wanted[:, ::4], rtol=1e-5, atol=1e-5)


def test_views_with_strides_of_their_own(kernels: ModuleType, device: str) -> None:
    query, key, value = tensors(device, places=100)
    key = key.transpose(1, 2).contiguous().transpose(1, 2)
    value = torch.cat([value, value], -1)[..., :64]
    mask = (torch.arange(200, device=device) % 3 > 0)[::2].view(1, 1, 1, 100)
    assert_equal(kernels, (query, key, value), mask)
    assert_equal(kernels, (query, key.transpose(2, 3).contiguous().transpose(2, 3), value), mask)


def test_nothing_in_nothing_out(kernels: ModuleType, device: str) -> None:
    query, key, value = tensors(device, batch=0)
    assert kernels.in_parts(query, key, value, None, 0.125, 16).shape == (0, 8, 1, 64)
    query, key, value = tensors(device, places=0)
    assert not kernels.in_parts(query, key, value, None, 0.125, 16).any()


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # inductor itself
def test_the_operator_compiles_into_a_graph() -> None:
    from sparsebit.kernels.token_attention import definition, takes, token_attention

    query, key, value = tensors("cuda", dtype=torch.bfloat16)
    mask = torch.arange(200, device="cuda").view(1, 1, 1, 200) < 150
    assert takes(query, key, value, mask)

    @torch.compile(fullgraph=True)
    def step(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return token_attention(query * 2, key, value, mask, 0.125) + 1

    wanted = definition(query * 2, key, value, mask, 0.125) + 1
    torch.testing.assert_close(step(query, key, value), wanted, rtol=1.6e-2, atol=1.6e-2)


@pytest.mark.gpu
def test_masks_that_do_not_fit_are_left_to_torch() -> None:
    from sparsebit.kernels.token_attention import takes

    query, key, value = tensors("cuda")
    for shape in MISFITS:
        assert not takes(query, key, value, torch.ones(shape, dtype=torch.bool, device="cuda")), shape
    assert takes(query, key, value, torch.ones(1, 1, 1, 200, dtype=torch.bool, device="cuda"))


def test_which_masks_fit() -> None:
    from sparsebit.kernels.token_attention import _fits

    _, key, _ = tensors("cpu")
    fitting = {shape: _fits(torch.ones(shape), key) for shape in ((2, 1, 1, 200), (1, 1, 1, 200))}
    others = {
        shape: _fits(torch.ones(shape), key) for shape in ((2, 1, 1, 199), (3, 1, 1, 200), (2, 8, 1, 200), (200,))
    }
    assert all(fitting.values()) and not any(others.values())


def test_the_operator_on_a_cpu_is_the_definition() -> None:
    from sparsebit.kernels.token_attention import definition, takes, token_attention

    query, key, value = tensors("cpu")
    assert not takes(query, key, value, None)
    assert torch.equal(token_attention(query, key, value, None, 0.2), definition(query, key, value, None, 0.2))
    torch.library.opcheck(torch.ops.sparsebit.token_attention.default, (query, key, value, None, 0.2))


def test_a_machine_without_a_compiler_keeps_torch_attention(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from sparsebit.kernels import token_attention

    def fails(*_: object) -> Tensor:
        raise RuntimeError("Failed to find C compiler")

    monkeypatch.setattr(token_attention, "in_parts", fails)
    monkeypatch.setattr(token_attention, "has_triton", lambda: True)
    assert not token_attention.compiles_on.__wrapped__(torch.device("cpu"))
    assert not caplog.text
    with monkeypatch.context() as patch:  # the tensors of the trial, without a GPU
        for name in ("zeros", "ones"):
            patch.setattr(torch, name, lambda *_, **__: torch.empty(0))
        patch.setattr(torch.cuda, "device", nullcontext)
        assert not token_attention.compiles_on.__wrapped__(torch.device("cuda"))
    assert "Failed to find C compiler" in caplog.text


@pytest.mark.gpu
def test_it_compiles_on_this_gpu() -> None:
    from sparsebit.kernels.token_attention import compiles_on

    assert compiles_on(torch.device("cuda"))
