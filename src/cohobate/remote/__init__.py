# SPDX-License-Identifier: Apache-2.0
"""Asking a server that somebody else keeps running: what teachers and rollouts from servers have in common."""

from cohobate.remote.answers import Malformed, served_model
from cohobate.remote.client import Patience, Refused, ServerClient, Surroundings, TooLarge
from cohobate.remote.workers import Workers

__all__ = ["Malformed", "Patience", "Refused", "ServerClient", "Surroundings", "TooLarge", "Workers", "served_model"]
