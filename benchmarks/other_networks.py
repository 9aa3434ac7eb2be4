"""Small networks for CIFAR-10 of well-known shapes, at most 2 M parameters, that no default was tuned on.

`other_networks_train.py` trains them, `effort.py --other` measures them.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Make = Callable[[], nn.Module]


def conv_bn(
    cin: int, cout: int, k: int = 3, stride: int = 1, groups: int = 1, act: Make | None = nn.ReLU
) -> nn.Sequential:
    layers = [nn.Conv2d(cin, cout, k, stride, k // 2, groups=groups, bias=False), nn.BatchNorm2d(cout)]
    return nn.Sequential(*layers, act()) if act is not None else nn.Sequential(*layers)


class VGG(nn.Module):
    """VGG-11 with batch norm, narrower: no residuals, max pooling, two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        cin = 3
        for width in (32, 0, 64, 0, 128, 128, 0, 192, 192, 0, 192, 192, 0):
            if not width:
                layers.append(nn.MaxPool2d(2))
            else:
                layers.append(conv_bn(cin, width))
                cin = width
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Sequential(nn.Linear(cin, 128), nn.ReLU(), nn.Dropout(0.2), nn.Linear(128, 10))

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(torch.flatten(self.features(x), 1))


class PreActBlock(nn.Module):
    def __init__(self, cin: int, cout: int, stride: int) -> None:
        super().__init__()
        self.bn1, self.conv1 = nn.BatchNorm2d(cin), nn.Conv2d(cin, cout, 3, stride, 1, bias=False)
        self.bn2, self.conv2 = nn.BatchNorm2d(cout), nn.Conv2d(cout, cout, 3, 1, 1, bias=False)
        self.shortcut = nn.Conv2d(cin, cout, 1, stride, bias=False) if cin != cout else None

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.bn1(x))
        skip = x if self.shortcut is None else self.shortcut(out)
        return self.conv2(F.relu(self.bn2(self.conv1(out)))) + skip


class WideResNet(nn.Module):
    """WideResNet-16-2: batch norm and ReLU in front of each convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 16, 3, 1, 1, bias=False)
        blocks: list[nn.Module] = []
        cin = 16
        for i, cout in enumerate((32, 64, 128)):
            for j in range(2):
                blocks.append(PreActBlock(cin, cout, 2 if i and not j else 1))
                cin = cout
        self.blocks, self.bn, self.fc = nn.Sequential(*blocks), nn.BatchNorm2d(cin), nn.Linear(cin, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn(self.blocks(self.conv1(x))))
        return self.fc(torch.flatten(F.adaptive_avg_pool2d(x, 1), 1))


class SqueezeExcite(nn.Module):
    def __init__(self, channels: int, hidden: int, act: Make = nn.ReLU, gate: Make = nn.Sigmoid) -> None:
        super().__init__()
        self.pool, self.reduce, self.act = nn.AdaptiveAvgPool2d(1), nn.Conv2d(channels, hidden, 1), act()
        self.expand, self.gate = nn.Conv2d(hidden, channels, 1), gate()

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gate(self.expand(self.act(self.reduce(self.pool(x)))))


class RegNetBlock(nn.Module):
    def __init__(self, cin: int, cout: int, stride: int, group_width: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            conv_bn(cin, cout, 1),
            conv_bn(cout, cout, 3, stride, groups=cout // group_width),
            SqueezeExcite(cout, cin // 4),
            conv_bn(cout, cout, 1, act=None),
        )
        self.shortcut = conv_bn(cin, cout, 1, stride, act=None) if cin != cout or stride != 1 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.shortcut(x) + self.body(x))


class RegNet(nn.Module):
    """RegNetY: grouped convolutions, squeeze-excite with sigmoid."""

    def __init__(self) -> None:
        super().__init__()
        blocks: list[nn.Module] = [conv_bn(3, 32)]
        cin = 32
        for width, depth in ((48, 1), (96, 3), (192, 4)):
            for j in range(depth):
                blocks.append(RegNetBlock(cin, width, 1 if j else 2, 16))
                cin = width
        self.blocks, self.fc = nn.Sequential(*blocks), nn.Linear(cin, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.blocks(x).mean((2, 3)))


class Inverted(nn.Module):
    """Inverted residual of EfficientNet and MobileNetV3."""

    def __init__(
        self, cin: int, mid: int, cout: int, k: int, stride: int, act: Make, squeeze: nn.Module | None
    ) -> None:
        super().__init__()
        layers: list[nn.Module] = [conv_bn(cin, mid, 1, act=act)] if mid != cin else []
        layers.append(conv_bn(mid, mid, k, stride, groups=mid, act=act))
        if squeeze is not None:
            layers.append(squeeze)
        layers.append(conv_bn(mid, cout, 1, act=None))
        self.body, self.has_skip = nn.Sequential(*layers), stride == 1 and cin == cout

    def forward(self, x: Tensor) -> Tensor:
        return x + self.body(x) if self.has_skip else self.body(x)


class EfficientNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        blocks: list[nn.Module] = [conv_bn(3, 24, act=nn.SiLU)]
        cin = 24
        rows = (
            (1, 16, 1, 1, 3),
            (4, 24, 2, 2, 3),
            (4, 40, 2, 1, 5),
            (4, 80, 2, 2, 3),
            (4, 112, 2, 1, 5),
            (4, 160, 1, 2, 5),
        )
        for expand, cout, depth, stride, k in rows:  # and the kernel
            for j in range(depth):
                hidden = max(4, cin // 4)
                squeeze = SqueezeExcite(cin * expand, hidden, nn.SiLU)
                blocks.append(Inverted(cin, cin * expand, cout, k, 1 if j else stride, nn.SiLU, squeeze))
                cin = cout
        blocks.append(conv_bn(cin, 512, 1, act=nn.SiLU))
        self.features, self.pool = nn.Sequential(*blocks), nn.AdaptiveAvgPool2d(1)
        self.classifier = nn.Sequential(nn.Dropout(0.1), nn.Linear(512, 10))

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(torch.flatten(self.pool(self.features(x)), 1))


class MobileNetV3(nn.Module):
    """ReLU, then hard-swish; squeeze-excite with hard-sigmoid in some blocks; a hard-swish head after pooling."""

    def __init__(self) -> None:
        super().__init__()
        rows = (  # kernel, middle, out, squeeze, hard-swish, stride
            (3, 16, 16, False, False, 1),
            (3, 64, 24, False, False, 2),
            (3, 72, 24, False, False, 1),
            (5, 72, 40, True, False, 2),
            (5, 120, 40, True, False, 1),
            (3, 240, 80, False, True, 1),
            (3, 200, 80, False, True, 1),
            (3, 480, 112, True, True, 1),
            (5, 448, 128, True, True, 2),
            (5, 512, 128, True, True, 1),
        )
        blocks: list[nn.Module] = [conv_bn(3, 16, act=nn.Hardswish)]
        cin = 16
        for k, mid, cout, has_squeeze, is_hard, stride in rows:
            squeeze = SqueezeExcite(mid, mid // 4, nn.ReLU, nn.Hardsigmoid) if has_squeeze else None
            blocks.append(Inverted(cin, mid, cout, k, stride, nn.Hardswish if is_hard else nn.ReLU, squeeze))
            cin = cout
        blocks.append(conv_bn(cin, 512, 1, act=nn.Hardswish))
        self.features, self.pool = nn.Sequential(*blocks), nn.AdaptiveAvgPool2d(1)
        self.classifier = nn.Sequential(nn.Linear(512, 256), nn.Hardswish(), nn.Dropout(0.1), nn.Linear(256, 10))

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(torch.flatten(self.pool(self.features(x)), 1))


class ConvNeXtBlock(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dwconv, self.norm = nn.Conv2d(dim, dim, 7, padding=3, groups=dim), nn.LayerNorm(dim, eps=1e-6)
        self.pwconv1, self.act, self.pwconv2 = nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim)
        self.gamma = nn.Parameter(0.1 * torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        out = self.norm(self.dwconv(x).permute(0, 2, 3, 1))
        out = self.gamma * self.pwconv2(self.act(self.pwconv1(out)))
        return x + out.permute(0, 3, 1, 2)


class LayerNorm2d(nn.LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        x = F.layer_norm(x.permute(0, 2, 3, 1), self.normalized_shape, self.weight, self.bias, self.eps)
        return x.permute(0, 3, 1, 2)


class ConvNeXt(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Conv2d(3, 64, 2, 2), LayerNorm2d(64, eps=1e-6)]
        cin = 64
        for dim, depth in ((64, 2), (128, 3), (256, 2)):
            if dim != cin:
                layers += [LayerNorm2d(cin, eps=1e-6), nn.Conv2d(cin, dim, 2, 2)]
            layers += [ConvNeXtBlock(dim) for _ in range(depth)]
            cin = dim
        self.features, self.norm, self.head = nn.Sequential(*layers), nn.LayerNorm(cin, eps=1e-6), nn.Linear(cin, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.features(x).mean((-2, -1))))


class DenseLayer(nn.Module):
    def __init__(self, cin: int, growth: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = nn.BatchNorm2d(cin), nn.Conv2d(cin, 4 * growth, 1, bias=False)
        self.norm2, self.conv2 = nn.BatchNorm2d(4 * growth), nn.Conv2d(4 * growth, growth, 3, 1, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out = self.conv2(F.relu(self.norm2(self.conv1(F.relu(self.norm1(x))))))
        return torch.cat([x, out], 1)


class DenseNet(nn.Module):
    """DenseNet-BC: concatenations, batch norm in front of each convolution."""

    def __init__(self, growth: int = 24, depth: int = 5) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Conv2d(3, 2 * growth, 3, 1, 1, bias=False)]
        width = 2 * growth
        for i in range(3):
            for _ in range(depth):
                layers.append(DenseLayer(width, growth))
                width += growth
            if i < 2:
                half = width // 2
                layers += [nn.BatchNorm2d(width), nn.ReLU(), nn.Conv2d(width, half, 1, bias=False), nn.AvgPool2d(2)]
                width = half
        self.features = nn.Sequential(*layers, nn.BatchNorm2d(width), nn.ReLU())
        self.classifier = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(torch.flatten(F.adaptive_avg_pool2d(self.features(x), 1), 1))


class MixerBlock(nn.Module):
    def __init__(self, tokens: int, dim: int, hidden_tokens: int, hidden: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.token1, self.token2 = nn.Linear(tokens, hidden_tokens), nn.Linear(hidden_tokens, tokens)
        self.channel1, self.channel2 = nn.Linear(dim, hidden), nn.Linear(hidden, dim)

    def forward(self, x: Tensor) -> Tensor:
        out = self.norm1(x).transpose(1, 2)
        x = x + self.token2(F.gelu(self.token1(out))).transpose(1, 2)
        return x + self.channel2(F.gelu(self.channel1(self.norm2(x))))


class Mixer(nn.Module):
    def __init__(self, dim: int = 192, depth: int = 6, patch: int = 4) -> None:
        super().__init__()
        tokens = (32 // patch) ** 2
        self.patch_embed = nn.Conv2d(3, dim, patch, patch)
        self.blocks = nn.Sequential(*(MixerBlock(tokens, dim, 96, 2 * dim) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch_embed(x).flatten(2).transpose(1, 2)
        return self.head(self.norm(self.blocks(x)).mean(1))


NETS: dict[str, type[nn.Module]] = {
    "vgg11": VGG,
    "wrn16_2": WideResNet,
    "regnet": RegNet,
    "efficientnet": EfficientNet,
    "mobilenetv3": MobileNetV3,
    "convnext": ConvNeXt,
    "densenet": DenseNet,
    "mixer": Mixer,
}
