# SPDX-License-Identifier: Apache-2.0
"""How a teacher on a server is reached: the same keys wherever a recipe names one.

They say nothing of what is learned, so a run may go on with others of them.
"""

from typing import Any

from pydantic import Field

from cohobate.cli.schema.section import Section


class Reached(Section):
    """Keys beside `teacher_model_server_url`; each is read for a server only."""

    head_size: int | None = Field(default=None, ge=1)  # rows of the teacher's head, if more than the tokenizer's ids
    token_env: str | None = None  # the environment variable that holds the API token
    allow_insecure: bool = False
    ca_file: str | None = None
    concurrency: int = Field(default=8, ge=1)

    def reached(self) -> dict[str, Any]:
        """These keys as arguments of `ServerTeacher`."""
        return {name: getattr(self, name) for name in Reached.model_fields}
