# SPDX-License-Identifier: Apache-2.0
"""The few things that a vLLM server is asked: draw, continue greedily, score, load weights, and say which it has.

Every setting of a draw is in the request, since a server fills what is left open from the checkpoint's
`generation_config.json`: a repetition penalty or a stop id from there would make the sampler another policy than the
one that is trained. Ends are ours too: `ignore_eos` switches off the server's own, `stop_token_ids` names the
student's. One completion is one request, because prompts that share a request share its seed.

The routes were read in vLLM 0.32 and tried against it. Those for weights exist in a server that was started with
`VLLM_SERVER_DEV_MODE=1`.
"""

import math
from collections.abc import Sequence
from typing import Any

from cohobate.align.rollout import SamplingConfig
from cohobate.errors import ConfigError, DataError, ServerResponseError
from cohobate.remote.answers import Malformed, parse_json, served_model
from cohobate.remote.client import Patience, Refused, ServerClient, Surroundings
from cohobate.rollouts.vllm_answers import Completion, Prompt, Rules, read_completions, read_scores, unusable

_BYTES_PER_TOKEN = 1024  # of JSON, several times what one takes
_BYTES_BESIDES = 1 << 18
_NEVER = -100.0  # the lowest `logit_bias` that vLLM takes
_RESETS = 20  # times that a cache in use is asked for again
_CERTAIN = 1e-4  # nats: a token that was the only one to draw

DEV_MODE = "Start it with VLLM_SERVER_DEV_MODE=1 in its environment, on an address that only this run can reach."


class Engine:
    """One vLLM server. Safe to use from several threads once it is connected."""

    def __init__(
        self,
        url: str,
        *,
        model: str | None = None,
        eos_token_ids: tuple[int, ...],
        num_ids: int,
        head_size: int,
        timeout: float = 600.0,
        surroundings: Surroundings | None = None,
        **connection: Any,
    ) -> None:
        """`num_ids`: ids that stand for a token, `head_size`: ids that the head predicts; those between are excluded.

        `timeout`: seconds for one completion, or one reload, to its last byte: vLLM sends nothing before. `connection`
        is for `ServerClient`.
        """
        if not 0 < timeout < math.inf:
            raise ConfigError(f"timeout must be a number of seconds > 0, got {timeout}.")
        self.model: str | None = model
        self.max_model_len: int | None = None
        self.num_ids = num_ids
        self._eos, self._connected = eos_token_ids, False
        self._excluded = {str(i): _NEVER for i in range(num_ids, head_size)}
        self._sleep = (surroundings or Surroundings()).sleep
        self.client = ServerClient(
            url,
            role="rollout",
            patience=Patience(total=1.5 * timeout, attempt=timeout, idle=timeout),
            surroundings=surroundings,
            **connection,
        )

    @property
    def excludes_ids(self) -> bool:
        """Whether the head predicts ids that stand for no token."""
        return bool(self._excluded)

    def connect(self) -> None:
        """Find the model, once."""
        if not self._connected:
            self.model, self.max_model_len = served_model(self.client, self.model)
            self._connected = True

    def draw(self, prompt: Prompt, sampling: SamplingConfig, seed: int) -> Completion:
        """One completion.

        Raises:
            DataError: a prompt that leaves no room for `max_new_tokens`.
            ServerResponseError: an answer that cannot be right.
        """
        self._check_length(prompt, sampling.max_new_tokens)
        payload = {
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "min_p": sampling.min_p,
            "seed": seed,
            "stop_token_ids": list(self._eos),
        }
        return self._complete([prompt], sampling.max_new_tokens, payload, num_ids=self.num_ids)[0]

    def greedy(self, prompts: Sequence[Prompt], num_tokens: int) -> list[Completion]:
        """`num_tokens` likeliest tokens after each prompt, fewer where it ends; one request for all prompts.

        Of the whole head, ids without a token included, so that log-probabilities are those of `score` in every mode.
        """
        payload = {"temperature": 0.0, "stop_token_ids": list(self._eos), "logit_bias": None}
        return self._complete(prompts, num_tokens, payload, num_ids=None)

    def score(self, prompts: Sequence[Prompt]) -> list[list[float]]:
        """Log-probabilities at temperature 1 of every token but the first; vLLM reads no prefix cache for these.

        One prompt after the other: in low precision a server answers to the last bit as before only to a request of
        the same company (SmolLM2-135M in bfloat16 on a CPU: more than 0.01 nats on average between two companies).
        """
        found = []
        for prompt in prompts:
            payload = self._payload([prompt], 1) | {"temperature": 0.0, "prompt_logprobs": 0}
            found += read_scores(
                self._post([prompt], payload, num_tokens=len(prompt.ids) + 1), [prompt], str(self.model)
            )
        return found

    def gives_processed_logprobs(self, prompt: Prompt) -> bool:
        """Whether log-probabilities are those after temperature and truncation (`--logprobs-mode`).

        With `top_k=1` a token is drawn from itself alone: 0 if so, else its raw log-probability. Where that is 0 too
        it cannot be told, and counts as no.
        """
        length = 8 if self.max_model_len is None else max(1, min(8, self.max_model_len - len(prompt.ids) - 1))
        payload = {"top_k": 1, "stop_token_ids": list(self._eos)}
        found = self._complete([prompt], length, payload, num_ids=self.num_ids)[0]
        if min(found.logprobs) < -_CERTAIN:
            return False
        whole = Prompt(name=prompt.name, ids=prompt.ids + found.ids)
        return min(self.score([whole])[0][len(prompt.ids) - 1 :]) < -100 * _CERTAIN

    def load_weights(self, folder: str) -> None:
        """Load the safetensors files of a folder, as the server sees it, and forget every cached prefix."""
        about = "the student's weights"
        call = {"method": "reload_weights", "kwargs": {"weights_path": folder}}
        answer = self._control("/collective_rpc", call, about=about, folder=folder)
        if not isinstance(answer.get("results"), list) or not answer["results"]:
            raise unusable(about, Malformed("it does not say that a worker loaded them"))
        for _ in range(_RESETS):
            answer = self._control("/reset_prefix_cache", {}, about="its prefix cache", folder=folder)
            if answer.get("success") is True:
                return
            self._sleep(0.5)
        raise ServerResponseError(
            f"{self.client.name} does not reset its prefix cache, which holds what older weights made of prompts. "
            "Somebody else's requests keep it in use: let nobody else ask this server."
        )

    def mark(self, mark: str) -> bool:
        """Give the weights a name, which a restart or another loader takes away; False: the server has no such."""
        try:
            self._control("/update_weight_version", {"new_version": mark}, about="the weights' name", folder="")
        except Refused as refusal:
            if refusal.status in (404, 405):
                return False
            raise
        return True

    def marked(self) -> Any:
        """The name that the server's weights have now."""
        about = "the weights' name"
        return _object(self.client.get("/weight_info", about=about), about).get("weight_version")

    def close(self) -> None:
        self.client.close()

    def _complete(
        self, prompts: Sequence[Prompt], max_tokens: int, settings: dict[str, Any], *, num_ids: int | None
    ) -> list[Completion]:
        payload = self._payload(prompts, max_tokens) | settings
        tokens = sum(len(prompt.ids) + max_tokens for prompt in prompts)
        body = self._post(prompts, payload, num_tokens=tokens)
        rules = Rules(model=str(self.model), num_ids=num_ids, max_tokens=max_tokens, eos_token_ids=self._eos)
        return read_completions(body, prompts, rules)

    def _payload(self, prompts: Sequence[Prompt], max_tokens: int) -> dict[str, Any]:
        """What every request says, so that the server has nothing to fill in."""
        return {
            "model": self.model,
            "prompt": [list(prompt.ids) for prompt in prompts],
            "add_special_tokens": False,
            "max_tokens": max_tokens,
            "min_tokens": 0,
            "n": 1,
            "temperature": 1.0,
            "top_p": 1.0,
            "top_k": 0,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "logit_bias": self._excluded or None,
            "stop": [],
            "ignore_eos": True,
            "skip_special_tokens": False,
            "spaces_between_special_tokens": False,
            "logprobs": 0,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
            "stream": False,
        }

    def _post(self, prompts: Sequence[Prompt], payload: dict[str, Any], *, num_tokens: int) -> bytes:
        about = ", ".join(prompt.name for prompt in prompts)
        most = num_tokens * _BYTES_PER_TOKEN + _BYTES_BESIDES
        return self.client.post("/v1/completions", payload, about=about, most_bytes=most)

    def _control(self, path: str, payload: dict[str, Any], *, about: str, folder: str) -> dict[str, Any]:
        try:
            body = self.client.post(path, payload, about=about, most_bytes=_BYTES_BESIDES, final={500})
        except Refused as refusal:
            if refusal.status in (404, 405) and folder:
                raise ConfigError(f"{self.client.name} has no {path}, so it takes no weights. {DEV_MODE}") from None
            if refusal.status == 500 and folder:
                raise ConfigError(
                    f"{self.client.name} could not load {folder}. If its machine or container sees the folder under "
                    f"another path, name that as server_folder. It says: {refusal.said}"
                ) from None
            raise
        return _object(body, about)

    def _check_length(self, prompt: Prompt, max_new_tokens: int) -> None:
        limit = self.max_model_len
        if limit is not None and len(prompt.ids) + max_new_tokens > limit:
            raise DataError(
                f"{prompt.name} has {len(prompt.ids)} tokens, and {max_new_tokens} more may be drawn, but the rollout "
                f"server's max_model_len is {limit}: completions would be cut short. Start it with a larger "
                "--max-model-len, or lower max_completion_length."
            )


def _object(body: bytes, about: str) -> dict[str, Any]:
    try:
        answer = parse_json(body)
        if not isinstance(answer, dict):
            raise Malformed("it is no JSON object")
    except Malformed as problem:
        raise unusable(about, problem) from None
    return answer
