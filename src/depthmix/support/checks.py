"""What users write: KEY=VALUE, paths, devices. Each is read in this one place."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch


def parse_value(text: Any) -> Any:
    """The number, true or false, none, or list that a text spells, in any case; else the text itself."""
    if not isinstance(text, str):
        return text
    word = text.strip().lower()
    if word in ("none", "null"):
        return None
    try:
        return json.loads(word if word in ("true", "false") else text)
    except (ValueError, RecursionError):
        return text


def split_pair(text: str, example: str) -> tuple[str, str]:
    """Key and value of KEY=VALUE."""
    key, sign, value = text.partition("=")
    if not sign or not key.strip():
        raise ValueError(f"{text!r}; expected KEY=VALUE, such as {example}")
    return key.strip(), value.strip()


def user_path(text: str | os.PathLike[str]) -> Path:
    """A path with its ~ expanded."""
    try:
        return Path(text).expanduser()
    except RuntimeError:
        raise ValueError(
            f"{str(text)!r}: this machine has no user {Path(text).parts[0][1:]!r}. Write the path in full, or with ./ "
            "in front if the folder is called so"
        ) from None


def check_memory(what: str, size: float, remedy: str) -> None:
    """Refuse what this machine cannot hold, before it is allocated; where the machine tells how much that is."""
    try:
        most = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):  # no such question on Windows
        return
    if size > most:
        raise ValueError(f"{what} take {size / 2**30:,.1f} GiB; this machine has {most / 2**30:,.1f} GiB. {remedy}")


def check_device(name: torch.device | str) -> torch.device:
    """A device that this machine has and that computes; `meta` knows shapes only."""
    try:
        device = torch.device(name)
        module = torch.get_device_module(device)
        works = device.type != "meta" and module.is_available() and (device.index or 0) < module.device_count()
    except (RuntimeError, AttributeError):  # a word that torch does not know, a device it was not built for
        works = False
    if not works:
        raise ValueError(f"device={str(name)!r} is not available; try cpu, or cuda or mps where torch finds one")
    return device
