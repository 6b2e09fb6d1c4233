"""What it costs to compress 44 MB, in passes over memory: one pass is a plain copy of as much.

    python bench/compression.py [--json] [--repeats N]

11 million float32, one thread. Copy, encode and decode are measured in turn, and every ratio is the median of the
pairs; so a slow moment of the machine slows both sides of it. int8 and top-k are measured with error feedback, which
adds the residual to the vector and takes what was sent out of it again. `torch.topk` is what top-k would cost without a
threshold from a sample; it is measured once per three repeats, as it takes long.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import offbeat as ob
from offbeat.core.compression import decode
from offbeat.core.memory_pool import Pool

NUMEL = 11_000_000
REPEATS = 15
SHARE = 0.01
COMPRESSIONS: dict[str, ob.compression.Compression] = {
    "bf16": ob.compression.BFloat16(),
    "int8": ob.compression.Int8(),
    "int8 without feedback": ob.compression.Int8(feedback=False),
    "top_k": ob.compression.TopK(SHARE),
    "top_k without feedback": ob.compression.TopK(SHARE, feedback=False),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    parser.add_argument("--repeats", type=int, default=REPEATS, help=f"how often each is measured [{REPEATS}]")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    random = torch.Generator().manual_seed(0)
    vectors = [torch.randn(NUMEL, generator=random) for _ in range(2)]
    rows = [measured(name, compression, vectors, arguments.repeats) for name, compression in COMPRESSIONS.items()]
    rows.append(plain_top_k(vectors[0], max(1, arguments.repeats // 3)))
    if arguments.json:
        encode = {row["name"]: row["encode_passes"] for row in rows}
        passes = {f"{name}_passes": encode[name] for name in ("int8", "top_k", "bf16")}
        print(json.dumps({**passes, "rows": rows}))
        return
    print(f"{NUMEL:,} float32, one thread, median of {arguments.repeats}; a pass copies {4 * NUMEL / 1e6:.0f} MB")
    for row in rows:
        decoding = "" if row["decode_passes"] is None else f", decode {row['decode_passes']:5.2f} passes"
        weight = "" if row["bytes"] is None else f", {row['bytes'] / 1e6:6.2f} MB"
        print(f"  {row['name']:24} encode {row['encode_passes']:6.2f} passes{decoding}{weight}")


def measured(name: str, compression: ob.compression.Compression, vectors: list[Tensor], repeats: int) -> dict[str, Any]:
    """Encode and decode, each beside a copy; the vectors take turns, as no two gradients are the same."""
    pool, target = Pool(), torch.empty(NUMEL)
    residual = torch.zeros(NUMEL) if compression.keeps_residual else None
    encoding, decoding, nbytes = [], [], 0
    for repeat in range(repeats + 1):
        vector = vectors[repeat % len(vectors)]
        copy = seconds_of(target.copy_, vector)[0]
        encode, blob = seconds_of(compression.encode, vector, pool, residual)
        decoded = seconds_of(decode, blob, pool)[0]
        nbytes = blob.nbytes
        if repeat:  # the first makes room
            encoding.append(encode / copy)
            decoding.append(decoded / copy)
    return row(name, encoding, decoding, nbytes)


def plain_top_k(vector: Tensor, repeats: int) -> dict[str, Any]:
    """The largest elements by `torch.topk`, without feedback, indices as they come."""
    target, ratios = torch.empty(NUMEL), []
    for _ in range(repeats):
        copy = seconds_of(target.copy_, vector)[0]
        ratios.append(seconds_of(lambda: torch.topk(vector.abs(), round(SHARE * NUMEL)))[0] / copy)
    return row("torch.topk", ratios, [], None)


def row(name: str, encoding: list[float], decoding: list[float], nbytes: int | None) -> dict[str, Any]:
    return {
        "name": name,
        "encode_passes": round(statistics.median(encoding), 3),
        "decode_passes": round(statistics.median(decoding), 3) if decoding else None,
        "bytes": nbytes,
        "repeats": len(encoding),
    }


def seconds_of(work: Callable[..., Any], *arguments: Any) -> tuple[float, Any]:
    start = time.perf_counter()
    result = work(*arguments)
    return time.perf_counter() - start, result


if __name__ == "__main__":
    main()
