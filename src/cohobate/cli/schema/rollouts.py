# SPDX-License-Identifier: Apache-2.0
"""Who writes the completions: the student here, or a server that is given its weights."""

from typing import Annotated, Literal

from pydantic import Field

from cohobate.cli.schema.section import Section


class LocalRollouts(Section):
    """The student's own `generate`."""

    kind: Literal["local"] = "local"


class VLLMRollouts(Section):
    """A vLLM server that loads the student's weights before each step; its settings are `VLLMRolloutsConfig`'s."""

    kind: Literal["vllm"]
    url: str
    sync_folder: str  # that the server sees too; this run's own
    server_folder: str | None = None  # its path there, if another
    served_model_name: str | None = None  # the student's name there, if the server has several models
    weights_dtype: Literal["float32", "bfloat16", "float16"] | None = None  # of what is written; None: as trained
    canary_tolerance: float = Field(default=0.05, gt=0)  # nats between the student and the server
    timeout: float = Field(default=600.0, gt=0)  # seconds for one completion, or one update
    concurrency: int = Field(default=64, ge=1)
    token_env: str | None = None  # the environment variable that holds the API token
    allow_insecure: bool = False
    ca_file: str | None = None


Rollouts = Annotated[LocalRollouts | VLLMRollouts, Field(discriminator="kind")]
