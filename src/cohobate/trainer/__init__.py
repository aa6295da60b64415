# SPDX-License-Identifier: Apache-2.0
"""The trainer: one optimizer step built whole, one denominator for each term, whatever the method."""

from cohobate.trainer.card import RunDescription
from cohobate.trainer.config import DistillationConfig
from cohobate.trainer.signals import GracefulStop
from cohobate.trainer.trainer import DistillationTrainer

__all__ = ["DistillationConfig", "DistillationTrainer", "GracefulStop", "RunDescription"]
