# SPDX-License-Identifier: Apache-2.0
"""The few kinds of error a user can meet.

Each kind is also a built-in one, so `except ValueError` works for people who know nothing of this module. A message
says what was wanted, what came, and what to do. Programming errors stay `assert`s; wrong tensor types stay
`TypeError`s.
"""

import difflib
from collections.abc import Iterable


class CohobateError(Exception):
    """Base of every error that Cohobate raises on purpose; the command prints it without a traceback."""


class ConfigError(CohobateError, ValueError):
    """A setting, recipe key or combination of parts that cannot work. The command exits with 2."""


class DataError(CohobateError, ValueError):
    """A data set or row that cannot be used as asked."""


class AlignmentError(CohobateError, ValueError):
    """Student and teacher inputs that do not describe the same completion tokens."""


class VocabularyMismatch(CohobateError, ValueError):
    """Student and teacher do not share id -> bytes; a same-vocabulary method cannot compare them."""


class NonFiniteError(CohobateError, RuntimeError):
    """A loss or gradient norm that is NaN or infinite, found before the optimizer step."""


class ServerResponseError(CohobateError, RuntimeError):
    """A server's answer that cannot be trusted. Asking again would not help: nothing is trained on it."""


class ServerUnreachable(CohobateError, ConnectionError):
    """A server that did not answer until the deadline. The command exits with 75: run it again later."""


class MissingExtra(CohobateError, RuntimeError):
    """An optional package is needed; the message names the extra to install."""


def did_you_mean(name: str, valid: Iterable[str]) -> str:
    """A sentence for the end of a message that offers the nearest of `valid`; empty if none is near."""
    near = difflib.get_close_matches(name, list(valid), n=1, cutoff=0.5)
    return f" Did you mean {near[0]!r}?" if near else ""
