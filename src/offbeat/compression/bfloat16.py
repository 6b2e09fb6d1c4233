"""The upper half of every float32: the same range, 8 bits of precision, half the bytes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from offbeat.compression.blob import HEAD_BYTES, Head, new_blob
from offbeat.compression.compression import Compression, check_size, decoded_like
from offbeat.pool import Pool


@dataclass(frozen=True)
class BFloat16(Compression, name="bf16"):
    """Every element rounded to the nearest bfloat16: off by 1/256 of itself at the most, so that none needs feedback.

    Elements below 1e-38, which bfloat16 holds with fewer bits, are off by less than 1e-40.
    """

    def _body_bytes(self, vector: Tensor) -> int:
        return 2 * vector.numel()

    def _encode(self, vector: Tensor, pool: Pool, residual: Tensor | None) -> Tensor:
        blob = new_blob(self.name, vector, 0, self._body_bytes(vector), pool)
        blob[HEAD_BYTES:].view(torch.bfloat16).copy_(vector)
        return blob

    @classmethod
    def _decode(cls, head: Head, body: Tensor, pool: Pool) -> Tensor:
        check_size(head, body, 2 * head.numel)
        return decoded_like(head, pool).copy_(body.view(torch.bfloat16))
