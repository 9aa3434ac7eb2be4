"""Small nets, each with one thing that ties channels together, and the batch for it."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations


def conv(inputs: int, outputs: int, **options: int) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, 3, padding=1, **options)


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.bn, self.b, self.head = conv(3, 8), nn.BatchNorm2d(8), conv(8, 6), nn.Linear(6 * 16, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.b(F.relu(self.bn(self.a(x)), inplace=True))).flatten(1))


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.a, self.b, self.head = conv(3, 8), conv(8, 10), conv(10, 8), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x = x + self.b(F.silu(self.a(x)))
        return self.head(x.mean((2, 3)))


class PaddedShortcut(nn.Module):
    """ResNet-20's: the shortcut pads channels with zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.a, self.b, self.head = conv(3, 8), conv(8, 16), conv(16, 16), nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.stem(x))
        x = self.b(F.relu(self.a(x))) + F.pad(x, (0, 0, 0, 0, 4, 4))
        return self.head(F.relu(x).mean((2, 3)))


class Concat(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.a, self.b = conv(3, 8), conv(8, 6), conv(8, 4)
        self.norm, self.last = nn.BatchNorm2d(18), conv(18, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        return self.last(self.norm(torch.cat([self.a(x), x, self.b(x)], 1))).mean((2, 3))


class Chunks(nn.Module):
    """A gated unit: both halves of one layer meet again."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(12, 20), nn.Linear(10, 5)

    def forward(self, x: Tensor) -> Tensor:
        value, gate = self.a(x).chunk(2, -1)
        return self.b(value * torch.sigmoid(gate))


class CrossStage(nn.Module):
    """Half of an attribute is the width of each of two parts: parts must lose the same places, and it must follow."""

    def __init__(self) -> None:
        super().__init__()
        self.width, self.a, self.b, self.c = 12, conv(3, 12), conv(6, 8), conv(14, 4)

    def forward(self, x: Tensor) -> Tensor:
        short, long = torch.relu(self.a(x)).split(self.width // 2, 1)
        return self.c(torch.cat([short, torch.relu(self.b(long))], 1)).mean((2, 3))


class ConstantSplit(nn.Module):
    """The width of a part is in the code. The layers in front of `a` and behind it are free."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.a, self.b, self.c, self.d = conv(3, 5), conv(5, 8), conv(4, 6), conv(10, 7), conv(7, 4)

    def forward(self, x: Tensor) -> Tensor:
        short, long = torch.relu(self.a(torch.relu(self.first(x)))).split(4, 1)
        return self.d(torch.relu(self.c(torch.cat([short, torch.relu(self.b(long))], 1)))).mean((2, 3))


class UnequalUse(nn.Module):
    """The halves go different ways, so that each must keep its half of the channels."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = conv(3, 12), conv(6, 8), conv(14, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        one, two = self.a(x).chunk(2, 1)
        return self.d(self.c(torch.cat([one, self.b(two)], 1)).mean((2, 3)))


class Unbind(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(12, 3 * 8), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.a(x).view(x.shape[0], 3, -1).unbind(1)
        return self.b(q * k + v)


class Depthwise(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.dw, self.c = conv(3, 8), conv(8, 16, groups=8), conv(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(F.relu6(self.dw(F.relu6(self.a(x))))).mean((2, 3))


class ManyGroups(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.g, self.c = conv(3, 16), conv(16, 24, groups=8), conv(24, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(F.relu(self.g(F.relu(self.a(x))))).mean((2, 3))


class FewGroups(nn.Module):
    """Two groups of eight: the same places of each group go."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.g, self.c = conv(3, 16), conv(16, 12, groups=2), conv(12, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(F.relu(self.g(F.relu(self.a(x))))).mean((2, 3))


class GroupsOfShape(nn.Module):
    """A depthwise convolution whose forward reads the number of groups from the shape."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.weight, self.c = conv(3, 8), nn.Parameter(torch.randn(8, 1, 3, 3)), conv(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        return self.c(F.conv2d(x, self.weight, padding=1, groups=x.shape[1])).mean((2, 3))


class Transposed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.up = conv(3, 8), nn.ConvTranspose2d(8, 6, 2, 2)
        self.wide, self.c = nn.ConvTranspose2d(6, 12, 2, 2, groups=6), conv(12, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.wide(F.relu(self.up(F.relu(self.a(x)))))).mean((2, 3))


class Norms(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.group = conv(3, 16), nn.GroupNorm(8, 16)
        self.b, self.instance = conv(16, 12), nn.InstanceNorm2d(12, affine=True)
        self.c, self.prelu, self.d = conv(12, 8), nn.PReLU(8), conv(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.instance(self.b(F.relu(self.group(self.a(x)))))
        return self.d(self.prelu(self.c(x))).mean((2, 3))


class Shuffle(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = conv(3, 16), conv(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        n, c, h, w = x.shape
        x = x.view(n, 4, c // 4, h, w).transpose(1, 2).reshape(n, c, h, w)
        return self.b(F.relu(x)).mean((2, 3))


class PixelShuffle(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.up, self.b = conv(3, 24), nn.PixelShuffle(2), conv(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(F.relu(self.up(self.a(x)))).mean((2, 3))


class SqueezeExcite(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.down, self.up, self.b = conv(3, 12), nn.Conv2d(12, 4, 1), nn.Conv2d(4, 12, 1), conv(12, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        gate = torch.sigmoid(self.up(F.relu(self.down(x.mean((2, 3), keepdim=True)))))
        return self.b(x * gate.expand_as(x)).mean((2, 3))


class Attention(nn.Module):
    """With a joint q, k, v; the number of heads is an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.scale, self.qkv, self.proj = 4, 1 / math.sqrt(3), nn.Linear(12, 36), nn.Linear(12, 12)

    def forward(self, x: Tensor) -> Tensor:
        b, n, _ = x.shape
        q, k, v = self.qkv(x).reshape(b, n, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        weights = (q @ k.transpose(-2, -1) * self.scale).softmax(-1)
        return self.proj((weights @ v).transpose(1, 2).flatten(2))


class OwnLinear(nn.Module):
    """GPT-2's: a matrix the other way round, and the width as an attribute."""

    def __init__(self, outputs: int, inputs: int) -> None:
        super().__init__()
        self.nf, self.weight, self.bias = (
            outputs,
            nn.Parameter(torch.randn(inputs, outputs) / 4),
            nn.Parameter(torch.randn(outputs)),
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight).view(*x.shape[:-1], self.nf)


class SplitAttention(nn.Module):
    """Two attributes, of two classes, must follow before the run comes to the next product."""

    def __init__(self) -> None:
        super().__init__()
        self.split_size, self.head_dim = 12, 3
        self.joint, self.out = OwnLinear(36, 12), OwnLinear(12, 12)
        self.up, self.down = OwnLinear(20, 12), OwnLinear(12, 20)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.joint(x).split(self.split_size, dim=2)
        q, k, v = (part.view(*x.shape[:2], -1, self.head_dim).transpose(1, 2) for part in parts)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(x)))


class GroupedQuery(nn.Module):
    """Six query heads share two key and value heads, as in LLaMA."""

    def __init__(self) -> None:
        super().__init__()
        self.head_dim = 4
        self.q, self.k, self.v, self.out = nn.Linear(12, 24), nn.Linear(12, 8), nn.Linear(12, 8), nn.Linear(24, 12)

    def forward(self, x: Tensor) -> Tensor:
        b, n, _ = x.shape
        q, k, v = (part(x).view(b, n, -1, self.head_dim).transpose(1, 2) for part in (self.q, self.k, self.v))
        k, v = k.repeat_interleave(3, 1), v.repeat_interleave(3, 1)
        y = F.scaled_dot_product_attention(q, k, v)
        return self.out(y.transpose(1, 2).reshape(b, n, -1))


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.place = nn.Linear(6, 12), nn.Parameter(torch.randn(1, 5, 12))
        self.norm, self.attention = nn.LayerNorm(12), Attention()
        self.norm2, self.up, self.down, self.head = (
            nn.LayerNorm(12),
            nn.Linear(12, 20),
            nn.Linear(20, 12),
            nn.Linear(12, 3),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x) + self.place
        x = x + self.attention(self.norm(x))
        x = x + self.down(F.gelu(self.up(self.norm2(x))))
        return self.head(x[:, 0])


class Shared(nn.Module):
    """One layer, called twice: its inputs and outputs are the same channels."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 10), nn.Linear(10, 10), nn.Linear(10, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(F.relu(self.b(F.relu(self.b(F.relu(self.a(x)))))))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.mix = nn.Embedding(11, 8), nn.Linear(8, 8, bias=False)
        self.up, self.down, self.head = nn.Linear(8, 16), nn.Linear(16, 8), nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.mix(self.embed(ids))
        return self.head(x + self.down(torch.tanh(self.up(x))))


class ReadsLayers(nn.Module):
    """Code that reads sizes from layers and from shapes, and keeps one of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.width = conv(3, 8), conv(8, 12), nn.Linear(12 * 16, 5), 12

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        assert y.shape[1] == self.a.out_channels
        y = self.b(y / self.a.out_channels**0).view(x.shape[0], self.b.out_channels, -1)
        y = y.reshape(x.shape[0], self.width * 16)
        return self.c(y)


class SlicesInPlace(nn.Module):
    """The 4 in the code cannot be changed, so that the first four channels stay."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = conv(3, 8), conv(3, 4), conv(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        y[:, :4] += self.b(x)
        y.relu_()
        return self.c(y).mean((2, 3))


class DataBranch(nn.Module):
    """A branch on data, which no tracer follows, and a hook that doubles the values."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 10), nn.Linear(10, 3)
        self.a.register_forward_hook(lambda _module, _args, output: output * 2)

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        if float(x.abs().max()) > 0:
            y = y.relu()
        return self.b(y)


class Einsum(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.head = nn.Parameter(torch.randn(7, 2, 5) / 4), nn.Linear(10, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.einsum("bi,ihd->bhd", x, self.weight).flatten(1))


class Parametrized(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 10), parametrizations.orthogonal(nn.Linear(10, 10)), nn.Linear(10, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(F.relu(self.b(F.relu(self.a(x)))))


class FixedReshape(nn.Module):
    """The number 8 in the code cannot be changed."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = conv(3, 8), conv(8, 6), conv(6, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x).reshape(-1, 8, 4, 4)
        return self.d(self.c(F.relu(self.b(x))).mean((2, 3)))


class MeanOverChannels(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = conv(3, 8), conv(8, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        return self.c(self.b(x * torch.sigmoid(x.mean(1, keepdim=True))).mean((2, 3)))


class HiddenConstant(nn.Module):
    """The scale of the values depends on the width: nothing fails, but the values differ."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 12), nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        return self.b(x / x.shape[1])


class Softmax(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 12), nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x).softmax(-1))


class Auxiliary(nn.Module):
    """A head that runs in training only."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.aux = conv(3, 8), nn.Linear(8, 3), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        x = self.a(x).mean((2, 3))
        return (self.b(x), self.aux(x)) if self.training else self.b(x)


class DiscardedMean(nn.Module):
    """A mean over channels that nothing uses, as attentions compute it of their weights."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 12), nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        x.mean(1)
        return self.b(x)


class KeptMean(DiscardedMean):
    """The mean is kept, where others may read it."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        self.seen = x.mean(1)
        return self.b(x)


class WritesIntoZeros(nn.Module):
    """Values are written into a tensor of a fixed size: with one channel left they would be broadcast."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = conv(3, 4), conv(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = x.new_zeros(x.shape[0], 8, *x.shape[2:])
        y[:, :4] = self.a(x)
        return self.b(y).mean((2, 3))


class StartsFromZeros(nn.Module):
    """A state that starts as zeros of the width that an attribute says."""

    def __init__(self) -> None:
        super().__init__()
        self.width, self.a, self.b, self.c = 10, nn.Linear(6, 10), nn.Linear(10, 10), nn.Linear(10, 3)

    def forward(self, x: Tensor) -> Tensor:
        state = torch.zeros(x.shape[0], self.width, dtype=x.dtype)
        for _ in range(2):
            state = torch.tanh(self.a(x) + self.b(state))
        return self.c(state)


class Recurrent(nn.Module):
    """The width of what a GRU reads is also the width of its state, and each changes alone."""

    def __init__(self, kind: type[nn.RNNBase] = nn.GRU, is_bidirectional: bool = False) -> None:
        super().__init__()
        self.a, self.gru = nn.Linear(6, 10), kind(10, 10, batch_first=True, bidirectional=is_bidirectional)
        self.b = nn.Linear(20 if is_bidirectional else 10, 3)

    def forward(self, x: Tensor) -> Tensor:
        states, _ = self.gru(torch.relu(self.a(x)))
        return self.b(states[:, -1])


class Bilinear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = nn.Linear(6, 8), nn.Linear(6, 5), nn.Bilinear(8, 5, 7), nn.Linear(7, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.d(F.relu(self.c(F.relu(self.a(x)), F.relu(self.b(x)))))


class ListsWeights(nn.Module):
    """Weights that are read from a list, not from the layers."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 10), nn.Linear(10, 3)
        self.weights = [self.a.weight, {"bias": self.a.bias}]

    def forward(self, x: Tensor) -> Tensor:
        weight, others = self.weights
        return self.b(torch.relu(F.linear(x, weight, others["bias"])))


class NormOverHidden(nn.Module):
    """A norm inside of an MLP, over its neurons."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(6, 10), nn.LayerNorm(10), nn.Linear(10, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.norm(F.gelu(self.a(x))))


class ResponseNorm(nn.Module):
    """Global response normalization between two convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 8, 1), nn.Conv2d(8, 4, 1)
        self.scale, self.shift = nn.Parameter(torch.randn(8, 1, 1)), nn.Parameter(torch.randn(8, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        x = F.gelu(self.a(x))
        norms = x.norm(dim=(2, 3), keepdim=True)
        return self.b(x + self.shift + self.scale * x * (norms / (norms.mean(1, keepdim=True) + 1e-6)))


class WidthOfInput(nn.Module):
    """An attention whose code takes its width from what it reads."""

    def __init__(self) -> None:
        super().__init__()
        self.heads, self.a, self.b = 4, nn.Linear(12, 36), nn.Linear(12, 12)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        parts = self.a(x).reshape(batch, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        query, key, value = parts.unbind(0)
        mixed = (query @ key.transpose(-2, -1)).softmax(-1) @ value
        return self.b(mixed.transpose(1, 2).reshape(batch, length, width))


class NormalizedStream(nn.Module):
    """A residual stream that norms read: it is written again after it was read."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.b, self.c = nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        return self.c(x + self.b(self.norm(x)))


class TransposedWeight(nn.Module):
    """An autoencoder whose decoder is the encoder's weight, transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.bias = nn.Linear(6, 10), nn.Parameter(torch.randn(6))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(torch.relu(self.a(x)), self.a.weight.t(), self.bias)


class HookPads(nn.Module):
    """A hook puts ones beside the channels that a layer reads."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 10), nn.Linear(12, 3)
        self.b.register_forward_pre_hook(lambda _, args: (F.pad(args[0], (0, 2), value=1.0),))

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.relu(self.a(x)))


class ChannelBuffers(nn.Module):
    """Statistics of channels in buffers of two shapes, and one of no channels."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 8, 1), nn.Conv2d(8, 4, 1)
        self.register_buffer("mean", torch.randn(8, 1, 1))
        self.register_buffer("deviation", torch.rand(1, 8, 1, 1) + 0.5)
        self.register_buffer("order", torch.randperm(8))

    def forward(self, x: Tensor) -> Tensor:
        return self.b((self.a(x) - self.mean) / self.deviation)


class OuterProduct(nn.Module):
    """Every channel of one layer times every channel of another."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 4), nn.Linear(6, 5), nn.Linear(20, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.c((self.a(x)[:, :, None] * self.b(x)[:, None]).flatten(1))


class StackedExperts(nn.Module):
    """The weights of all experts in one parameter: the same neurons of each go."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Parameter(torch.randn(4, 6, 8)), nn.Parameter(torch.randn(4, 8, 3))
        self.gate = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        given = F.gelu(x @ self.up) @ self.down
        return (given * self.gate(x).softmax(-1).t()[..., None]).sum(0)


class EmptyPart(nn.Module):
    """A concatenation one part of which has no elements, as code for rotary positions has it."""

    def __init__(self) -> None:
        super().__init__()
        self.heads, self.prefix = 4, 0
        self.q, self.k, self.v, self.b = (nn.Linear(12, 12) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (layer(x).unflatten(-1, (self.heads, 3)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        q = torch.cat([q[:, :, : self.prefix], q[:, :, self.prefix :] * 2], 2)
        return self.b(((q @ k.mT).softmax(-1) @ v).transpose(1, 2).flatten(2))


class Asserts(nn.Module):
    """Code that insists on a width, and says nothing where it is another."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 10), nn.Linear(10, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.a(x))
        assert x.shape[1] == 10
        return self.b(x)


class Gated(nn.Module):
    """A gated linear unit in one operator: one half of the channels gates the other."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 16, 1), nn.Conv2d(8, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(F.glu(self.a(x), 1))


class Caching(nn.Module):
    """A net that keeps computed values from one run to the next, in a list and as a new attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.scale = nn.Conv2d(3, 8, 1), nn.Parameter(torch.rand(1, 8, 1, 1) + 1)
        self.b = nn.Conv2d(8, 4, 1)
        self.kept: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        if not self.kept:
            self.kept.append(self.scale * 2)
        if not hasattr(self, "moved"):
            self.moved = self.scale - 1
        return self.b(self.a(x) * self.kept[0] + self.moved)


def images() -> Tensor:
    return torch.randn(2, 3, 4, 4)


def rows(width: int = 6) -> Tensor:
    return torch.randn(4, width)


Build = Callable[[], tuple[nn.Module, Tensor]]
# Nets of which something can be removed: how many units.
PRUNABLE: dict[str, tuple[Build, int]] = {
    "chain": (lambda: (Chain(), images()), 14),
    "residual": (lambda: (Residual(), images()), 18),
    "padded shortcut": (lambda: (PaddedShortcut(), images()), 24),
    "concat": (lambda: (Concat(), images()), 18),
    "chunks": (lambda: (Chunks(), rows(12)), 10),
    "cross stage": (lambda: (CrossStage(), images()), 6 + 8),
    "constant split": (lambda: (ConstantSplit(), images()), 5 + 7 + 14),
    "unequal use": (lambda: (UnequalUse(), images()), 6 + 8 + 4),
    "unbind": (lambda: (Unbind(), rows(12)), 8),
    "depthwise": (lambda: (Depthwise(), images()), 8),
    "many groups": (lambda: (ManyGroups(), images()), 8),
    "few groups": (lambda: (FewGroups(), images()), 8 + 6),
    "groups of shape": (lambda: (GroupsOfShape(), images()), 8),
    "transposed": (lambda: (Transposed(), images()), 8 + 6),
    "norms": (lambda: (Norms(), images()), 8 + 12 + 8),
    "shuffle": (lambda: (Shuffle(), images()), 4),
    "pixel shuffle": (lambda: (PixelShuffle(), images()), 6),
    "squeeze excite": (lambda: (SqueezeExcite(), images()), 12 + 4),
    "attention": (lambda: (Attention(), torch.randn(2, 5, 12)), 4),
    "split attention": (lambda: (SplitAttention(), torch.randn(2, 5, 12)), 4 + 20),
    "grouped query": (lambda: (GroupedQuery(), torch.randn(2, 5, 12)), 2),
    "transformer": (lambda: (Transformer(), torch.randn(2, 5, 6)), 4 + 20),
    "shared": (lambda: (Shared(), rows()), 10),
    "tied": (lambda: (Tied(), torch.randint(0, 11, (2, 5))), 8 + 16),
    "reads layers": (lambda: (ReadsLayers(), images()), 8 + 12),
    "slices in place": (lambda: (SlicesInPlace(), images()), 4),
    "data branch": (lambda: (DataBranch(), rows()), 10),
    "einsum": (lambda: (Einsum(), rows(7)), 2),
    "orthogonal weight": (lambda: (Parametrized(), rows()), 20),
    "auxiliary": (lambda: (Auxiliary(), images()), 8),
    "discarded mean": (lambda: (DiscardedMean(), rows()), 12),
    "starts from zeros": (lambda: (StartsFromZeros(), rows()), 10),
    "recurrent": (lambda: (Recurrent(), torch.randn(2, 3, 6)), 10 + 10),
    "recurrent, both directions": (lambda: (Recurrent(nn.GRU, True), torch.randn(2, 3, 6)), 10 + 10),
    "recurrent, without gates": (lambda: (Recurrent(nn.RNN), torch.randn(2, 3, 6)), 10 + 10),
    "recurrent, with cells": (lambda: (Recurrent(nn.LSTM), torch.randn(2, 3, 6)), 10 + 10),
    "bilinear": (lambda: (Bilinear(), rows()), 8 + 5 + 7),
    "lists weights": (lambda: (ListsWeights(), rows()), 10),
    "caching": (lambda: (Caching(), images()), 8),
    "gated": (lambda: (Gated(), images()), 8),
    "transposed weight": (lambda: (TransposedWeight(), rows()), 10),
    "hook pads": (lambda: (HookPads(), rows()), 10),
    "channel buffers": (lambda: (ChannelBuffers(), images()), 8),
    "outer product": (lambda: (OuterProduct(), rows()), 4),
    "stacked experts": (lambda: (StackedExperts(), rows()), 8),
    "empty part": (lambda: (EmptyPart(), torch.randn(2, 5, 12)), 4),
}
# Nets with layers `a` and `b` that can lose the channels between them, which the code between cannot: the reason.
WIDE: dict[str, tuple[Build, str]] = {
    "size in the code": (lambda: (FixedReshape(), images()), "not proved"),
    "mean over channels": (lambda: (MeanOverChannels(), images()), "mean in the model is taken over them"),
    "hidden constant": (lambda: (HiddenConstant(), rows()), "returns other values without them"),
    "kept mean": (lambda: (KeptMean(), rows()), "mean in the model is taken over them"),
    "norm over hidden": (lambda: (NormOverHidden(), rows()), "native_layer_norm in norm normalizes over them"),
    "response norm": (lambda: (ResponseNorm(), images()), "mean in the model is taken over them"),
    "assertion": (lambda: (Asserts(), rows()), "not proved: the model fails at the smaller size: AssertionError"),
    "width of the input": (lambda: (WidthOfInput(), torch.randn(2, 5, 12)), "not proved: the model fails"),
}
# Nets with a layer `a` whose outputs must be spared, and words of the reason.
SPARED: dict[str, tuple[Build, str]] = {
    "writes into zeros": (lambda: (WritesIntoZeros(), images()), "combines them with values that must stay"),
    "softmax": (lambda: (Softmax(), rows()), "softmax in the model mixes them"),
    "normalized stream": (lambda: (NormalizedStream(), rows()), "native_layer_norm in norm normalizes over them"),
}
