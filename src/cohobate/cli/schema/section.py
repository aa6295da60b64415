# SPDX-License-Identifier: Apache-2.0
"""What every mapping of a recipe has in common."""

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """A mapping of a recipe; unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True)
