"""Checks of user input: options and their ranges, KEY=VALUE, paths, devices, memory, packages."""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import json
import math
import os
import re
import types
import typing
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import torch


def parse_value(text: Any) -> Any:
    """Parse a number, true or false, none (in upper or lower case) or a list; otherwise return the string itself."""
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


def parse_bytes(name: str, value: Any) -> int:
    """A number of bytes, from a number or a string such as 256MB, 1.5GiB or 1000000."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d*)?)\s*(?:([kmgt]?)(i?)b)?\s*", str(value).lower())
    if isinstance(value, (bool, float)) or match is None:
        raise ValueError(f"{name}={value!r}; expected a number of bytes, such as 268435456, 256MB or 0.5GiB")
    number, prefix, binary = match[1], match[2] or "", match[3]
    return int(float(number) * (1024 if binary else 1000) ** " kmgt".index(prefix or " "))


def closest(word: object, known: Iterable[str]) -> str | None:
    """The known name that was probably meant: one whose last dotted part is `word`, or one with a similar spelling."""
    names = list(known)
    dotted = [name for name in names if name.endswith(f".{word}")]
    return next(iter(dotted or difflib.get_close_matches(str(word), names, 1)), None)


def did_you_mean(word: object, known: Iterable[str]) -> str:
    """A sentence for an error about an unknown name, with a trailing space; empty if no known name is similar."""
    meant = closest(word, known)
    return "" if meant is None else f"Did you mean {meant!r}? "


def user_path(text: str | os.PathLike[str]) -> Path:
    """A path with its ~ expanded."""
    try:
        return Path(text).expanduser()
    except RuntimeError:
        raise ValueError(
            f"{str(text)!r}: this machine has no user {Path(text).parts[0][1:]!r}. Write the full path, or put ./ in "
            "front if the name really begins with ~"
        ) from None


def check_memory(what: str, size: float, remedy: str) -> None:
    """Raise an error if `size` bytes exceed this machine's memory; no check where its size is unknown."""
    try:
        most = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):  # Windows has no sysconf
        return
    if size > most:
        raise ValueError(f"{what} need {size / 2**30:,.1f} GiB; this machine has {most / 2**30:,.1f} GiB. {remedy}")


def check_device(name: torch.device | str) -> torch.device:
    """The device, if this machine has it and can compute on it (`meta` cannot)."""
    try:
        device = torch.device(name)
        module = torch.get_device_module(device)
        works = device.type != "meta" and module.is_available() and (device.index or 0) < module.device_count()
    except (RuntimeError, AttributeError):  # a name that torch does not know, or a device that it was not built for
        works = False
    if not works:
        raise ValueError(f"device={str(name)!r} is not available; try cpu, or cuda or mps if torch finds one")
    return device


def import_package(module: str, needed_by: str, install: str) -> Any:
    """Import an optional package; if it is missing, the error says what to `pip install`."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        name = module.split(".")[0]
        raise ModuleNotFoundError(
            f"{needed_by} needs the package {name}: pip install {install}", name=error.name
        ) from None


def import_function(option: str, name: str, others: str = "") -> Any:
    """Import the function named `package.module:function`. This runs the code of its module."""
    module, sign, attribute = name.partition(":")
    if not (module and sign and attribute):
        raise ValueError(f"{option}={name!r}; expected {others}package.module:function, such as torch:exp")
    try:
        function: Any = importlib.import_module(module)
        for part in attribute.split("."):
            function = getattr(function, part)
    except (Exception, SystemExit) as error:
        raise ValueError(
            f"{option}={name!r} cannot be imported ({type(error).__name__}: {error}). Install its package, or put the "
            "folder of its module on PYTHONPATH"
        ) from error
    if not callable(function):
        raise ValueError(f"{option}={name!r} is a {type(function).__name__}; expected a function")
    return function


def check_option(name: str, value: object, hint: Any) -> None:
    """Raise an error unless `value` fits the annotation `hint`."""
    choices = typing.get_args(hint)
    if typing.get_origin(hint) is Literal:
        if value not in choices:
            raise ValueError(f"{name}={value!r}; expected one of {', '.join(map(repr, choices))}")
    elif isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        if value is None and type(None) in choices:
            return
        kinds = [c for c in choices if c is not type(None)]
        lists = [c for c in kinds if typing.get_origin(c) in (tuple, list)]
        check_option(name, value, lists[0] if lists and isinstance(value, (tuple, list)) else kinds[0])
    elif typing.get_origin(hint) in (tuple, list):
        if not isinstance(value, (tuple, list)):
            raise ValueError(f"{name}={value!r}; expected a list")
        for each in value:
            check_option(name, each, choices[0])
    elif hint is bool:
        if not isinstance(value, bool):
            raise ValueError(f"{name}={value!r}; expected True or False")
    elif hint is int:
        if not isinstance(value, int) or isinstance(value, bool):
            raise ValueError(f"{name}={value!r}; expected a whole number")
    elif hint is str:
        if not isinstance(value, str):
            raise ValueError(f"{name}={value!r}; expected a string")
        # Surrogates stand for bytes of a command-line argument that are not UTF-8.
        if any("\ud800" <= letter <= "\udfff" for letter in value):
            raise ValueError(f"{name}={value!r}; expected a string that is valid UTF-8. Choose another name")
    elif hint is float and not is_finite(value):
        raise ValueError(f"{name}={value!r}; expected a finite number")


def is_finite(value: object) -> bool:
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # a whole number too large for a float
        return False


def check_range(name: str, value: float, low: float, high: float = math.inf, remedy: str = "") -> None:
    if not low <= value <= high:
        span = f"at least {low}" if high == math.inf else f"{low} to {high}"
        raise ValueError(f"{name}={value}; expected {span}{'. ' + remedy if remedy else ''}")


def check_positive(name: str, value: float) -> None:
    if not value > 0:
        raise ValueError(f"{name}={value}; expected a number above 0, such as 1e-6")


def check_divides(name: str, value: int, dim: int, of: str = "the width, dim") -> None:
    check_range(name, value, 1)
    if dim % value:
        raise ValueError(f"{name}={value}; expected a divisor of {of}={dim}")


def check_fields(config: Any) -> None:
    """Check every field of a dataclass against its annotation."""
    hints = get_type_hints(type(config))
    for field in dataclasses.fields(config):
        value, hint = getattr(config, field.name), hints[field.name]
        inner = [h for h in get_args(hint) if h is not type(None)] if get_origin(hint) is not Literal else []
        kind = inner[0] if len(inner) == 1 else hint
        if isinstance(kind, type) and dataclasses.is_dataclass(kind):
            if value is not None and not isinstance(value, kind):
                raise ValueError(f"{field.name}={value!r}; expected a {kind.__name__}")
        else:
            check_option(field.name, value, hint)


def make_part(cls: type, name: str, given: Any) -> Any:
    """Build `cls` from a mapping, as read from a file or command line; return any other value unchanged."""
    if not isinstance(given, Mapping):
        return given
    fields = dataclasses.fields(cls)
    known = [field.name for field in fields]
    needed = [field.name for field in fields if field.default is dataclasses.MISSING]
    if unknown := [key for key in given if key not in known]:
        hint = did_you_mean(unknown[0], known)
        raise ValueError(f"{name} has no field {unknown[0]!r}. {hint}Known: {', '.join(known)}")
    if missing := [f"{name}.{key}" for key in needed if key not in given]:
        raise ValueError(f"{' and '.join(missing)} must be set too: {name} needs {', '.join(needed)}")
    return cls(**given)
