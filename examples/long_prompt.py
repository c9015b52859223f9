"""Memory of reading a long prompt: at once, and in chunks under a limit.

    python examples/long_prompt.py --tokens 16384 --memory 128MB

Each line is measured in a process of its own: the size of a chunk, the most bytes of tensors that were alive at once
and the peak of the resident memory (Linux), both beyond weights and cache, and the processor time.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path

import torch

import depthmix as dm
from depthmix.inference import PreallocatedCache, prefill_chunk
from depthmix.inference.prefill import prefill
from depthmix.ops.memory import LiveBytes, status

CLEAR = Path("/proc/self/clear_refs")


@torch.no_grad()
def measure(mixer: str, tokens: int, memory: str) -> str:
    torch.manual_seed(0)
    size = {"vocab_size": 256, "dim": 128, "layers": 12, "heads": 2, "hidden": 384}
    model = dm.Decoder(dm.DecoderConfig(**size, mixer=mixer)).eval()
    prompt = torch.randint(0, 256, (1, tokens))
    cache = PreallocatedCache(model.config, 1, tokens)
    for tensor in cache.tensors:
        tensor.fill_(0.0)  # pages that were never touched are not resident yet
    model(prompt[:, :64])  # loads libraries and kernels
    chunk = tokens if memory == "none" else prefill_chunk(model, tokens, memory)
    if CLEAR.exists():
        CLEAR.write_text("5")  # resets the high-water mark
    before, begun = status("VmRSS") if CLEAR.exists() else 0, time.process_time()
    with LiveBytes() as live:
        prefill(model, prompt, None, cache, chunk)
    seconds = time.process_time() - begun
    resident = f"{(status('VmHWM') - before) / 1e6:.0f} MB" if CLEAR.exists() else "–"
    return f"| {mixer} | {memory} | {chunk:,} | {live.peak / 1e6:.0f} MB | {resident} | {seconds:.0f} s |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--memory", default="4MB", help="limit of the chunked prefill")
    parser.add_argument("--mixers", nargs="+", default=["residual", "block_attnres", "attnres", "mhc"])
    parser.add_argument("--one", nargs=2, metavar=("MIXER", "LIMIT"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        print(measure(given.one[0], given.tokens, given.one[1]))
        return
    print("| mechanism | limit | chunk | tensors | resident | processor time |")
    print("|---|---|---:|---:|---:|---:|", flush=True)
    for mixer in given.mixers:
        for memory in ("none", given.memory):
            arguments = [sys.executable, __file__, "--tokens", str(given.tokens), "--one", mixer, memory]
            subprocess.run(arguments, check=True)


if __name__ == "__main__":
    main()
