"""A decoder-only transformer that predicts the next byte."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from offbeat.core.configuration import Configuration
from offbeat.core.validation import check_types, require, require_positive

BYTES = 256


@dataclass(frozen=True)
class ByteTransformer(Configuration):
    """A transformer on bytes: layer norm before each part, learned positions, output weights tied to the embedding.

    `build` makes the torch module: N × T bytes in, N × T × 256 logits out, for T up to `context`.
    """

    depth: int = 2
    """number of layers"""
    width: int = 128
    """size of the vector of a position; a multiple of `heads`"""
    heads: int = 4
    """attention heads of a layer"""
    context: int = 64
    """bytes that a prediction is made from, at most"""

    def __post_init__(self) -> None:
        check_types(self)
        require_positive(self, "depth", "width", "heads", "context")
        require(
            self.width % self.heads == 0,
            f"ByteTransformer.width must be a multiple of heads, but is {self.width} with {self.heads} heads; "
            f"{self.width - self.width % self.heads or self.heads} would do",
        )

    def build(self) -> nn.Module:
        """A new module, initialized from torch's default generator."""
        return Transformer(self)

    def parameters(self) -> int:
        """The number of parameters; nothing is allocated."""
        with torch.device("meta"):
            return sum(parameter.numel() for parameter in self.build().parameters())


class Transformer(nn.Module):
    """The module of a `ByteTransformer`."""

    def __init__(self, shape: ByteTransformer) -> None:
        super().__init__()
        self.shape = shape
        self.embedding = nn.Embedding(BYTES, shape.width)
        self.positions = nn.Parameter(torch.empty(shape.context, shape.width))
        self.layers = nn.Sequential(*(_Layer(shape) for _ in range(shape.depth)))
        self.norm = nn.LayerNorm(shape.width)
        self._initialize()

    def _initialize(self) -> None:
        """Normal weights of deviation 0.02; smaller where 2 × depth parts are added up."""
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                added = name.endswith(("attended.weight", "contract.weight"))
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * self.shape.depth) if added else 0.02)

    def forward(self, text: Tensor) -> Tensor:
        features = self.embedding(text) + self.positions[: text.shape[1]]
        return F.linear(self.norm(self.layers(features)), self.embedding.weight)


class _Layer(nn.Module):
    """Causal attention and a hidden layer of four times the width, each added to its input."""

    def __init__(self, shape: ByteTransformer) -> None:
        super().__init__()
        width = shape.width
        self.heads = shape.heads
        self.attention_norm = nn.LayerNorm(width)
        self.queries_keys_values = nn.Linear(width, 3 * width, bias=False)
        self.attended = nn.Linear(width, width, bias=False)
        self.hidden_norm = nn.LayerNorm(width)
        self.expand = nn.Linear(width, 4 * width, bias=False)
        self.contract = nn.Linear(4 * width, width, bias=False)

    def forward(self, features: Tensor) -> Tensor:
        features = features + self._attend(self.attention_norm(features))
        return features + self.contract(F.gelu(self.expand(self.hidden_norm(features))))  # type: ignore[no-any-return]

    def _attend(self, features: Tensor) -> Tensor:
        count, length, width = features.shape
        parts = self.queries_keys_values(features).view(count, length, 3, self.heads, width // self.heads)
        queries, keys, values = parts.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        return self.attended(mixed.transpose(1, 2).reshape(count, length, width))  # type: ignore[no-any-return]


@torch.no_grad()
def generate(
    model: nn.Module, prompt: bytes, length: int, context: int, temperature: float, generator: torch.Generator
) -> bytes:
    """`length` bytes that continue a prompt, each drawn from the model's prediction.

    temperature: 1 draws as the model predicts, less prefers what is likely; 0 takes the likeliest.
    """
    model.eval()
    text = list(prompt)
    for _ in range(length):
        logits = model(torch.tensor([text[-context:]]))[0, -1]
        if temperature == 0:
            text.append(int(logits.argmax()))
        else:
            text.append(int(torch.multinomial((logits / temperature).softmax(0), 1, generator=generator)))
    return bytes(text[len(prompt) :])
