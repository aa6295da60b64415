# SPDX-License-Identifier: Apache-2.0
"""The command `cohobate`, one file a command; heavy imports happen when a command runs, so that help is instant."""

from cohobate.cli.app import main

__all__ = ["main"]
