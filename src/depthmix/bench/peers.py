"""Public implementations of one read that run on a CPU, if they are installed.

Axes: S source, T token, D channel. Each peer reads a list of S sources [T, D] with a query [D] and a key weight [D].
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Reader = Callable[[Sequence[Tensor], Tensor, Tensor], Tensor]


@dataclass(frozen=True, kw_only=True)
class Peer:
    package: str  # on PyPI
    label: str
    load: Callable[[], Reader]
    note: str  # what differs from ops.attend in the work that is timed


def load_fla() -> Reader:
    """One file, by its path: `fla.ops` imports every kernel and with them Triton, which is not available on a CPU."""
    path = importlib.metadata.distribution("fla-core").locate_file("fla/ops/attnres/naive.py")
    spec = importlib.util.spec_from_file_location("fla_naive_attnres", str(path))
    if spec is None or spec.loader is None or not spec.origin:
        raise ImportError(f"no module at {path}")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    naive: Any = module.naive_attnres
    return lambda values, query, weight: naive(query, list(values), weight)


def load_fast_attnres() -> Reader:
    attnres: Any = importlib.import_module("attnres").attnres
    return lambda values, query, weight: attnres(list(values), query * weight, eps=1e-6)


def load_attn_res() -> Reader:
    operator: Any = importlib.import_module("attn_res").AttnResOperator(1)

    def read(values: Sequence[Tensor], query: Tensor, weight: Tensor) -> Tensor:
        stacked = torch.stack(list(values)).unsqueeze(1)  # [S, 1, T, D]
        out: Tensor = torch.func.functional_call(operator, {"pseudo_query": query * weight}, (stacked,))
        return out.squeeze(0)

    return read


PEERS = (
    Peer(
        package="fla-core",
        label="fla-core naive",
        load=load_fla,
        note="naive_attnres, the plain function beside its Triton kernels; key norm and key weight as here; stacks the "
        "sources",
    ),
    Peer(
        package="fast-attnres",
        label="fast-attnres",
        load=load_fast_attnres,
        note="attnres, which on a CPU is its reference; stacks the sources; has no key weight, so it is multiplied "
        "into the query",
    ),
    Peer(
        package="attn-res",
        label="attn-res",
        load=load_attn_res,
        note="AttnResOperator on sources stacked for the read, as its own model does; has no key weight, so it is "
        "multiplied into the query",
    ),
)


def installed() -> tuple[dict[str, tuple[Peer, Reader]], list[str]]:
    """Those that load, by label, and a line about each that does not."""
    found, missing = {}, []
    for peer in PEERS:
        try:
            importlib.metadata.version(peer.package)
            found[peer.label] = (peer, peer.load())
        except importlib.metadata.PackageNotFoundError:
            missing.append(f"{peer.package} is not installed and was skipped; to add it: pip install 'depthmix[bench]'")
        except (ImportError, OSError, AttributeError) as error:
            missing.append(f"{peer.package} was skipped because it cannot be imported: {error}")
    return found, missing
