"""The options that determine a function, stored in its state dict: loading weights into another function is an error.

Block sizes, strides, eps and scales change what parameters compute but not their names and shapes. A module that
derives from `Recorded` keeps such options in its state dict as one uint8 tensor, JSON padded with spaces to a fixed
length, so that every way to store tensors stores them: torch.save, safetensors, torch.distributed.checkpoint, FSDP2,
`from_pretrained` of transformers.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from depthmix.mechanisms import legacy
from depthmix.support.files import FORMAT

KEY = "_extra_state"  # torch's name for it
LENGTH = 1024  # bytes, or a multiple: torch.distributed.checkpoint needs a tensor of the saved shape
ABSENT = "(no such option)"


class Recorded(nn.Module):
    """A module whose state dict contains the options it was built with. Subclasses implement `record`."""

    def record(self) -> dict[str, Any]:
        """The options that determine the function, besides the parameters; plain JSON values."""
        raise NotImplementedError(f"{type(self).__name__} must implement `record`")

    def get_extra_state(self) -> Tensor:
        text = json.dumps({"format": FORMAT, **self.record()})
        data = text.encode().ljust(-(-len(text.encode()) // LENGTH) * LENGTH)
        return torch.tensor(
            list(data), dtype=torch.uint8, device="cpu"
        )  # built from a Python list: never on a meta device

    def set_extra_state(self, state: Any) -> None:
        """Check that the options in `state` are this module's; nothing is set."""
        if isinstance(state, Tensor) and state.is_meta:
            return
        current = json.loads(json.dumps(self.record()))
        saved = with_later_options(decode(state), current)
        differing = [key for key in {**current, **saved} if current.get(key, ABSENT) != saved.get(key, ABSENT)]
        if "mechanism" in differing:
            differing = ["mechanism"]  # the options of another mechanism say nothing here
        if differing:
            lines = [
                f"{key} is {saved.get(key, ABSENT)!r} in the state dict and {current.get(key, ABSENT)!r} here"
                for key in differing
            ]
            raise ValueError(
                f"this state dict belongs to a different function than this {type(self).__name__} computes: "
                f"{', '.join(lines)}. Build it with the options of the state dict, or convert the parameters "
                "explicitly with load_converted(state_dict)"
            )

    def load_converted(self, state_dict: Mapping[str, Tensor]) -> None:
        """Load parameters that were trained with other options, such as those of block_attnres into attnres.

        The function that they compute changes, which is not checked; names and shapes must agree.
        """
        given = {name: tensor for name, tensor in state_dict.items() if not is_record(name)}
        current = {name: tensor for name, tensor in self.state_dict().items() if not is_record(name)}
        shapes = [name for name in current.keys() & given.keys() if given[name].shape != current[name].shape]
        problems = {
            "missing": current.keys() - given.keys(),
            "not in this module": given.keys() - current.keys(),
            "different shape": [
                f"{name} {list(given[name].shape)}, here {list(current[name].shape)}" for name in shapes
            ],
        }
        lines = [f"{what}: {', '.join(sorted(names)[:3])} ({len(names)})" for what, names in problems.items() if names]
        if lines:
            raise ValueError(
                f"these parameters cannot be converted ({'; '.join(lines)}). Expected those of a {type(self).__name__} "
                "with the same names and shapes; nothing was loaded"
            )
        self.load_state_dict(with_records(self, given))

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        key = prefix + KEY
        if key not in state_dict:  # from 0.1.0, or a partial state dict such as an adapter
            options = self.record()
            names = [prefix + name for name in self.state_dict(keep_vars=True) if not is_record(name)]
            if len(options) > 1 and all(name in state_dict for name in names):
                listed = ", ".join(f"{name}={value!r}" for name, value in options.items())
                warnings.warn(
                    f"loading a state dict that does not contain its options (depthmix 0.1.0 did not write them) into "
                    f"a {type(self).__name__}. Check that it was trained with these: {listed}",
                    UserWarning,
                    stacklevel=2,
                )
            state_dict[key] = self.get_extra_state()  # otherwise the key would be reported as missing
        super()._load_from_state_dict(state_dict, prefix, *rest)


def decode(state: Any) -> dict[str, Any]:
    try:
        data = state.to(torch.uint8)  # a script may have cast all tensors to one dtype, which preserves these numbers
        if not torch.equal(data.to(state.dtype), state):
            raise ValueError("its numbers are not bytes")
        options = json.loads(bytes(data.tolist()))
        number = options.pop("format")
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"the record of options in this state dict ({KEY}) is damaged ({type(error).__name__}: {error}). Get "
            "the file again from its source, or convert the parameters explicitly with load_converted(state_dict)"
        ) from error
    if number > FORMAT:
        raise ValueError(f"this state dict has format {number}; this version reads {FORMAT}. Install a newer depthmix")
    return dict(options)


def with_later_options(saved: dict[str, Any], current: Mapping[str, Any]) -> dict[str, Any]:
    """A record with the options added since it was written, at the values that compute the same function."""
    name = saved.get("mechanism", saved.get("kv_mixer"))
    before = json.loads(json.dumps(legacy.DEFAULTS.get(name, {}))) if isinstance(name, str) else {}
    return {**{key: value for key, value in before.items() if key in current}, **saved}


def is_record(name: str) -> bool:
    return name.endswith(KEY)


def with_records(module: nn.Module, state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """The state dict with the module's records added if it has none: for files that store their options elsewhere."""
    records = {name: value for name, value in module.state_dict().items() if is_record(name)}
    return {**records, **state_dict}
