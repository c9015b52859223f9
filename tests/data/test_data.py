"""Data: the same tokens and the same order every time, on any number of ranks; damage is found and named."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from depthmix.data import (
    Batches,
    ByteTokenizer,
    Corpus,
    load_tokenizer,
    manifest,
    prepare,
    shards,
    sources,
    validation_batches,
)
from depthmix.data.batches import shuffled
from depthmix.data.sources import Piece, open_source, stdlib_files
from depthmix.support.files import lock


def needs(name: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(importlib.util.find_spec(name) is None, reason=f"{name} is not installed")


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    return prepare(folder=tmp_path_factory.mktemp("data") / "stdlib")


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    folder = tmp_path / "texts"
    for i in range(40):
        file = folder / f"part{i % 3}" / f"{i}.txt"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"Text {i} says é.\n" * (i + 1), encoding="utf-8")
    return folder


def documents(corpus: Corpus, side: str) -> list[bytes]:
    tokens = getattr(corpus, side)
    return tokens[: len(tokens)].astype(np.uint8).tobytes().split(b"\0")[:-1]


# What becomes of a source


def test_the_standard_library_is_split_by_file_and_nothing_is_lost(library: Corpus) -> None:
    files = [path.read_bytes() for _, path in stdlib_files()]
    train, held = documents(library, "train"), documents(library, "validation")
    assert sorted(train + held) == sorted(data for data in files if data)
    assert 5e6 < len(library.train) < 3e7
    assert 0.01 < len(library.validation) / len(library.train) < 0.15
    assert library.vocab_size == 256
    assert library.bytes_per_token == 1.0
    assert library.train.dtype == np.uint16


def test_the_standard_library_has_neither_tests_nor_packages() -> None:
    names = [name for name, _ in stdlib_files()]
    assert "argparse.py" in names
    assert names == sorted(names)
    assert not [n for n in names if {"test", "tests", "idle_test", "site-packages", "__pycache__"} & set(n.split("/"))]


def test_byte_tokens_are_those_of_generation(texts: Path, tmp_path: Path) -> None:
    found = prepare(str(texts), folder=tmp_path / "out")
    first = documents(found, "train")[0].decode()
    assert found.train[: len(first.encode())].tolist() == ByteTokenizer().encode(first)
    assert isinstance(load_tokenizer(found.folder, found.vocab_size), ByteTokenizer)


def test_one_text_and_a_batch_of_documents_have_the_same_ids(texts: Path, tmp_path: Path) -> None:
    text = "Text 7 says é.\n"
    names = ("bytes", "bpe:300") if importlib.util.find_spec("tokenizers") else ("bytes",)
    for name in names:
        corpus = prepare(str(texts), tokenizer=name, folder=tmp_path / name)
        tokenizer = load_tokenizer(corpus.folder, corpus.vocab_size)
        batch = tokenizer.encode_batch([text.encode(), b""])
        assert [ids.tolist() for ids in batch] == [tokenizer.encode(text), []]
        assert tokenizer.decode(tokenizer.encode(text)) == text
        assert (tokenizer.size, tokenizer.separator) == (corpus.vocab_size, corpus.separator)


def test_a_file_stays_on_its_side_when_others_are_added(texts: Path, tmp_path: Path) -> None:
    before = prepare(str(texts), folder=tmp_path / "before", validation=0.3)
    for i in range(20):
        (texts / f"new{i}.md").write_text(f"new {i}")
    after = prepare(str(texts), folder=tmp_path / "after", validation=0.3)
    for side in ("train", "validation"):
        assert set(documents(before, side)) <= set(documents(after, side))
    assert before.digest != after.digest


def test_the_seed_chooses_which_documents_are_held_out(texts: Path, tmp_path: Path) -> None:
    held = [
        documents(prepare(str(texts), folder=tmp_path / f"{s}", validation=0.3, seed=s), "validation") for s in (0, 1)
    ]
    assert held[0] != held[1]


@pytest.mark.parametrize("share", [0.001, 0.999])
def test_neither_side_is_left_without_a_document(texts: Path, tmp_path: Path, share: float) -> None:
    found = prepare(str(texts), folder=tmp_path / "out", validation=share)
    assert min(len(documents(found, "train")), len(documents(found, "validation"))) >= 1


def test_of_a_single_text_the_last_lines_are_held_out(tmp_path: Path) -> None:
    file = tmp_path / "one.txt"
    file.write_bytes(b"".join(b"line %d\n" % i for i in range(1000)))
    found = prepare(str(file), folder=tmp_path / "out", validation=0.1)
    (train,), (held,) = documents(found, "train"), documents(found, "validation")
    assert train + held == file.read_bytes()
    assert held.startswith(b"line ")
    assert len(held) == pytest.approx(0.1 * file.stat().st_size, abs=10)


def test_binary_files_are_left_out_and_named(texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (texts / "picture.png").write_bytes(b"\x89PNG\0\0" * 100)
    (texts / ".hidden").write_text("not me")
    found = prepare(str(texts), folder=tmp_path / "out")
    assert "skipped 1 files that are not text: picture.png" in capsys.readouterr().err
    assert found.manifest["documents"]["count"] == 40
    with pytest.raises(ValueError, match=r"picture\.png.*Expected text"):
        prepare(str(texts / "picture.png"), folder=tmp_path / "other")


def test_a_folder_inside_its_source_is_not_read_as_text(texts: Path) -> None:
    first = prepare(str(texts), folder=texts / "out")
    assert prepare(str(texts), folder=texts / "out").digest == first.digest


def test_rows_of_jsonl_are_documents_by_any_field(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    rows = [f"row {i} é" for i in range(50)] + ["row 7 é"] * 5
    file.write_text("\n".join(json.dumps({"body": row}) for row in rows) + "\n\n")
    found = prepare(str(file), folder=tmp_path / "out", field="body", validation=0.4)
    sides = [[d.decode() for d in documents(found, side)] for side in ("train", "validation")]
    assert sorted(sides[0] + sides[1]) == sorted(rows)
    assert not set(sides[0]) & set(sides[1]), "equal rows are in one split"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", r"rows\.jsonl, line 2: not valid JSON"),
        ('{"body": "x"}', r"line 2 has no field 'text'; its fields are body"),
        ("[1]", r"line 2 has no field 'text'; its fields are none: it is a list"),
        ('{"text": 3}', r"line 2: field 'text' is a int; expected text"),
    ],
)
def test_a_bad_row_is_named(tmp_path: Path, line: str, message: str) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text('{"text": "a"}\n' + line + "\n")
    with pytest.raises(ValueError, match=message):
        prepare(str(file), folder=tmp_path / "out")
    assert {p.name for p in tmp_path.iterdir()} == {"rows.jsonl", ".out.lock"}, "nothing half done is left"


def test_tokens_that_lie_among_the_texts_are_no_text(texts: Path, tmp_path: Path) -> None:
    outside = prepare(str(texts), folder=tmp_path / "outside")
    for name in ("tokens", "others"):  # the second finds the first there
        assert prepare(str(texts), folder=texts / name).digest == outside.digest
    assert prepare(str(texts), folder=texts / "tokens").digest == outside.digest


@needs("pyarrow")
def test_parquet_gives_what_jsonl_gives(tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    rows = [f"row {i} é" for i in range(3000)]
    pyarrow.parquet.write_table(pyarrow.table({"text": rows, "id": range(3000)}), tmp_path / "rows.parquet")
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps({"text": row}) for row in rows))
    found = [prepare(str(tmp_path / f"rows.{kind}"), folder=tmp_path / kind) for kind in ("parquet", "jsonl")]
    assert found[0].digest == found[1].digest
    with pytest.raises(ValueError, match="no column 'body'; its columns are text, id"):
        prepare(str(tmp_path / "rows.parquet"), folder=tmp_path / "out", field="body")


@pytest.mark.parametrize(
    ("name", "source", "tokenizer", "message"),
    [
        ("pyarrow", "rows.parquet", "bytes", r"pip install 'depthmix\[parquet\]'"),
        ("datasets", "hf:some/name", "bytes", r"pip install 'depthmix\[datasets\]'"),
        ("tokenizers", "rows.txt", "bpe:300", r"pip install 'depthmix\[bpe\]'"),
    ],
)
def test_a_missing_package_is_named_with_its_extra(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, source: str, tokenizer: str, message: str
) -> None:
    for module in [m for m in sys.modules if m.split(".")[0] == name]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, name, None)
    for file in ("rows.parquet", "rows.txt"):
        (tmp_path / file).write_text("some text\n" * 100)
    wish = source if source.startswith("hf:") else str(tmp_path / source)
    with pytest.raises(ModuleNotFoundError, match=message):
        prepare(wish, tokenizer=tokenizer, folder=tmp_path / "out")


@needs("datasets")
def test_a_dataset_gives_what_its_files_give(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (tmp_path / "set").mkdir()
    file = tmp_path / "set" / "train.jsonl"
    file.write_text("".join(json.dumps({"text": f"row {i} é"}) + "\n" for i in range(300)))
    by_name = prepare(f"hf:{file.parent}", folder=tmp_path / "by_name")
    by_path = prepare(str(file), folder=tmp_path / "by_path")
    assert by_name.digest == by_path.digest


@needs("datasets")
def test_a_dataset_that_cannot_be_reached_says_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(OSError, match=r"hf:nobody/nothing could not be loaded.*Check the name and the network"):
        prepare("hf:nobody/nothing", folder=tmp_path / "out")


def test_an_unknown_source_or_tokenizer_is_named(texts: Path, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="'nowhere' does not exist; expected stdlib"):
        prepare("nowhere", folder=tmp_path / "out")
    with pytest.raises(FileNotFoundError, match="unknown tokenizer 'words'; expected bytes"):
        prepare(str(texts), tokenizer="words", folder=tmp_path / "out")
    with pytest.raises(ValueError, match="at least 257"):
        prepare(str(texts), tokenizer="bpe:100", folder=tmp_path / "out")


def test_a_long_text_is_read_in_pieces_that_end_with_lines_or_characters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "PIECE_BYTES", 16)
    data = ("a\nshort line\n" + "é€😀" * 30 + "\nend").encode()
    (tmp_path / "long.txt").write_bytes(data)
    pieces = list(sources.text_pieces(tmp_path / "long.txt", 0.5, 0, None))
    assert b"".join(piece.data for piece in pieces) == data
    assert len(pieces) > 5
    for piece in pieces:
        piece.data.decode()
    assert [piece.last for piece in pieces] == [False] * (len(pieces) - 1) + [True]


# BPE


@needs("tokenizers")
def test_a_bpe_is_trained_on_the_training_side_and_decodes_to_the_text(texts: Path, tmp_path: Path) -> None:
    found = prepare(str(texts), tokenizer="bpe:300", folder=tmp_path / "out", validation=0.3)
    assert 257 < found.vocab_size <= 300
    reader = load_tokenizer(found.folder, found.vocab_size)
    plain = prepare(str(texts), folder=tmp_path / "plain", validation=0.3)
    for side in ("train", "validation"):
        tokens = getattr(found, side)
        rows = np.split(tokens[: len(tokens)], np.flatnonzero(tokens[: len(tokens)] == found.separator) + 1)[:-1]
        assert [reader.decode(row.tolist()).encode() for row in rows] == documents(plain, side)
    assert found.bytes_per_token == pytest.approx(len(plain.validation) / len(found.validation))
    assert found.bytes_per_token > 1.5
    for file in texts.rglob("*.txt"):  # another held-out side leaves the tokenizer as it was
        if file.read_bytes() in documents(plain, "validation"):
            file.write_text("quite other words " * 50)
    other = prepare(str(texts), tokenizer="bpe:300", folder=tmp_path / "other", validation=0.3)
    assert (other.folder / "tokenizer.json").read_bytes() == (found.folder / "tokenizer.json").read_bytes()


@needs("tokenizers")
def test_a_ready_tokenizer_gives_the_same_tokens_from_any_path(texts: Path, tmp_path: Path) -> None:
    trained = prepare(str(texts), tokenizer="bpe:300", folder=tmp_path / "a")
    shutil.copy(tmp_path / "a" / "tokenizer.json", tmp_path / "mine.json")
    ready = prepare(str(texts), tokenizer=str(tmp_path / "mine.json"), folder=tmp_path / "b")
    assert ready.digest == trained.digest
    assert np.array_equal(ready.train[:100], trained.train[:100])
    (tmp_path / "b" / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"tokenizer\.json is truncated"):
        Corpus.load(tmp_path / "b")
    (tmp_path / "mine.json").write_text("{}")
    with pytest.raises(ValueError, match=r"mine\.json|tokenizer\.json is damaged or not a tokenizer"):
        prepare(str(texts), tokenizer=str(tmp_path / "mine.json"), folder=tmp_path / "c")


# The folder


def test_a_second_prepare_writes_nothing(texts: Path, tmp_path: Path) -> None:
    first = prepare(str(texts), folder=tmp_path / "out")
    before = {path: path.stat() for path in first.folder.iterdir()}
    second = prepare(str(texts), folder=tmp_path / "out")
    assert second.digest == first.digest
    assert {path: path.stat().st_mtime_ns for path in second.folder.iterdir()} == {
        path: about.st_mtime_ns for path, about in before.items()
    }


def test_the_same_text_elsewhere_has_the_same_digest(texts: Path, tmp_path: Path) -> None:
    first = prepare(str(texts), folder=tmp_path / "out")
    shutil.copytree(texts, tmp_path / "copy")
    for file in (tmp_path / "copy").rglob("*.txt"):
        os.utime(file, (1, 1))
    assert prepare(str(tmp_path / "copy"), folder=tmp_path / "other").digest == first.digest
    assert prepare(str(tmp_path / "copy"), folder=tmp_path / "out").digest == first.digest


def test_a_source_that_changed_is_an_error_and_one_that_is_gone_is_not(texts: Path, tmp_path: Path) -> None:
    first = prepare(str(texts), folder=tmp_path / "out")
    file = texts / "part0" / "0.txt"
    file.write_text("other")
    with pytest.raises(ValueError, match="content differs from"):
        prepare(str(texts), folder=tmp_path / "out")
    shutil.rmtree(texts)
    assert prepare(str(texts), folder=tmp_path / "out").digest == first.digest


@pytest.mark.parametrize("change", [{"validation": 0.2}, {"seed": 3}, {"field": "body"}])
def test_a_folder_prepared_otherwise_is_not_taken(texts: Path, tmp_path: Path, change: dict[str, float]) -> None:
    prepare(str(texts), folder=tmp_path / "out")
    with pytest.raises(ValueError, match=f"was prepared with {next(iter(change))}=.*Choose another folder"):
        prepare(str(texts), folder=tmp_path / "out", **change)


def test_a_folder_with_other_files_is_left_alone(texts: Path, tmp_path: Path) -> None:
    with pytest.raises(FileExistsError, match=r"no manifest\.json"):
        prepare(str(texts), folder=texts)


@pytest.mark.parametrize("name", ["train-00001.bin", "validation-00000.bin"])
@pytest.mark.parametrize("verify", [None, True])
def test_a_damaged_shard_is_named(texts: Path, tmp_path: Path, name: str, verify: bool | None) -> None:
    prepare(str(texts), folder=tmp_path / "out", shard_bytes=4096)
    shard = tmp_path / "out" / name
    data = shard.read_bytes()
    shard.write_bytes(data[:-2])
    with pytest.raises(ValueError, match=f"{name} is truncated.*prepare it again"):
        Corpus.load(tmp_path / "out", verify=False)
    shard.write_bytes(bytes([data[0] ^ 1]) + data[1:])
    os.utime(shard, ns=(1, 1))
    with pytest.raises(ValueError, match=f"{name} is modified or damaged.*prepare it again"):
        Corpus.load(tmp_path / "out", verify=verify)
    with pytest.raises(ValueError, match=f"{name} is modified"):
        prepare(str(texts), folder=tmp_path / "out")
    shard.unlink()
    with pytest.raises(FileNotFoundError, match=f"{name}, listed in manifest.json, does not exist"):
        Corpus.load(tmp_path / "out")


def test_hashes_are_read_once_a_process_unless_asked(
    texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:

    seen: list[Path] = []
    prepare(str(texts), folder=tmp_path / "out")
    whole = manifest.digest
    monkeypatch.setattr(manifest, "digest", lambda path: (seen.append(path), whole(path))[1])
    Corpus.load(tmp_path / "out")
    assert not seen
    Corpus.load(tmp_path / "out", verify=True)
    assert len(seen) == 2


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"format": 1', '"format": 99', r"manifest\.json has format 99, written by depthmix .* reads format 1"),
        ('"tokens": ', '"tokens": 1', r"manifest\.json was modified"),
        ('"seed": 0', '"seed": 1', r"manifest\.json was modified"),
        ("{", "", r"manifest\.json is damaged"),
    ],
)
def test_a_manifest_that_is_altered_or_of_another_version_is_named(
    texts: Path, tmp_path: Path, old: str, new: str, message: str
) -> None:
    prepare(str(texts), folder=tmp_path / "out")
    path = tmp_path / "out" / "manifest.json"
    path.write_text(path.read_text().replace(old, new, 1))
    with pytest.raises(ValueError, match=message):
        Corpus.load(tmp_path / "out")
    path.unlink()
    with pytest.raises(
        FileNotFoundError, match=r"manifest\.json does not exist; expected a folder that depthmix prepared"
    ):
        Corpus.load(tmp_path / "out")


def test_several_shards_are_one_array(texts: Path, tmp_path: Path) -> None:
    many = prepare(str(texts), folder=tmp_path / "many", shard_bytes=1001)
    one = prepare(str(texts), folder=tmp_path / "one")
    assert len(many.manifest["train"]["shards"]) > 10
    assert all(p.stat().st_size <= 1001 for p in many.folder.glob("*.bin"))
    size = len(one.train)
    assert len(many.train) == size
    for start, stop in [(0, size), (0, 1), (499, 501), (500, 1000), (3, 2600), (size - 1, size + 5), (7, 7)]:
        assert np.array_equal(many.train[start:stop], one.train[start:stop])


SLOW = """
import sys, time
from depthmix.data import ByteTokenizer, prepare
whole = ByteTokenizer.encode_batch
def slow(self, texts):
    print("encoding", flush=True)
    time.sleep(float(sys.argv[3]))
    return whole(self, texts)
ByteTokenizer.encode_batch = slow
print(prepare(sys.argv[1], folder=sys.argv[2]).digest)
"""


def start(texts: Path, out: Path, seconds: float) -> subprocess.Popen[str]:
    order = [sys.executable, "-c", SLOW, str(texts), str(out), str(seconds)]
    return subprocess.Popen(order, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_a_killed_preparation_begins_again(texts: Path, tmp_path: Path) -> None:
    process = start(texts, tmp_path / "out", 60)
    assert process.stdout is not None
    assert process.stdout.readline() == "encoding\n"
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert (tmp_path / ".out.part" / "train-00000.bin").is_file(), "it was killed in the middle"
    assert not (tmp_path / "out").exists()
    found = prepare(str(texts), folder=tmp_path / "out")
    assert found.digest == prepare(str(texts), folder=tmp_path / "other").digest
    assert not (tmp_path / ".out.part").exists()


def test_two_processes_prepare_one_folder_once(texts: Path, tmp_path: Path) -> None:
    first = start(texts, tmp_path / "out", 3)
    assert first.stdout is not None
    assert first.stdout.readline() == "encoding\n"
    begun = time.monotonic()
    found = prepare(str(texts), folder=tmp_path / "out")
    assert time.monotonic() - begun > 1, "it waited"
    assert first.communicate()[0].split() == [found.digest]


def test_a_lock_is_waited_for_or_refused_and_ends_with_its_block(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("fcntl", reason="no locks on this system")
    path = tmp_path / "lock"
    entered = threading.Event()

    def wait() -> None:
        with lock(path):
            entered.set()

    waiting = threading.Thread(target=wait)
    with lock(path):
        with pytest.raises(ValueError, match="it is taken"), lock(path, "it is taken"):
            pass
        waiting.start()
        assert not entered.wait(0.3)
    waiting.join()
    assert entered.is_set()
    assert capsys.readouterr().err == f"waiting for another process to release {path}\n"
    with lock(path, "it is taken"):
        pass


def test_a_full_disk_is_said_and_leaves_nothing(texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full here")

    def full(self: shards.Writer) -> None:
        self.path = self.folder / f"{self.name}-00000.bin"
        self.file, self.room, self.hash = open("/dev/full", "wb", 0), self.limit, shards.hashlib.sha256()  # noqa: SIM115

    with monkeypatch.context() as patch:
        patch.setattr(shards.Writer, "open_next", full)
        with pytest.raises(OSError, match=r"No space left on device.*train-00000\.bin"):
            prepare(str(texts), folder=tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / ".out.part").exists()
    prepare(str(texts), folder=tmp_path / "out")


def test_a_source_that_changes_while_it_is_read_is_an_error(
    texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = ByteTokenizer.encode_batch

    def disturbed(self: ByteTokenizer, pieces: list[bytes]) -> list[np.ndarray]:
        (texts / "part2" / "38.txt").write_text("changed")
        return whole(self, pieces)

    monkeypatch.setattr(ByteTokenizer, "encode_batch", disturbed)
    monkeypatch.setattr(shards, "GROUP_BYTES", 100)
    with pytest.raises(ValueError, match="changed while it was being read"):
        prepare(str(texts), folder=tmp_path / "out")


def test_every_document_is_counted_once(texts: Path) -> None:
    def two() -> Iterator[Piece]:
        yield Piece(split_value=0.1, data=b"ab", last=False)
        yield Piece(split_value=0.1, data=b"c")
        yield Piece(split_value=0.9, data=b"d")

    found = sources.census(two())
    assert (found.documents, found.bytes, found.lowest, found.highest) == (2, 4, 0.1, 0.9)
    assert open_source(str(texts), share=0.1, seed=0).bytes == sum(p.stat().st_size for p in texts.rglob("*.txt"))


# The order of rows


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 5000), st.integers(0, 2**40))
def test_shuffling_is_one_to_one(count: int, seed: int) -> None:
    assert sorted(shuffled(np.arange(count), count, str(seed)).tolist()) == list(range(count))


def test_shuffling_sends_an_index_anywhere_equally_often() -> None:
    counts = np.zeros((7, 7))
    for seed in range(3000):
        counts[np.arange(7), shuffled(np.arange(7), 7, f"{seed} 0")] += 1
    expected = 3000 / 7
    assert ((counts - expected) ** 2 / expected).sum() < 36 + 5 * (2 * 36) ** 0.5  # chi-square, 36 degrees of freedom


def test_the_order_is_the_one_that_earlier_runs_had() -> None:
    """A run that is resumed years later, with another NumPy, must meet the same rows."""
    assert shuffled(np.arange(8), 1000, "0 0").tolist() == [92, 723, 432, 714, 461, 206, 619, 15]


def test_an_order_that_is_computed_in_runs_is_the_whole_permutation() -> None:
    count = 3001
    batches = Batches(np.arange(count + 1, dtype=np.uint16), tokens_per_row=1, rows=count, seed=4)
    assert next(batches)[:, 0].tolist() == shuffled(np.arange(count), count, "4 0").tolist()
    assert next(batches)[:, 0].tolist() == shuffled(np.arange(count), count, "4 1").tolist()


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 12), st.integers(1, 8), st.integers(0, 400), st.integers(0, 5))
def test_every_window_comes_once_an_epoch(length: int, rows: int, size: int, seed: int) -> None:
    tokens = np.arange(size, dtype=np.uint16)
    count = max(size - 1, 0) // length
    if count < rows:
        with pytest.raises(ValueError, match=f"give {count} rows of {length}; expected at least {rows}, one batch"):
            Batches(tokens, tokens_per_row=length, rows=rows, seed=seed)
        return
    batches = Batches(tokens, tokens_per_row=length, rows=rows, seed=seed)
    taken = torch.cat([next(batches) for _ in range(-(-3 * count // rows))])[: 3 * count]
    assert torch.equal(taken, taken[:, :1] + torch.arange(length + 1))
    for epoch in taken[:, 0].view(3, count):
        assert sorted(epoch.tolist()) == [length * w for w in range(count)]


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    tokens = np.arange(1001, dtype=np.uint16)
    batches = Batches(tokens, tokens_per_row=10, rows=100, seed=0)
    other = Batches(tokens, tokens_per_row=10, rows=100, seed=1)
    orders = [
        next(batches)[:, 0].tolist(),
        next(batches)[:, 0].tolist(),
        next(other)[:, 0].tolist(),
        list(range(0, 1000, 10)),
    ]
    assert len({tuple(order) for order in orders}) == 4


@pytest.mark.parametrize("ranks", [2, 4])
def test_the_global_batch_is_the_same_for_any_number_of_ranks(library: Corpus, ranks: int) -> None:
    alone = Batches(library.train, tokens_per_row=32, rows=8, seed=5)
    together = [Batches(library.train, tokens_per_row=32, rows=8, seed=5, rank=r, ranks=ranks) for r in range(ranks)]
    for _ in range(20):
        parts = [next(batches) for batches in together]
        assert torch.equal(next(alone), torch.cat(parts))
        assert all(part.shape == (8 // ranks, 33) and part.dtype == torch.int64 for part in parts)
    assert all(batches.state() == alone.state() for batches in together)


def test_ranks_cross_the_end_of_an_epoch_together() -> None:
    tokens = np.arange(72, dtype=np.uint16)  # 7 windows of 10
    alone = Batches(tokens, tokens_per_row=10, rows=4, seed=0)
    pair = [Batches(tokens, tokens_per_row=10, rows=4, seed=0, rank=r, ranks=2) for r in range(2)]
    for _ in range(30):
        assert torch.equal(next(alone), torch.cat([next(pair[0]), next(pair[1])]))


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 60), st.sampled_from([1, 2]))
def test_a_restored_place_continues_exactly(steps: int, ranks: int) -> None:
    tokens = np.arange(500, dtype=np.uint16)
    batches = Batches(tokens, tokens_per_row=7, rows=6, seed=3)
    for _ in range(steps):
        next(batches)
    saved = json.loads(json.dumps(batches.state()))
    others = [Batches(tokens, tokens_per_row=7, rows=6, seed=9, rank=r, ranks=ranks) for r in range(ranks)]
    for other in others:
        other.restore(saved)
    for _ in range(25):
        assert torch.equal(next(batches), torch.cat([next(other) for other in others]))


def test_a_place_in_other_data_is_refused() -> None:
    saved = Batches(np.arange(500), tokens_per_row=7, rows=6, seed=3).state()
    with pytest.raises(ValueError, match="saved position is for data with windows=71, but here it is 57"):
        Batches(np.arange(400), tokens_per_row=7, rows=6, seed=3).restore(saved)
    with pytest.raises(ValueError, match="rows=6, rank=0, ranks=4; expected rows divisible by ranks"):
        Batches(np.arange(400), tokens_per_row=7, rows=6, seed=3, ranks=4)


def test_validation_batches_are_always_the_same_and_cover_all() -> None:
    tokens = np.arange(108, dtype=np.uint16)  # 10 windows of 10
    every = list(validation_batches(tokens, 10, 4, None))
    assert [len(batch) for batch in every] == [4, 4, 2]
    assert sorted(torch.cat(every)[:, 0].tolist()) == list(range(0, 100, 10))
    some = list(validation_batches(tokens, 10, 4, 2))
    assert len(some) == 2
    assert all(torch.equal(a, b) for a, b in zip(some, every, strict=False))
    with pytest.raises(ValueError, match=r"10 validation tokens are fewer than one row of 10 \+ 1"):
        validation_batches(np.arange(10), 10, 4, 2)


def test_batches_hold_no_copy_of_the_corpus(library: Corpus) -> None:
    import tracemalloc

    tracemalloc.start()
    batches = Batches(Corpus.load(library.folder).train, tokens_per_row=64, rows=8, seed=0)
    for _ in range(10):
        next(batches)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 6e6, "hashing reads 4 MB at a time; the corpus has 20 MB and more"
