"""Rows of text from a JSONL or Parquet file, or from a dataset by name."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from depthmix.support.checks import import_package


def jsonl_rows(path: Path, field: str) -> Iterator[str]:
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except ValueError as error:
                raise ValueError(
                    f"{path}, line {number}: not valid JSON ({error}). Expected one object per line"
                ) from error
            yield text_of(row, field, f"{path}, line {number}")


def parquet_rows(path: Path, field: str) -> Iterator[str]:
    parquet = import_package("pyarrow.parquet", str(path), "'depthmix[parquet]'")
    try:
        file = parquet.ParquetFile(path)
    except (ValueError, OSError) as error:
        raise ValueError(f"{path} is damaged or not a Parquet file ({error})") from error
    with file:
        names = file.schema_arrow.names
        if field not in names:
            raise ValueError(
                f"{path} has no column {field!r}; its columns are {', '.join(names)}: set data.field to one of them"
            )
        row = 0
        for batch in file.iter_batches(batch_size=1024, columns=[field]):
            for value in batch.column(0).to_pylist():
                row += 1
                yield text_of({field: value}, field, f"{path}, row {row}")


def hub_rows(source: str, field: str) -> Iterator[str]:
    name, _, config = source.removeprefix("hf:").partition(":")
    datasets = import_package("datasets", source, "'depthmix[datasets]'")
    try:
        rows = datasets.load_dataset(name, config or None, split="train")
    except Exception as error:  # network, name or the dataset's own code: the package has no common base class
        raise OSError(
            f"{source} could not be loaded ({type(error).__name__}: {error}). Check the name and the network, or "
            "download it elsewhere and use the path of its Parquet files"
        ) from error
    for number, row in enumerate(rows, 1):
        yield text_of(row, field, f"{source}, row {number}")


def text_of(row: Any, field: str, where: str) -> str:
    if not isinstance(row, dict) or field not in row:
        fields = ", ".join(map(str, row)) if isinstance(row, dict) else f"none: it is a {type(row).__name__}"
        raise ValueError(f"{where} has no field {field!r}; its fields are {fields}: set data.field to one of them")
    text = row[field]
    if text is not None and not isinstance(text, str):
        raise ValueError(f"{where}: field {field!r} is a {type(text).__name__}; expected text")
    return text or ""


ROW_READERS: dict[str, Callable[[Path, str], Iterator[str]]] = {".jsonl": jsonl_rows, ".parquet": parquet_rows}
