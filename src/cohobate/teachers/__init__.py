# SPDX-License-Identifier: Apache-2.0
"""Where the teacher's distribution comes from."""

from cohobate.functional.scores import DenseScores, HiddenScores, SampledScores, TeacherScores, TopKScores
from cohobate.teachers.forward import check_head, dense_pair_scores, logit_row_checksum, pair_scores
from cohobate.teachers.load import load_model, load_tokenizer
from cohobate.teachers.local import LocalTeacher
from cohobate.teachers.output_head import HeadNotReadable
from cohobate.teachers.protocol import SameWeightsConfig, StatefulTeacher, Teacher
from cohobate.teachers.same_weights import AdapterOffTeacher, EMATeacher, FrozenTeacher, LiveTeacher

__all__ = [
    "AdapterOffTeacher",
    "DenseScores",
    "EMATeacher",
    "FrozenTeacher",
    "HeadNotReadable",
    "HiddenScores",
    "LiveTeacher",
    "LocalTeacher",
    "SameWeightsConfig",
    "SampledScores",
    "StatefulTeacher",
    "Teacher",
    "TeacherScores",
    "TopKScores",
    "check_head",
    "dense_pair_scores",
    "load_model",
    "load_tokenizer",
    "logit_row_checksum",
    "pair_scores",
]
