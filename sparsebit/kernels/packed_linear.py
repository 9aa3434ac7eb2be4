"""`packed_linear`: a linear layer whose packed weight is unpacked inside the product, on Hopper GPUs and newer.

The programs are in `packed_linear.cu`; torch compiles them with NVRTC at their first use, without a CUDA toolkit. The
number of rows of x decides which of four ways is taken, by measurement (`benchmarks/packed_linear.py`): `few_rows` (a
token), `some_rows`, `many_rows` (tensor cores of warpgroups, on Hopper), or unpacking the whole weight before torch's
product. `definition` is the reference for all of them.

`fragment_weight` packs a weight into the order of `tensor_core_layout.py`, and pads its outputs; `packed_linear` cuts
the padding off. `packed_linear_tiles.py` divides the work of a product among blocks of threads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear, pad

from sparsebit.errors import SpecError
from sparsebit.kernels.cuda_driver import CompiledKernel, on_device, rows_map
from sparsebit.kernels.packed_linear_tiles import FewRowsCut, ManyRowsCut, few_rows_cut, many_rows_cut
from sparsebit.kernels.tensor_core_layout import BITS, BLOCK, ROWS, arrange, bits_of, restore

DTYPES = (torch.bfloat16, torch.float16)
GROUP_SIZES = (32, 64, 128)
_KERNELS = ("few_rows", "some_rows", "dequantize", "reorder", "sum_parts", "many_rows", "sum_spans")
# The largest number of rows of x for each program; for `many_rows` by bits.
_MOST_FEW, _MOST_SOME, _MOST_MANY = 16, 48, {2: 4096, 3: 2048, 4: 4096, 8: 1024}
_MOST_SOME_OF_EIGHT_BITS = 64
_MOST_SOME_OF_SMALL, _SMALL = 64, 1 << 25  # for weights of 4 bits with at most this many numbers
# For `many_rows` on Hopper: bytes of shared memory that a block may have for stages, and the most stages.
_SHARED, _SPARE_SHARED, _MOST_STAGES = 226 * 1024, 1024, 8  # spare: to start at a multiple of 1024


@dataclass(frozen=True)
class FragmentWeight:
    """A packed GPU weight: words of `tensor_core_layout.arrange`, scales and zero points `(inputs / group, outputs)`.

    Outputs are padded to a multiple of 128, with scales of 0. `zeros` is None where every zero point is the middle,
    `2**(bits - 1)`.
    """

    words: Tensor
    scales: Tensor
    zeros: Tensor | None
    outputs: int

    @property
    def inputs(self) -> int:
        return int(self.words.shape[1]) * BLOCK

    @property
    def group_size(self) -> int:
        return self.inputs // len(self.scales)

    @property
    def bits(self) -> int:
        return bits_of(self.words)


def fragment_weight(codes: Tensor, scales: Tensor, zeros: Tensor | None = None, bits: int = 4) -> FragmentWeight:
    """The weight `(codes - zeros) * scales` for `packed_linear`.

    `codes`: from 0 to `2**bits - 1`, `(outputs, inputs)`. `scales`: bfloat16 or float16, `(outputs, inputs / group)`.
    `zeros`: whole numbers in the range of the codes and the shape of the scales; default: the middle.
    """
    if bits not in BITS:
        raise SpecError(f"{bits} bits; allowed: {', '.join(map(str, BITS))}")
    outputs, inputs = codes.shape
    group = inputs // scales.shape[-1] if scales.shape[-1] else 0
    if inputs % BLOCK or group not in GROUP_SIZES or scales.shape != (outputs, inputs // group):
        raise SpecError(
            f"codes {tuple(codes.shape)} with scales {tuple(scales.shape)}: inputs are a multiple of {BLOCK}, in "
            f"groups of {', '.join(map(str, GROUP_SIZES))}"
        )
    if scales.dtype not in DTYPES:
        raise SpecError(f"scales are {scales.dtype}; allowed: {', '.join(map(str, DTYPES))}")
    for what, values in (("codes", codes), ("zero points", zeros)):
        if values is not None and values.numel() and not 0 <= int(values.min()) <= int(values.max()) < 1 << bits:
            raise SpecError(f"{what} from {int(values.min())} to {int(values.max())}; allowed: 0 to {(1 << bits) - 1}")
    more = -outputs % ROWS
    words = arrange(pad(codes, (0, 0, 0, more)), bits)
    by_group = pad(scales, (0, 0, 0, more)).t().contiguous()
    offsets = None if zeros is None else pad(zeros, (0, 0, 0, more)).t().to(torch.uint8).contiguous()
    return FragmentWeight(words, by_group, offsets, outputs)


def definition(x: Tensor, weight: FragmentWeight) -> Tensor:
    """`packed_linear` in plain torch: the weight is rounded to the scales' type, then multiplied."""
    return linear(x, dequantized(weight))


def dequantized(weight: FragmentWeight) -> Tensor:
    """The weight `(outputs, inputs)` in the scales' type, in plain torch."""
    zeros = 1 << weight.bits - 1 if weight.zeros is None else weight.zeros.t()[:, :, None].to(weight.scales)
    grouped = restore(weight.words).to(weight.scales).unflatten(1, (-1, weight.group_size)) - zeros
    dense: Tensor = (grouped * weight.scales.t()[:, :, None]).flatten(1)
    return dense[: weight.outputs]


def dense_weight(weight: FragmentWeight) -> Tensor:
    """`dequantized` by its GPU program if that runs: the weight for the backward of training."""
    if not runs_on(weight.words.device):
        return dequantized(weight)
    with on_device(weight.words.device):
        return Product(weight.scales, weight).dense()[: weight.outputs]


@cache
def runs_on(device: torch.device) -> bool:
    """Whether the programs run there: an NVIDIA GPU of compute capability 9.0 or newer, and a torch that can
    compile.
    """
    if device.type != "cuda" or torch.version.hip or not hasattr(torch.cuda, "_compile_kernel"):
        return False
    return bool(torch.cuda.get_device_capability(device) >= (9, 0))


def packed_linear(x: Tensor, weight: FragmentWeight) -> Tensor:
    """`x @ W.T`, x of shape `(..., inputs)` in the type of the scales."""
    if x.dtype != weight.scales.dtype or x.shape[-1] != weight.inputs:
        raise SpecError(
            f"x is {x.dtype} {tuple(x.shape)}; the weight takes {weight.scales.dtype} with {weight.inputs} inputs"
        )
    rows = x.reshape(-1, weight.inputs)
    needs_operator = (
        torch.compiler.is_compiling() or type(x) is not Tensor or (x.requires_grad and torch.is_grad_enabled())
    )
    if needs_operator or not len(rows) or not runs_on(x.device):
        y: Tensor = torch.ops.sparsebit.packed_linear(rows, weight.words, weight.scales, weight.zeros)
    else:  # calling an operator in Python takes longer than running its kernels
        y = _product(rows, weight)
    return y[:, : weight.outputs].reshape(*x.shape[:-1], weight.outputs)


@torch.library.custom_op("sparsebit::packed_linear", mutates_args=())
def _packed_linear(x: Tensor, words: Tensor, scales: Tensor, zeros: Tensor | None) -> Tensor:
    weight = FragmentWeight(words, scales, zeros, scales.shape[1])
    if not runs_on(x.device):
        return definition(x, weight)
    if not len(x):
        return x.new_empty(0, scales.shape[1])
    return _product(x, weight)


def _product(x: Tensor, weight: FragmentWeight) -> Tensor:
    with on_device(x.device):
        return Product(aligned(x), weight).compute()


def aligned(x: Tensor) -> Tensor:
    """A contiguous copy that begins at a multiple of 16 bytes, as programs load it; a view may begin anywhere."""
    x = x.contiguous()
    return x.clone() if x.data_ptr() % 16 else x


@_packed_linear.register_fake
def _shape(x: Tensor, words: Tensor, scales: Tensor, zeros: Tensor | None) -> Tensor:
    return x.new_empty(x.shape[0], scales.shape[1])


class Product:
    """One product: the program and its sizes. `compute` chooses; benchmarks call each of them."""

    def __init__(self, x: Tensor, weight: FragmentWeight) -> None:
        self.x, self.weight = x, weight
        self.num_rows, self.inputs, self.outputs = len(x), weight.inputs, weight.scales.shape[1]
        self.num_processors, self.capability = _processors(x.device)
        zeros = weight.scales if weight.zeros is None else weight.zeros  # a placeholder that is not read
        given = [weight.words, weight.scales, zeros]
        self.operands = [tensor.contiguous() for tensor in given]
        self.are_copies = not all(tensor.is_contiguous() for tensor in given)

    def compute(self) -> Tensor:
        if self.num_rows <= _MOST_FEW:
            return self.few_rows()
        is_eight = self.weight.bits == 8
        is_small = self.weight.bits == 4 and self.inputs * self.outputs <= _SMALL
        most_some = _MOST_SOME_OF_EIGHT_BITS if is_eight else _MOST_SOME_OF_SMALL if is_small else _MOST_SOME
        if self.num_rows <= most_some or (self.capability != "90" and self.num_rows <= 4 * _MOST_SOME):
            return self.some_rows()
        if self.capability == "90" and self.num_rows <= _MOST_MANY[self.weight.bits]:
            return self.many_rows()
        return self.dequantized()

    def few_rows(self, cut: FewRowsCut | None = None) -> Tensor:
        cut = cut or few_rows_cut(self.num_rows, self.outputs, self.weight.bits, self.num_processors)
        y = self.output()
        sizes = {"RT": cut.height, "MB": self.columns(8), "WARPS": cut.warps, "MINB": cut.resident}
        sizes |= {"DEPTH": cut.depth, "AHEAD": int(cut.scales_ahead)}
        grid = (self.outputs // 16 // cut.height, 1, 1)
        self.run("few_rows", sizes, grid, 32 * cut.warps, [*self.operands, self.x, y, *self.shape])
        return y

    def some_rows(self) -> Tensor:
        warps, height, columns = 4, 2, min(8, self.columns(8))
        across, down = self.outputs // (16 * height * warps), -(-self.num_rows // (8 * columns))
        parts = self.num_parts(900 // (across * down), self.inputs // BLOCK // 4)
        sums = self.x.new_empty(parts, self.num_rows, self.outputs, dtype=torch.float32)
        sizes = {"RT": height, "MB": columns, "WARPS": warps}
        self.run("some_rows", sizes, (across, parts, down), 32 * warps, [*self.operands, self.x, sums, *self.shape])
        return self.added(sums)

    def many_rows(self, cut: ManyRowsCut | None = None) -> Tensor:
        if cut is None:
            cut = many_rows_cut(self.num_rows, self.outputs, self.inputs, self.weight.bits, self.num_processors)
        work = cut.work(self.num_rows, self.outputs, self.inputs, self.num_processors)
        tile = {"BM": cut.height, "PIECES": cut.pieces, "WG": cut.groups, "R": cut.times}
        stage = self.stage_bytes(cut.height, cut.width) if cut.staged else cut.height * 128
        stages = min(_MOST_STAGES, (_SHARED - _SPARE_SHARED) // stage)
        is_natural = cut.staged and self.weight.bits != 3
        x = self.x if is_natural else self.reordered()
        sizes = {**tile, "STG": stages, "STAGED": int(cut.staged), "NATURAL": int(is_natural)}
        y = self.output()
        parts = self.x.new_empty(2 * work.spans, cut.height * cut.width, dtype=torch.float32)
        shape = [self.num_rows, self.outputs, -(-self.num_rows // cut.height), work]
        values = [*self.operands, rows_map(x, cut.height // cut.pieces), y, parts, *shape]
        threads = 128 * cut.groups + (128 if cut.groups > 1 else 32)
        self.run("many_rows", sizes, (work.blocks, 1, 1), threads, values, stages * stage + _SPARE_SHARED)
        if work.spans:
            grid = (cut.height // 8 * cut.times, work.rest, 1)
            self.run("sum_spans", tile, grid, 128 * cut.groups, [parts, y, *shape])
        return y

    def reordered(self) -> Tensor:
        x = torch.empty_like(self.x)
        count = x.numel() // 8
        self.run("reorder", {}, (-(-count // 256), 1, 1), 256, [self.x, x, count])
        return x

    def stage_bytes(self, height: int, width: int) -> int:
        """Bytes of 64 k of x, words, scales and zero points in the shared memory of `many_rows`."""
        words = {2: 32, 3: 48, 4: 32, 8: 64}[self.weight.bits] * width
        scales = max(1, 64 // self.weight.group_size) * width * (2 if self.weight.zeros is None else 3)
        return -(-(height * 128 + words + scales) // 1024) * 1024

    def dequantized(self) -> Tensor:
        return self.x @ self.dense().t()

    def dense(self) -> Tensor:
        dense = self.x.new_empty(self.outputs, self.inputs)
        warps = 8
        grid = (-(-self.inputs // BLOCK // warps), self.outputs // 16, 1)
        values = [*self.operands, dense, self.outputs, self.inputs]
        self.run("dequantize", {"WARPS": warps}, grid, 32 * warps, values)
        return dense

    def run(
        self,
        name: str,
        sizes: dict[str, int],
        grid: tuple[int, int, int],
        threads: int,
        values: Sequence[Any],
        shared: int = 0,
    ) -> None:
        has_zero = self.weight.zeros is not None
        defines = {
            **sizes,
            "KERNEL": 1 + _KERNELS.index(name),
            "BITS": self.weight.bits,
            "HALF": int(self.x.dtype == torch.float16),
            "HAS_ZERO": int(has_zero),
            "GT": self.weight.group_size // 16,
        }
        program = _compiled(name, self.x.device.index, self.capability, shared, tuple(defines.items()))
        # A program starts while the one before it ends, and loads words and scales before it waits for that. In a CUDA
        # graph no program writes to them, unless they are copied there.
        overlapped = torch.cuda.is_current_stream_capturing() and not self.are_copies
        program.launch(grid, threads, values, overlapped=overlapped)

    def added(self, sums: Tensor) -> Tensor:
        y = self.output()
        self.run("sum_parts", {}, (-(-y.numel() // 256), 1, 1), 256, [sums, y, len(sums), y.numel()])
        return y

    def num_parts(self, wanted: int, most: int) -> int:
        """The number of parts of K: a power of two, so that the blocks fill the GPU."""
        found = max(1, min(wanted, most))
        return int(1 << (found.bit_length() - 1))

    def columns(self, size: int) -> int:
        return -(-self.num_rows // size)

    def output(self) -> Tensor:
        return self.x.new_empty(self.num_rows, self.outputs)

    @property
    def shape(self) -> list[int]:
        return [self.num_rows, self.outputs, self.inputs]


@cache
def _processors(device: torch.device) -> tuple[int, str]:
    """How many multiprocessors a GPU has, and its compute capability."""
    properties = torch.cuda.get_device_properties(device)
    return properties.multi_processor_count, f"{properties.major}{properties.minor}"


@cache
def _compiled(
    name: str, device: int | None, capability: str, shared: int, defines: tuple[tuple[str, int], ...]
) -> CompiledKernel:
    """The program for the current GPU, `device`: the driver loads it there, and another GPU cannot run it."""
    source = Path(__file__).with_suffix(".cu").read_text()
    sizes = dict(defines)
    product = ""
    if name == "many_rows":
        product = _warpgroup_product(sizes["BM"] // sizes["PIECES"], "f16" if sizes["HALF"] else "bf16")
        capability += "a"  # instructions of this architecture alone
    source = source.replace("@WGMMA@", product)
    lines = "".join(f"#define {key} {value}\n" for key, value in defines)
    options = ["--std=c++17", "-diag-suppress=177"]
    compile_kernel: Any = torch.cuda._compile_kernel
    return CompiledKernel(
        compile_kernel(lines + source, name, compute_capability=capability, nvcc_options=options), shared
    )


def _warpgroup_product(width: int, kind: str) -> str:
    """The instruction, which names every register of its sums: 64 x `width`, A in registers, B in shared memory."""
    count = width // 2
    sums = ", ".join(f"%{index}" for index in range(count))
    bound = ", ".join(f'"+f"(d[{index}])' for index in range(count))
    a = ", ".join(f"%{count + index}" for index in range(4))
    return f"""
__device__ __forceinline__ void wgmma(float* d, const u32* a, unsigned long long b) {{
  asm volatile("{{ .reg .pred p; setp.ne.b32 p, 1, 0; wgmma.mma_async.sync.aligned.m64n{width}k16.f32.{kind}.{kind} "
    "{{{sums}}}, {{{a}}}, %{count + 4}, p, 1, 1, 0; }}"
    : {bound} : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}}
"""
