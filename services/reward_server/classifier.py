"""A small convolutional frame classifier: one RGB frame in, the probability that it shows success out.

The first layer is a strided convolution over the full-resolution pixels (it learns its own downsampling, where an
average would blur the few pixels that tell "just high enough" from "not quite"); no normalisation layers, so a frame's
output never depends on its companions or on statistics of a training set. The last feature map is flattened, not
pooled: where the bottle is, is the question.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class ClassifierConfig:
    """Size of a `FrameClassifier`; stored with the weights."""

    height: int = 96
    """Frame height in pixels."""
    width: int = 128
    """Frame width in pixels."""
    channels: tuple[int, ...] = (32, 48, 64)
    """Output channels of the convolutions."""
    kernels: tuple[int, ...] = (6, 3, 3)
    """Their square kernels, in pixels of their input."""
    strides: tuple[int, ...] = (4, 2, 2)
    """Their strides; the height and width are divided by the product."""
    hidden: int = 64
    """Width of the layer between the feature map and the logit."""

    def __post_init__(self) -> None:
        if not len(self.channels) == len(self.kernels) == len(self.strides) >= 1:
            raise ValueError(
                f"channels, kernels, strides: expected the same number of entries, at least one; got {self.channels}, "
                f"{self.kernels}, {self.strides}"
            )
        if min(*self.channels, *self.kernels, *self.strides, self.hidden) < 1:
            raise ValueError("channels, kernels, strides, hidden: expected positive integers")
        total = math.prod(self.strides)
        if self.height % total or self.width % total:
            raise ValueError(
                f"height, width: expected multiples of the strides' product {total}; got {self.height} x {self.width}"
            )

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any]) -> ClassifierConfig:
        """The inverse of `dataclasses.asdict`, after JSON. Unknown settings are refused by name."""
        known = {field.name for field in dataclasses.fields(cls)}
        if unknown := sorted(set(mapping) - known):
            raise ValueError(f"classifier: expected settings among {sorted(known)}; got {unknown}")
        settings: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in mapping.items()}
        return cls(**settings)


class FrameClassifier(nn.Module):
    """Frames uint8 (n, height, width, 3) RGB to logits float32 (n,); `sigmoid` of a logit is the probability.

    Args:
        config: the size.
        generator: of the initial weights (He et al. 2015, arXiv 1502.01852); None leaves them zero, to be loaded.
    """

    def __init__(self, config: ClassifierConfig, generator: torch.Generator | None = None) -> None:
        super().__init__()
        self.config = config
        inputs = (3, *config.channels)
        self.convolutions = nn.ModuleList(
            nn.Conv2d(inputs[i], inputs[i + 1], config.kernels[i], config.strides[i], (config.kernels[i] - 1) // 2)
            for i in range(len(config.channels))
        )
        total = math.prod(config.strides)
        features = config.channels[-1] * (config.height // total) * (config.width // total)
        self.hidden = nn.Linear(features, config.hidden)
        self.logit = nn.Linear(config.hidden, 1)
        self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self._initialize(generator)

    def _initialize(self, generator: torch.Generator | None) -> None:
        with torch.no_grad():
            for module in self.modules():
                if isinstance(module, nn.Conv2d | nn.Linear):
                    assert module.bias is not None
                    module.bias.zero_()
                    if generator is None:
                        module.weight.zero_()
                    else:
                        fan_in = module.weight[0].numel()
                        # Drawn contiguous: the memory format must not change which number lands where.
                        drawn = torch.randn(module.weight.shape, generator=generator)
                        module.weight.copy_(drawn * math.sqrt(2.0 / fan_in))

    def forward(self, frames: Tensor) -> Tensor:
        """Logits float32 (n,) of frames uint8 (n, height, width, 3)."""
        values = frames.permute(0, 3, 1, 2).to(torch.float32)  # channels-last in memory already
        return self.classify(values.mul_(1.0 / 127.5).sub_(1.0))

    def classify(self, values: Tensor) -> Tensor:
        """Logits of float32 (n, 3, height, width) in -1..1, as `forward` scales them."""
        for convolution in self.convolutions:
            values = torch.relu(convolution(values))
        features = values.permute(0, 2, 3, 1).flatten(1)
        hidden = torch.relu(self.hidden(features))
        # Not a matrix product: with one output column, its last bits depend on a frame's place in the batch.
        return (hidden * self.logit.weight).sum(1) + self.logit.bias
