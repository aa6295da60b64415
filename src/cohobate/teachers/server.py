# SPDX-License-Identifier: Apache-2.0
"""A teacher that runs somewhere else: vLLM, asked over HTTP for the log-probabilities of tokens that it is sent.

Tokens go in and tokens come out; nothing is decoded on the way, and vLLM is not needed in this process. What a server
says of a position is the k likeliest ids and the token that stands there, so scores are `TopKScores`, or, with
`top_k=0`, `SampledScores`.

A server can be replaced while a run goes on, and its answers would look as before. So every request carries one more
row, the canary, whose answer is known from the start and travels in checkpoints: another model, or the same one with
other weights, is found by the first request that meets it. How requests fail is in `remote/client.py`, what an answer
must look like in `server_answers.py`, and what is tried before a run in `server_check.py`.
"""

import re
import threading
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future

import numpy as np
from torch import Tensor

from cohobate.align.rollout import AlignedBatch
from cohobate.errors import ConfigError, DataError
from cohobate.functional.scores import SampledScores, TopKScores
from cohobate.remote.answers import served_model
from cohobate.remote.client import Patience, Refused, ServerClient, Surroundings, TooLarge
from cohobate.remote.workers import Workers
from cohobate.teachers.server_answers import Asked, Expected, Row, read_rows
from cohobate.teachers.server_batches import Kept, Plan, grouped, plan_of, sampled_scores, top_k_scores_of
from cohobate.teachers.server_canary import CANARY, Canary, canary_ids

_SPARE = 8  # ids asked for beyond those that are kept, where some of the teacher's may have to be dropped
_BYTES_PER_ID = 256  # of JSON, several times what one takes
_BYTES_BESIDES = 1 << 16
_REMEMBERED = 64  # batches whose answers are kept: a step may read a batch twice

_TOO_LONG = re.compile(r"context length|max_model_len|model length|too long|input length", re.IGNORECASE)


class ServerTeacher:
    """Scores from `url`, a vLLM server (or one that answers `/v1/completions` with `prompt_logprobs` as vLLM does)."""

    def __init__(
        self,
        url: str,
        *,
        vocab_size: int,
        model: str | None = None,
        top_k: int = 1,
        keep_sampled: bool = False,
        temperature: float = 1.0,
        head_size: int | None = None,
        token_env: str | None = None,
        allow_insecure: bool = False,
        ca_file: str | None = None,
        concurrency: int = 8,
        rows_per_request: int = 8,
        tokens_per_request: int = 16_384,
        most_bytes: int = 1 << 29,
        canary_tolerance: float = 0.15,
        canary: Sequence[int] | None = None,
        patience: Patience | None = None,
        surroundings: Surroundings | None = None,
    ) -> None:
        """Nothing is asked yet; the first scores, or `check_server`, connect.

        `vocab_size`: the ids that the student shares with the teacher; for a teacher with its own tokenizer all of its
        ids. `head_size`: ids that the teacher predicts, if more (a padded head, later additions): those among the
        likeliest are dropped and the rest renormalised. `model`: its name there; None if the server has only one.
        `top_k`: ids kept of each prediction; 0 keeps the token alone. `keep_sampled`: the token that stands there is
        always one of the `top_k`. `temperature`: other than 1 only if `top_k` is the whole vocabulary. `most_bytes`:
        of one answer. `canary_tolerance`: nats, on average, by which one server may differ from itself. `canary`: its
        tokens. `token_env`: the environment variable with the API token.
        """
        self.vocab_size, self.head_size = vocab_size, vocab_size if head_size is None else head_size
        self.top_k, self.keep_sampled, self.temperature = top_k, keep_sampled, temperature
        self.canary_tolerance, self.most_bytes = canary_tolerance, most_bytes
        self.rows_per_request, self.tokens_per_request = rows_per_request, tokens_per_request
        self._check_settings(concurrency)
        self.model: str | None = model
        self.max_model_len: int | None = None
        self.dropped_mass = 0.0  # the most probability that any prediction had on ids the student lacks
        self.client = ServerClient(
            url,
            token_env=token_env,
            allow_insecure=allow_insecure,
            ca_file=ca_file,
            patience=patience,
            num_connections=concurrency,
            surroundings=surroundings,
        )
        self._workers = Workers(concurrency)
        self._answers: OrderedDict[tuple[Asked, ...], list[Future[list[Row]]]] = OrderedDict()
        self._lock = threading.Lock()
        self._canary_ids = canary_ids(vocab_size) if canary is None else tuple(canary)
        self._canary: Canary | None = None
        self._recorded: Canary | None = None  # of the run that this one goes on from

    def __repr__(self) -> str:
        return f"ServerTeacher({self.client.url!r}, model={self.model!r}, top_k={self.top_k})"

    @property
    def provides(self) -> type:
        return SampledScores if self.top_k == 0 else TopKScores

    @property
    def asked_k(self) -> int:
        """`prompt_logprobs` of every request."""
        if self.top_k == 0 or (self.top_k == 1 and self.keep_sampled):
            return 0
        extra = self.head_size - self.vocab_size
        return self.head_size if self.top_k == self.vocab_size else self.top_k + min(_SPARE, extra)

    @property
    def canary(self) -> Canary:
        """The row that goes with every request, as the server first answered it."""
        assert self._canary is not None, "connect() comes first"
        return self._canary

    def score(self, batch: AlignedBatch, /) -> TopKScores | SampledScores:
        """Scores of the batch's predictions, on its device.

        Raises:
            ServerUnreachable: no answer until the deadline.
            ServerResponseError: an answer that cannot be right, or of another model than before.
            DataError: a row that is too long for the server.
            ConfigError: the server declines.
        """
        plan = plan_of(batch)
        device = batch.teacher.pair_index.device
        rows = self._rows(plan) or [_no_row(self.asked_k)]
        if self.top_k == 0:
            return sampled_scores(plan, rows, device)
        kept = Kept(
            top_k=self.top_k,
            keep_sampled=self.keep_sampled,
            vocab_size=self.vocab_size,
            temperature=self.temperature,
        )
        scores, dropped = top_k_scores_of(plan, rows, kept, device)
        self.dropped_mass = max(self.dropped_mass, float(dropped.max(initial=0.0)))
        return scores

    def prefetch(self, batch: AlignedBatch, /) -> None:
        """Begin to ask for what `score` will be called with, and return at once; errors are raised there."""
        self._begin(plan_of(batch))

    def connect(self) -> None:
        """Find the model and hear its canary, once; called before anything is asked."""
        with self._lock:
            if self._canary is not None:
                return
            self.model, self.max_model_len = served_model(self.client, self.model)
            canary = self._first_canary()
            if self._recorded is not None:
                self._recorded.check(canary.row, self.canary_tolerance, self.client.url)
            self._canary = canary

    def ask(self, asked: Sequence[Asked], *, k: int, temperature: float = 1.0) -> list[Row]:
        """One request about `asked`; no canary. A 413 is the caller's to split (`TooLarge`)."""
        about = "rows " + ", ".join(prompt.name for prompt in asked)
        payload = {
            "model": self.model,
            "prompt": [list(prompt.ids) for prompt in asked],
            "max_tokens": 1,  # the least that vLLM takes
            "temperature": temperature,  # prompt log-probabilities ignore it; 1 is what is meant
            "prompt_logprobs": k,
            "return_token_ids": True,
            "add_special_tokens": False,
        }
        try:
            body = self.client.post("/v1/completions", payload, about=about, most_bytes=_most_bytes(asked, k))
        except Refused as refusal:
            raise self._explained(refusal, asked, k) from None
        return read_rows(body, asked, Expected(model=str(self.model), k=k, num_ids=self.head_size), about=about)

    def state_dict(self) -> dict[str, Tensor]:
        """The canary as it was heard, so that a resumed run notices another teacher."""
        canary = self._canary or self._recorded
        return {} if canary is None else canary.tensors()

    def load_state_dict(self, state: dict[str, Tensor], /) -> None:
        """Expect the teacher that `state_dict()` was taken from; compared now, or when it is connected to."""
        if not state:
            return
        recorded = Canary.from_tensors(state)
        if recorded.asked.ids != self._canary_ids:
            raise ConfigError(
                "the checkpoint was made with another canary for the teacher server: its vocab_size or canary differ. "
                "Resume with the recipe of the run that wrote it."
            )
        self._recorded = recorded
        if self._canary is not None:
            recorded.check(self._canary.row, self.canary_tolerance, self.client.url)

    def close(self) -> None:
        """End the connections and the threads."""
        self._workers.close()
        self.client.close()

    def _rows(self, plan: Plan) -> list[Row]:
        """The answers to the plan's prompts, in their order whatever the order in which they came."""
        rows: list[Row] = []
        futures = self._begin(plan)
        try:
            for future in futures:
                rows += future.result()
        except BaseException:
            for future in futures:
                future.cancel()
            self._answers.pop(plan.asked, None)
            raise
        return rows

    def _begin(self, plan: Plan) -> "list[Future[list[Row]]]":
        if not plan.asked:
            return []
        if plan.asked in self._answers:
            self._answers.move_to_end(plan.asked)
            return self._answers[plan.asked]
        self.connect()
        self._check_lengths(plan.asked)
        most = min(self.tokens_per_request, (self.most_bytes - _BYTES_BESIDES) // _bytes_per_token(self.asked_k))
        groups = grouped(plan.asked, most_rows=self.rows_per_request, most_tokens=most)
        futures = [self._workers.submit(lambda group=group: self._answer(group)) for group in groups]
        self._answers[plan.asked] = futures
        while len(self._answers) > _REMEMBERED:
            for future in self._answers.popitem(last=False)[1]:
                future.cancel()
        return futures

    def _answer(self, group: tuple[Asked, ...]) -> list[Row]:
        """One request with the canary; halves of it where the server takes none of that size."""
        try:
            *rows, canary = self.ask((*group, self.canary.asked), k=self.asked_k)
        except TooLarge as problem:
            if len(group) == 1:
                raise DataError(
                    f"the teacher server {self.client.url} takes no request as large as row {group[0].name} with its "
                    f"{len(group[0].ids)} tokens alone (HTTP 413). {problem}"
                ) from None
            half = len(group) // 2
            return self._answer(group[:half]) + self._answer(group[half:])
        self.canary.check(canary, self.canary_tolerance, self.client.url)
        return rows

    def _first_canary(self) -> Canary:
        ids = self._canary_ids[: None if self.max_model_len is None else self.max_model_len - 1]
        asked = Asked(name=CANARY, ids=ids, positions=tuple(range(1, len(ids))))
        return Canary(asked=asked, row=self.ask([asked], k=self.asked_k)[0])

    def _check_lengths(self, asked: Sequence[Asked]) -> None:
        for prompt in asked:
            if self.max_model_len is not None and len(prompt.ids) + 1 > self.max_model_len:
                raise DataError(
                    f"row {prompt.name} has {len(prompt.ids)} tokens for the teacher and needs {len(prompt.ids) + 1} "
                    f"places there (the server always writes one), but its max_model_len is {self.max_model_len}."
                    " Shorten prompts or completions, or start the server with a larger --max-model-len."
                )
            if _most_bytes([prompt], self.asked_k) > self.most_bytes:
                raise ConfigError(
                    f"row {prompt.name} has {len(prompt.ids)} tokens; with {self.asked_k} ids for each its answer may "
                    f"take more than most_bytes={self.most_bytes}. Ask for fewer ids, or raise most_bytes."
                )

    def _explained(self, refusal: Refused, asked: Sequence[Asked], k: int) -> Exception:
        """What a refusal means for these rows, where the server's words show it."""
        if refusal.status == 400 and "logprobs" in refusal.said and "max" in refusal.said:
            return ConfigError(
                f"the teacher server {self.client.url} refuses {k} log-probabilities for each token. Start it with "
                f"--max-logprobs {k} or more, or set a smaller top_k. It says: {refusal.said}"
            )
        if refusal.status == 400 and _TOO_LONG.search(refusal.said):
            longest = max(asked, key=lambda prompt: (prompt.name != CANARY, len(prompt.ids)))
            return DataError(
                f"row {longest.name} has {len(longest.ids)} tokens, and the teacher server takes no prompt as long. "
                f"Shorten it, or start the server with a larger --max-model-len. It says: {refusal.said}"
            )
        return refusal

    def _check_settings(self, concurrency: int) -> None:
        if not 0 <= self.top_k <= self.vocab_size:
            raise ConfigError(f"top_k must be in [0, {self.vocab_size}], the shared ids, got {self.top_k}.")
        if self.head_size < self.vocab_size or self.vocab_size < 2:
            raise ConfigError(
                f"head_size must be at least vocab_size, got {self.head_size} and {self.vocab_size}: a teacher that "
                "lacks ids of the student cannot score them."
            )
        if self.temperature != 1.0 and self.top_k != self.vocab_size:
            raise ConfigError(
                f"temperature={self.temperature} needs all log-probabilities, but top_k={self.top_k} of "
                f"{self.vocab_size} are asked for: a server's prompt log-probabilities are at temperature 1 whatever "
                "is asked, and a truncated list cannot be moved to another. Set the temperature to 1 (in a recipe, "
                "distill_temperature), use a local teacher or a store, or, for a small vocabulary, top_k=vocab_size, "
                "from which it is exact."
            )
        if not (self.temperature > 0 and np.isfinite(self.temperature)):
            raise ConfigError(f"temperature must be a number > 0, got {self.temperature}.")
        for name, value in (
            ("concurrency", concurrency),
            ("rows_per_request", self.rows_per_request),
            ("tokens_per_request", self.tokens_per_request),
        ):
            if value < 1:
                raise ConfigError(f"{name} must be at least 1, got {value}.")


def _bytes_per_token(k: int) -> int:
    return (k + 1) * _BYTES_PER_ID + 16


def _most_bytes(asked: Sequence[Asked], k: int) -> int:
    return _BYTES_BESIDES + sum(len(prompt.ids) for prompt in asked) * _bytes_per_token(k)


def _no_row(k: int) -> Row:
    return Row(ids=np.zeros((0, k), dtype=np.int64), logprobs=np.zeros((0, k)), realized=np.zeros(0))
