"""What a model answers to a question about a text: what each token reads, and what follows if reads are edited.

Axes: B batch (here 1), T token, G group of channels, H head, L sublayers, n = L + 1 rows and sources, C source that a
mechanism names, N attention layers, K key-value head, V vocabulary.
"""

from __future__ import annotations

import dataclasses
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from depthmix import ops
from depthmix.analysis import Trace, editing, tracing
from depthmix.analysis.tally import sampled_channels
from depthmix.data.tokenizers import BatchTokenizer
from depthmix.inference.text import REPLACEMENT
from depthmix.models import Decoder
from depthmix.models.decoder import losses_of
from depthmix.report.packed import Packed, pack, plain
from depthmix.support.checks import check_range, did_you_mean, is_finite
from depthmix.support.terminal import printable

MOST_TOKENS = 512
MOST_ENTRIES = 6_000_000  # of M in an answer; fewer channels of a deep model
MOST_SCALE = 10.0
NEXT = 12  # tokens in the list of the most probable next ones
CACHED_TEXTS = 1 << 16


@dataclass(frozen=True, kw_only=True)
class Edit:
    """What source `source` contributes to row `row` (both from 0) is multiplied by `scale`."""

    row: int
    source: int
    scale: float


@dataclass(frozen=True, kw_only=True)
class Question:
    """`token`: the position whose next token is wanted; None: the last."""

    run: int
    text: str
    edits: tuple[Edit, ...] = ()
    value_edits: tuple[Edit, ...] = ()
    renormalise: bool = False
    token: int | None = None


KINDS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "run": ("a whole number", lambda value: is_whole(value)),
    "row": ("a whole number", lambda value: is_whole(value)),
    "source": ("a whole number", lambda value: is_whole(value)),
    "token": ("a whole number or null", lambda value: value is None or is_whole(value)),
    "text": ("a text", lambda value: isinstance(value, str)),
    "renormalise": ("true or false", lambda value: isinstance(value, bool)),
    "scale": ("a finite number", is_finite),
    "edits": ("a list", lambda value: isinstance(value, list)),
    "value_edits": ("a list", lambda value: isinstance(value, list)),
}


def is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def read_question(body: Any) -> Question:
    """A question from JSON, or a ValueError that says what is wrong; sizes are checked by the run that answers."""
    fields = fields_of(Question, "a question", body)
    for name in ("edits", "value_edits"):
        fields[name] = tuple(read_edit(name, edit) for edit in fields.get(name, ()))
    check_text(fields["text"])
    return Question(**fields)


def read_edit(name: str, given: Any) -> Edit:
    edit = Edit(**fields_of(Edit, f"an edit in {name}", given))
    check_range(f"{name}: scale", edit.scale, -MOST_SCALE, MOST_SCALE)
    return edit


def fields_of(cls: type, what: str, given: Any) -> dict[str, Any]:
    """The fields of a JSON object, each of its kind; those without a default must be there."""
    if not isinstance(given, dict):
        raise ValueError(f"{what} is {shown(given)}; expected an object")
    fields = {field.name: field.default is dataclasses.MISSING for field in dataclasses.fields(cls)}
    if unknown := [name for name in given if name not in fields]:
        hint = did_you_mean(unknown[0][:40], fields)
        raise ValueError(f"{what} has no field {shown(unknown[0])}. {hint}Known: {', '.join(fields)}")
    if missing := [name for name, needed in fields.items() if needed and name not in given]:
        raise ValueError(f"{what} has no {', '.join(missing)}; expected {', '.join(fields)}")
    for name, value in given.items():
        expected, fits = KINDS[name]
        if not fits(value):
            raise ValueError(f"{name} is {shown(value)}; expected {expected}")
    return dict(given)


def check_text(text: str) -> None:
    if not text:
        raise ValueError("text is empty; expected at least one character")
    if any("\ud800" <= letter <= "\udfff" for letter in text):
        raise ValueError("text has half a surrogate pair; expected a text that is valid Unicode")


def shown(value: Any) -> str:
    """A value of a request in an error: short, whatever it is."""
    names = {dict: "an object", list: "a list", type(None): "null"}
    text = names.get(type(value)) or repr(value)
    return text if len(text) <= 40 else f"{text[:39]}…"


class Explorable:
    """A loaded run: its model, its tokenizer, and how many tokens of a text it reads."""

    def __init__(
        self,
        name: str,
        model: Decoder,
        tokenizer: BatchTokenizer,
        *,
        most_tokens: int = MOST_TOKENS,
        finished: bool = True,
    ) -> None:
        self.name, self.model, self.tokenizer = name, model.eval(), tokenizer
        self.most_tokens, self.finished = most_tokens, finished
        self.device = model.embed.weight.device
        self.token_text = lru_cache(CACHED_TEXTS)(lambda token: token_text(tokenizer, token))

    def facts(self) -> dict[str, Any]:
        """What the page's document says of a run, as far as the model knows it."""
        config = self.model.config
        facts = {
            "mechanism": self.model.depth.name,
            "options": dataclasses.asdict(self.model.depth.config),
            "kv_mechanism": None if config.kv_mixer is None else config.kv_mixer.name,
            "depth": config.depth,
            "kinds": [*config.kinds],
            "dim": config.dim,
            "finished": self.finished,
        }
        return plain(facts)

    def describe(self) -> str:
        """One line for the terminal."""
        facts, size = self.facts(), sum(p.numel() for p in self.model.parameters())
        mixers = " + ".join(filter(None, [facts["mechanism"], facts["kv_mechanism"]]))
        name = printable(self.name)
        limit = f"texts of up to {self.most_tokens} tokens"
        return f"{name}: {mixers}, {facts['depth']} sublayers, {size:,} parameters, {limit}"

    def answer(self, question: Question) -> dict[str, Any]:
        """One traced pass; with edits a second one. Only one answer of a model may be computed at a time."""
        begun = time.perf_counter()
        ids = self.tokenizer.encode(question.text)
        if not ids:
            raise ValueError(f"text has no tokens in the vocabulary of {self.name}; expected at least one")
        kept = ids[: self.most_tokens]
        position = self.position(question.token, len(kept))
        scale = self.scales("edits", question.edits, self.model.config.depth + 1)
        values = self.scales("value_edits", question.value_edits, len(self.model.kv_mixers))
        tokens = torch.tensor([kept], device=self.device)
        with torch.no_grad():
            with tracing(self.model) as traced:
                logits = self.model(tokens)
            plain_outcome = self.outcome(logits, tokens, position)
            table = self.table(traced(self.channels(len(kept))), kept, plain_outcome["token_loss"])
            edited, how = None, None
            if scale is not None or values is not None:
                with editing(self.model, scale, values=values, renormalise=question.renormalise) as edit:
                    edited = self.outcome(self.model(tokens), tokens, position)
                how = edit.how
        return {
            "table": table,
            "plain": plain_outcome,
            "edited": edited,
            "how": how,
            "seconds": time.perf_counter() - begun,
            "truncated": len(ids) - len(kept),
        }

    def position(self, token: int | None, count: int) -> int:
        if token is not None and not 0 <= token < count:
            raise ValueError(f"token is {shown(token)}; expected 0 to {count - 1}, or null for the last position")
        return count - 1 if token is None else token

    def scales(self, name: str, edits: Sequence[Edit], n: int) -> Tensor | None:
        """[n, n]: the factor of each source in each row; None without edits."""
        if edits and not n:
            raise ValueError(f"{name}: no attention of {self.name} mixes values over depth; expected none")
        if len(edits) > n * n:
            raise ValueError(f"{name}: {len(edits)} edits; expected at most {n * n}, one for each row and source")
        scale = torch.ones(n, n)
        for edit in edits:
            if not 0 <= edit.row < n:
                raise ValueError(f"{name}: row {shown(edit.row)}; expected 0 to {n - 1}")
            if not 0 <= edit.source <= edit.row:
                raise ValueError(
                    f"{name}: row {edit.row} has no source {shown(edit.source)}; expected 0 to {edit.row}: a row reads "
                    "only what is below it"
                )
            scale[edit.row, edit.source] = edit.scale
        return scale if edits else None

    def channels(self, tokens: int) -> list[int]:
        """Those of M that are kept where weights differ by channel: as in a survey, fewer for a deep model."""
        sampled, n = sampled_channels(self.model.config.dim), self.model.config.depth + 1
        return sampled[: max(1, MOST_ENTRIES // (tokens * n * n))]

    def outcome(self, logits: Tensor, tokens: Tensor, position: int) -> dict[str, Any]:
        losses = losses_of(logits[:, :-1], tokens[:, 1:])[0]
        best = ops.wide(logits[0, position]).softmax(-1).topk(min(NEXT, logits.shape[-1]))
        rows = zip(best.indices.tolist(), best.values.tolist(), strict=True)
        following = [{"id": token, "text": self.token_text(token), "probability": share} for token, share in rows]
        mean = float(losses.mean()) if len(losses) else None
        return plain({"loss": mean, "token_loss": [None, *losses.tolist()], "next": following})

    def table(self, trace: Trace, ids: Sequence[int], losses: Sequence[float | None]) -> dict[str, Any]:
        """The reads of every token, as the page draws them."""
        return {
            "tokens": [self.token_text(token) for token in ids],
            "loss": losses,
            "M": packed_by_token(trace.M),
            "weights": None if trace.weights is None else packed_by_token(trace.weights),
            "source_names": trace.source_names,
            "reads": trace.reads,
            "values": None if trace.values is None else packed_by_token(trace.values),
        }


def answer_with(runs: Sequence[Explorable], body: Any) -> dict[str, Any]:
    """The answer of the run that a question names; a wrong question is a ValueError."""
    question = read_question(body)
    if not 0 <= question.run < len(runs):
        raise ValueError(f"run is {shown(question.run)}; expected a number from 0 to {len(runs) - 1}")
    return runs[question.run].answer(question)


def packed_by_token(values: Tensor) -> Packed:
    """[B=1, T, (G or H or K,) rows, columns] as [T, groups, rows, columns] in half precision."""
    rows = values[0] if values.dim() == 5 else values[0].unsqueeze(1)
    return pack(rows.cpu().float().numpy(), "f16")


def token_text(tokenizer: BatchTokenizer, token: int) -> str:
    """The text of one token alone; bytes that are no UTF-8 by themselves as \\xNN, ids that mean nothing as <id>."""
    if not 0 <= token < tokenizer.size:
        return f"<{token}>"
    text = tokenizer.decode([token])
    if text and REPLACEMENT not in text:
        return text
    content = token_bytes(tokenizer, token)
    return (content.decode("utf-8", "backslashreplace") if content else text) or f"<{token}>"


def token_bytes(tokenizer: BatchTokenizer, token: int) -> bytes | None:
    """The bytes behind a token, where its kind of vocabulary says them."""
    inner = getattr(tokenizer, "inner", None)
    if inner is None:
        return bytes([token])
    name = inner.id_to_token(token)
    if name is None:
        return None
    if match := re.fullmatch("<0x([0-9A-Fa-f]{2})>", name):  # the byte fallback of other vocabularies
        return bytes([int(match[1], 16)])
    known = byte_alphabet()
    return bytes(known[letter] for letter in name) if set(name) <= known.keys() else name.encode()


@lru_cache(1)
def byte_alphabet() -> dict[str, int]:
    """The byte of each letter of a byte-level vocabulary: printable bytes are themselves, others begin at 256."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}
