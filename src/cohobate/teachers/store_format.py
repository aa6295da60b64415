# SPDX-License-Identifier: Apache-2.0
"""What a teacher store holds of one prediction, and how it is found again.

A prediction is K ids with their logits, the exact log-normaliser and the logit of the token that stands there: the
fields of `TopKScores`, by its convention (log-prob = `logits / temperature - log_normalizer`). Ids ascend, so 16 bits
of each are enough beside the places of a row at which the next 65,536 ids begin: 2 bytes an id for every vocabulary,
and nothing is lost. Logits are float32 ("exact"), or 16 bits of the row's own range ("compact").

"compact" is off by at most one step, 1/65534 of the range of a row's kept logits: about 0.0003 nats for a range of 20.
Each row is then shifted so that its K ids have together exactly the mass that they had. Without that, the mass of all
other ids, which is the small difference of two large numbers, would be off by far more than a step.

Scores are found by the durable name of the row *and* all token ids that the teacher read. So a score can never be used
for another completion, prompt or chat template than the one that was scored.

n predictions, K kept ids, V vocabulary, L ids of a text.
"""

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray

from cohobate.align.rollout import AlignedBatch
from cohobate.errors import AlignmentError, ConfigError, DataError, did_you_mean
from cohobate.functional.scores import TopKScores

FORMAT = 1
Values = Literal["exact", "compact"]
Columns = dict[str, NDArray[Any]]

TEXT_COLUMNS = ("text_sample", "text_tokens", "text_first", "text_begin")
_BLOCK = 65_536  # ids that 16 bits tell apart
_STEPS = 65_534  # of a compact row's range: code 0 is -inf
MOST_TOP_K = 65_535


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Text:
    """One row of data as a teacher reads it: position p predicts id p + 1, from `first` to the last but one."""

    sample_id: str
    ids: NDArray[np.int64]  # [L]
    first: int  # position of the first prediction

    @property
    def num_rows(self) -> int:
        """Predictions."""
        return len(self.ids) - 1 - self.first

    @property
    def key(self) -> tuple[int, int, int, int]:
        """Two words each of the name's and of the ids' hash."""
        return name_key(self.sample_id) + _words(self.ids.astype("<i8").tobytes())


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AskedText:
    """A text of a batch, and where its predictions stand."""

    text: Text
    row: int  # of the batch
    pairs: slice  # of the batch's M predictions
    positions: NDArray[np.int64]  # in the text, one for each of the pairs


def asked_texts(batch: AlignedBatch) -> Iterator[AskedText]:
    """What the batch's teacher reads in each row that has predictions, without its padding.

    Raises:
        AlignmentError: a prediction whose token is not the next one that the teacher reads: no store can hold it.
    """
    side = batch.teacher
    ids, mask, index, targets = (
        value.detach().cpu().numpy()
        for value in (
            side.model_inputs["input_ids"],
            side.model_inputs["attention_mask"],
            side.pair_index,
            getattr(side, "target_ids", batch.target_ids),
        )
    )
    width = ids.shape[1]
    rows, columns = index // width, index % width
    edges = np.flatnonzero(np.diff(rows)) + 1
    for begin, end in zip([0, *edges], [*edges, len(index)], strict=True):
        if begin == end:  # a batch without predictions
            continue
        row = int(rows[begin])
        attended = np.flatnonzero(mask[row])
        text_ids = ids[row, attended].astype(np.int64)
        positions = columns[begin:end].astype(np.int64) - attended[0]
        wrong = (positions < 0) | (positions >= len(text_ids) - 1)
        if wrong.any() or (text_ids[positions + 1] != targets[begin:end]).any():
            raise AlignmentError(
                f"row {batch.sample_ids[row]!r}: a prediction is of another token than the one that follows it in the "
                "teacher's input. A stored teacher knows only what its text goes on with."
            )
        text = Text(sample_id=batch.sample_ids[row], ids=text_ids, first=int(positions.min()))
        yield AskedText(text=text, row=row, pairs=slice(int(begin), int(end)), positions=positions)


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """What a store was made from. Two stores with the same header hold the same numbers."""

    format: int = FORMAT
    teacher_config: str  # sha256 of the model's settings
    teacher_weights: str  # sha256 over its weight files
    teacher_dtype: str  # that it ran in
    teacher_revision: str | None = None
    tokens: Literal["student", "teacher"] = "student"  # whose tokenizer the ids belong to
    tokenizer: str  # its fingerprint: id -> bytes and roles
    merges: str  # and what turns text into ids
    template: str | None = None
    max_length: int | None = None  # tokens that the teacher read of a row, where its tokenizer is its own
    special_roles: Mapping[str, str] | None = None
    prompts: Mapping[str, Any] | None = None  # system prompt and others of a teacher with its own tokenizer
    top_k: int
    temperature: float
    vocab_size: int
    values: Values = "exact"
    data: str  # sha256 over the names and ids of all texts, in order
    num_texts: int
    num_rows: int  # predictions
    shard_rows: int
    batch_tokens: int

    def __post_init__(self) -> None:
        if self.values not in get_args(Values):
            hint = did_you_mean(self.values, get_args(Values))
            raise ConfigError(f"values must be 'exact' or 'compact', got {self.values!r}.{hint}")
        if not 1 <= self.top_k <= min(self.vocab_size, MOST_TOP_K):
            raise ConfigError(
                f"top_k must be in [1, {min(self.vocab_size, MOST_TOP_K)}] (the teacher's ids), got {self.top_k}."
            )

    def differences(self, other: "Header") -> list[str]:
        """What is not as in `other`, by field: `teacher_weights is 0a1b… in the store and 2c3d… now`."""
        pairs = ((name, getattr(self, name), getattr(other, name)) for name in Header.__dataclass_fields__)
        return [f"{name} is {_shown(a)} in the store and {_shown(b)} now" for name, a, b in pairs if a != b]


def name_key(sample_id: str) -> tuple[int, int]:
    """Two words of the hash of a row's durable name."""
    return _words(sample_id.encode())


def prompt_settings(prompts: Any) -> dict[str, Any] | None:
    """What a `PromptConfig` says of a teacher with its own tokenizer, without what is as usual; None if nothing is."""
    names = ("system_prompt", "template_args", "allow_control_tokens")
    found = {} if prompts is None else {name: getattr(prompts, name) for name in names}
    return {name: value for name, value in found.items() if value is not None and value is not False} or None


def text_columns(texts: Sequence[Text]) -> Columns:
    """Names, hashes and places of the texts of a shard."""
    keys = np.array([text.key for text in texts], dtype=np.uint64).reshape(-1, 4)
    counts = np.array([0, *(text.num_rows for text in texts)], dtype=np.int64)
    return {
        "text_sample": np.ascontiguousarray(keys[:, :2]),
        "text_tokens": np.ascontiguousarray(keys[:, 2:]),
        "text_first": np.array([text.first for text in texts], dtype=np.int32),
        "text_begin": np.cumsum(counts),
    }


def data_digest(texts: Iterable[Text]) -> str:
    """sha256 over what is scored, in order."""
    digest = hashlib.sha256()
    for text in texts:
        digest.update(np.array([*text.key, text.first], dtype="<u8").tobytes())
    return digest.hexdigest()


def row_columns(header: Header) -> dict[str, tuple[type[np.generic], tuple[int, ...]]]:
    """dtype and width of each column that has a row for each prediction."""
    kept = (header.top_k,)
    columns: dict[str, tuple[type[np.generic], tuple[int, ...]]] = {"ids": (np.uint16, kept)}
    if header.vocab_size > _BLOCK:
        columns["ids_blocks"] = (np.uint16, (-(-header.vocab_size // _BLOCK) - 1,))
    if header.values == "exact":
        columns["logits"] = (np.float32, kept)
    else:
        columns |= {"codes": (np.uint16, kept), "lowest": (np.float32, ()), "step": (np.float32, ())}
    names = ["log_normalizer", "realized_logit"]
    names += [] if header.temperature == 1.0 else ["log_normalizer_t1"]
    return columns | dict.fromkeys(names, (np.float32, ()))


def encoded(scores: TopKScores, header: Header) -> Columns:
    """The columns of some predictions.

    Raises:
        DataError: a normaliser that is not finite, or a logit that is NaN or +inf, with the number of its row.
    """
    ids, logits, normalizer, at_one, realized = (
        value.detach().cpu().numpy()
        for value in (
            scores.ids,
            scores.logits.to(torch.float32),
            scores.log_normalizer.to(torch.float32),
            scores.log_normalizer_t1.to(torch.float32),
            scores.realized_logit.to(torch.float32),
        )
    )
    sound = np.isfinite(normalizer) & np.isfinite(at_one) & ~np.isnan(realized) & (realized < np.inf)
    sound &= (logits < np.inf).all(1)  # neither +inf nor NaN
    if not sound.all():
        raise NonFiniteRow(int(np.flatnonzero(~sound)[0]))
    columns: Columns = {"ids": (ids & (_BLOCK - 1)).astype(np.uint16)}
    if header.vocab_size > _BLOCK:
        starts = np.arange(_BLOCK, header.vocab_size, _BLOCK)
        columns["ids_blocks"] = np.stack([(ids < start).sum(1) for start in starts], 1).astype(np.uint16)
    columns |= {"logits": logits} if header.values == "exact" else _compact(logits, header.temperature)
    columns |= {"log_normalizer": normalizer, "realized_logit": realized}
    return columns if header.temperature == 1.0 else columns | {"log_normalizer_t1": at_one}


def decoded(columns: Mapping[str, NDArray[Any]], header: Header) -> TopKScores:
    """The predictions of some columns."""
    ids = columns["ids"].astype(np.int64)
    if "ids_blocks" in columns:
        place = np.arange(header.top_k)
        for begin in columns["ids_blocks"].T:  # the place at which the next block begins
            ids += (place >= begin[:, None]) * _BLOCK
    if header.values == "exact":
        logits = columns["logits"]
    else:
        codes = columns["codes"].astype(np.float32)
        logits = columns["lowest"][:, None] + columns["step"][:, None] * (codes - 1)
        logits[codes == 0] = -np.inf
    normalizer = torch.from_numpy(columns["log_normalizer"])
    return TopKScores(
        ids=torch.from_numpy(ids),
        logits=torch.from_numpy(logits),
        log_normalizer=normalizer,
        log_normalizer_t1=torch.from_numpy(columns["log_normalizer_t1"]) if header.temperature != 1.0 else normalizer,
        realized_logit=torch.from_numpy(columns["realized_logit"]),
        temperature=header.temperature,
        vocab_size=header.vocab_size,
    )


class NonFiniteRow(DataError):
    """A prediction that is no distribution; `row` says which."""

    def __init__(self, row: int) -> None:
        super().__init__(f"prediction {row} has a logit that is NaN or +inf, or a normaliser that is not finite.")
        self.row = row


def _compact(logits: NDArray[np.float32], temperature: float) -> Columns:
    """Codes of logits of which at least one a row is finite, as the normaliser is."""
    wide = logits.astype(np.float64)
    finite = np.isfinite(wide)
    lowest = np.where(finite, wide, np.inf).min(1)
    step = ((wide.max(1) - lowest) / _STEPS).astype(np.float32)
    scale = np.where(step > 0, step, 1).astype(np.float64)[:, None]
    codes = np.where(finite, 1 + np.rint((wide - lowest[:, None]) / scale), 0).clip(0, _STEPS + 1)
    rounded = np.where(finite, lowest[:, None] + scale * (codes - 1), -np.inf)
    shift = temperature * (_log_sum(wide / temperature) - _log_sum(rounded / temperature))
    return {"codes": codes.astype(np.uint16), "lowest": (lowest + shift).astype(np.float32), "step": step}


def _log_sum(x: NDArray[np.float64]) -> NDArray[np.float64]:
    """logsumexp of each row."""
    top = x.max(1)
    return top + np.log(np.exp(x - top[:, None]).sum(1))


def _words(content: bytes) -> tuple[int, int]:
    digest = hashlib.blake2b(content, digest_size=16).digest()
    return int.from_bytes(digest[:8], "little"), int.from_bytes(digest[8:], "little")


def _shown(value: Any) -> str:
    """A hash by its first digits."""
    if isinstance(value, str) and len(value) == 64:
        return f"{value[:12]}…"
    return "not there" if value is None else str(value)
