# SPDX-License-Identifier: Apache-2.0
"""Where the teacher's distribution comes from."""

from cohobate.functional.scores import DenseScores, HiddenScores, SampledScores, TeacherScores, TopKScores
from cohobate.remote.client import Patience
from cohobate.teachers.ensemble import Routing, SeveralTeachers
from cohobate.teachers.forward import check_head, dense_pair_scores, logit_row_checksum, pair_scores
from cohobate.teachers.load import load_model, load_tokenizer
from cohobate.teachers.local import LocalTeacher
from cohobate.teachers.output_head import HeadNotReadable
from cohobate.teachers.own_tokenizer import OwnTokenizerTeacher
from cohobate.teachers.protocol import SameWeightsConfig, StatefulTeacher, Teacher
from cohobate.teachers.same_weights import AdapterOffTeacher, EMATeacher, FrozenTeacher, LiveTeacher
from cohobate.teachers.server import ServerTeacher
from cohobate.teachers.server_check import Check, check_server
from cohobate.teachers.server_support import ServerSupport, server_support
from cohobate.teachers.stored import StoredTeacher

__all__ = [
    "AdapterOffTeacher",
    "Check",
    "DenseScores",
    "EMATeacher",
    "FrozenTeacher",
    "HeadNotReadable",
    "HiddenScores",
    "LiveTeacher",
    "LocalTeacher",
    "OwnTokenizerTeacher",
    "Patience",
    "Routing",
    "SameWeightsConfig",
    "SampledScores",
    "ServerSupport",
    "ServerTeacher",
    "SeveralTeachers",
    "StatefulTeacher",
    "StoredTeacher",
    "Teacher",
    "TeacherScores",
    "TopKScores",
    "check_head",
    "check_server",
    "dense_pair_scores",
    "load_model",
    "load_tokenizer",
    "logit_row_checksum",
    "pair_scores",
    "server_support",
]
