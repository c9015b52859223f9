"""Options that old files do not contain, by file format.

Files of format 1 are those of depthmix 0.1.0, which wrote no format into `config.toml`. They contain only the options
that were given explicitly; the others have the defaults of that version, which are listed here. Since format 2 files
contain every option.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from depthmix.mechanisms.registry import DEPTH, KV
from depthmix.support.files import FORMAT

FAMILY = {
    "query": "static",
    "query_from": "newest",
    "query_init": 0.0,
    "mixing": "softmax",
    "key_norm": True,
    "heads": 1,
    "scale": 1.0,
    "kernel": "elu1",
    "score": None,
    "eps": 1e-6,
}
# Every option of every mechanism with its default in 0.1.0; later options have the value that computes the same.
DEFAULTS: dict[str, dict[str, Any]] = {
    "attnres": {**FAMILY, "window": None, "scale_by_count": False, "group_sublayers": None},
    "block_attnres": {**FAMILY, "block_sublayers": None, "num_blocks": None, "scale_by_count": False},
    "ddl": {
        "value_width": 1,
        "beta": 1.0,
        "eps": 1e-6,
        "key_norm": "rms",
        "key_eps": 1e-5,
        "target_input": "normed",
        "target_bias": False,
        "target_bound": None,
    },
    "delta_attnres": FAMILY,
    "denseformer": {"dilation": 1, "period": 1, "block_sublayers": 2},
    "highway": {"gate": "scalar", "bias": -2.0, "eps": 1e-6},
    "hyper_connections": {
        "streams": 4,
        "dynamic": True,
        "transition": "full",
        "readout": "mean",
        "start": "hyper",
        "output_scale": None,
        "tanh": True,
        "eps": 1e-6,
    },
    "linear_attention": {"rank": 4, "rule": "plain", "feature_map": "identity", "normalize": False, "eps": 1e-6},
    "mhc": {
        "streams": 4,
        "iterations": 20,
        "transition": "full",
        "readout": "mean",
        "start": "prenorm",
        "output_scale": None,
        "scale_init": 0.0,
        "eps": 0.0,
        "norm_eps": 1e-6,
    },
    "mhc_lite": {
        "streams": 4,
        "readout": "mean",
        "transition": "full",
        "start": "prenorm",
        "output_scale": None,
        "norm_eps": 1e-6,
    },
    "mrla": {"form": "light", "head_dim": None, "eps": 1e-6},
    "residual": {},
    "scaled_residual": {"gate": "scalar", "init": None},
    "depth_attention": {
        "stride": None,
        "grid": "absolute",
        "sources": None,
        "window": 0,
        "rule": "softmax",
        "loop": "unrolled",
    },
    "value_residual": {"learned": True, "own": 0.5, "first": 0.5},
}


def complete(name: str, options: Mapping[str, Any], *, dim: int, depth: int) -> dict[str, Any]:
    """Every option of a mechanism in a file of format 1, with the defaults of 0.1.0."""
    if name not in DEFAULTS:
        if name in DEPTH | KV:
            raise ValueError(
                f"{name} does not exist in depthmix 0.1.0, whose files have no format number. Write "
                f"`format = {FORMAT}` into the first line of the file to use the defaults of this version"
            )
        return dict(options)  # from another package, whose defaults are not recorded here
    chosen = {**DEFAULTS[name], **options}
    return {**chosen, **derived(name, chosen, dim, depth)}


def derived(name: str, given: Mapping[str, Any], dim: int, depth: int) -> dict[str, Any]:
    """The values that 0.1.0 derived from the width or the depth for options left at None."""
    if name == "block_attnres" and given["block_sublayers"] is given["num_blocks"] is None:
        return {"num_blocks": min(8, depth)}
    if name == "depth_attention" and given["stride"] is given["sources"] is None and given["loop"] == "unrolled":
        return {"stride": max(1, depth // 2)}
    if name == "mrla" and given["head_dim"] is None:
        return {"head_dim": math.gcd(dim, 32)}
    if name == "scaled_residual" and given["init"] is None:
        blocks = (depth + 1) // 2
        layer_scale = 0.1 if blocks <= 18 else 1e-5 if blocks <= 24 else 1e-6
        return {"init": 0.0 if given["gate"] == "scalar" else layer_scale}
    return {}
