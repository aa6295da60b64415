# SPDX-License-Identifier: Apache-2.0
"""A rollout server that answers as vLLM does, on a tiny model that it loads from disk, and misbehaves as it is told.

An `httpx` transport, as `fake_server.py`. It draws from real weights in float32, keeps the keys and values of prompts
it has seen, and loads what it is told to load; each of its faults is one attribute.
"""

import copy
import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import DynamicCache

from cohobate.remote.client import Surroundings
from fake_server import Answer, FakeClock, json_response, refusal

BLOCK = 4  # tokens of a block of the prefix cache


class FakeEngine:
    """Serves `model` (copied) as it is until it is told to load other weights."""

    def __init__(
        self, model: Any, *, name: str = "student", max_model_len: int = 128, processed: bool = False, dev: bool = True
    ) -> None:
        self.first = copy.deepcopy(model).eval()
        self.name, self.max_model_len, self.processed, self.dev = name, max_model_len, processed, dev
        self.clock = FakeClock()
        self.asked: list[Answer] = []  # payloads of the requests for completions
        self.loaded: list[Path] = []
        self.drawn_by: list[int] = []  # for each completion that was drawn, how many updates had come by then
        # faults
        self.drops_updates = False
        self.skipped: str | None = None  # the name of a tensor that is not loaded
        self.keeps_prefixes = False
        self.keeps_head = False  # the packed head of a tied model
        self.busy_resets = 0
        self.fault: Callable[[FakeEngine, httpx.Request], httpx.Response | None] | None = None
        self.edit: Callable[[Answer, Answer], Any] | None = None  # of every answer with completions, given the payload
        self._lock = threading.Lock()
        self.restart()

    @property
    def surroundings(self) -> Surroundings:
        return Surroundings(
            transport=httpx.MockTransport(self.handle), clock=self.clock, sleep=self.clock.sleep, draw=lambda: 0.5
        )

    def restart(self) -> None:
        """As started: the first weights, an empty cache, no name."""
        self.model = untied(self.first)
        self.mark = "default"
        self._seen: dict[tuple[int, ...], Any] = {}  # blocks of prompts -> the model that computed them

    def handle(self, request: httpx.Request) -> httpx.Response:
        with self._lock:  # an engine's step is one at a time
            if self.fault is not None and (done := self.fault(self, request)) is not None:
                return done
            return self.answer(request)

    def answer(self, request: httpx.Request) -> httpx.Response:
        """What a server in order says, but for its faults."""
        path, payload = request.url.path, json.loads(request.content or b"{}")
        if path == "/v1/models":
            return json_response({"object": "list", "data": [{"id": self.name, "max_model_len": self.max_model_len}]})
        if path == "/v1/completions":
            self.asked.append(payload)
            return self._complete(payload)
        routes = {
            "/collective_rpc": self._reload,
            "/reset_prefix_cache": self._reset,
            "/update_weight_version": self._named,
            "/weight_info": lambda payload: json_response({"weight_version": self.mark}),
        }
        if not self.dev or path not in routes:
            return json_response({"detail": "Not Found"}, 404)
        return routes[path](payload)

    # ---- weights

    def _reload(self, payload: Answer) -> httpx.Response:
        assert payload["method"] == "reload_weights"
        folder = Path(payload["kwargs"]["weights_path"])
        if not folder.is_dir():
            return refusal(500, f"Call to collective_rpc method failed: Worker failed with error: '{folder}'")
        self.loaded.append(folder)
        state = load_file(folder / "model.safetensors")
        assert json.loads((folder / "config.json").read_text())["tie_word_embeddings"] is False
        if not self.drops_updates:
            if self.skipped is not None:
                assert self.skipped in state
            kept = {self.skipped, "lm_head.weight" if self.keeps_head else None}
            model = copy.deepcopy(self.model)
            missing = model.load_state_dict({k: v for k, v in state.items() if k not in kept}, strict=False)
            assert not missing.unexpected_keys
            self.model = model
        return json_response({"results": [None]})

    def _reset(self, payload: Answer) -> httpx.Response:
        if self.busy_resets > 0:
            self.busy_resets -= 1
            return json_response({"success": False})
        if not self.keeps_prefixes:
            self._seen.clear()
        return json_response({"success": True})

    def _named(self, payload: Answer) -> httpx.Response:
        self.mark = payload["new_version"]
        return json_response({"success": True, "new_version": self.mark})

    # ---- completions

    def _complete(self, payload: Answer) -> httpx.Response:
        prompts = payload["prompt"]
        if payload["model"] != self.name:
            return refusal(404, f"The model `{payload['model']}` does not exist.")
        for ids in prompts:
            if len(ids) >= self.max_model_len:
                return refusal(400, f"This model's maximum context length is {self.max_model_len} tokens.")
        choices = [{"index": i, **self._choice(ids, payload)} for i, ids in enumerate(prompts)]
        answer = {
            "id": "cmpl-1",
            "object": "text_completion",
            "model": self.name,
            "choices": choices,
            "usage": {
                "prompt_tokens": sum(map(len, prompts)),
                "completion_tokens": sum(len(c["token_ids"]) for c in choices),
            },
        }
        if self.edit is not None:
            answer = self.edit(answer, payload) or answer
        return json_response(answer)

    @torch.no_grad()
    def _choice(self, prompt: list[int], payload: Answer) -> Answer:
        scoring = payload.get("prompt_logprobs") is not None
        cache = DynamicCache(config=self.model.config)
        known = () if scoring else self._known_prefix(prompt)
        if known:
            self._seen[known](torch.tensor([known]), cache=cache, use_cache=True)
        logits = self.model(torch.tensor([prompt[len(known) :]]), cache=cache, use_cache=True).logits[0]
        entries = None
        if scoring:
            rows = logits.log_softmax(-1)
            entries = [None, *({str(t): {"logprob": float(r[t])}} for r, t in zip(rows, prompt[1:], strict=False))]
        for end in range(BLOCK, len(prompt), BLOCK):
            self._seen.setdefault(tuple(prompt[:end]), self.model)
        ids, values, reason = [], [], "length"
        generator = torch.Generator().manual_seed(payload.get("seed") or 0)
        room = min(payload["max_tokens"], self.max_model_len - len(prompt))
        while len(ids) < room:
            chosen, value = self._draw(logits[-1], payload, generator)
            ids.append(chosen)
            values.append(value)
            if chosen in payload["stop_token_ids"] if "stop_token_ids" in payload else False:
                reason = "stop"
                break
            logits = self.model(torch.tensor([[chosen]]), cache=cache, use_cache=True).logits[0]
        if "seed" in payload:
            self.drawn_by.append(len(self.loaded))
        return {
            "text": "",
            "token_ids": ids,
            "prompt_token_ids": prompt,
            "prompt_logprobs": entries,
            "finish_reason": reason,
            "logprobs": {"token_logprobs": values, "tokens": [f"token_id:{i}" for i in ids]},
        }

    def _known_prefix(self, prompt: list[int]) -> tuple[int, ...]:
        """The longest run of blocks that was computed before; at least one token is left to compute."""
        ends = range((len(prompt) - 1) // BLOCK * BLOCK, 0, -BLOCK)
        return next((tuple(prompt[:end]) for end in ends if tuple(prompt[:end]) in self._seen), ())

    def _draw(self, logits: Tensor, payload: Answer, generator: torch.Generator) -> tuple[int, float]:
        raw = logits.float()
        biased = raw.clone()
        for token, bias in (payload.get("logit_bias") or {}).items():
            biased[int(token)] += bias
        if payload["temperature"] == 0:
            chosen = int(biased.argmax())
            return chosen, float((biased if self.processed else raw).log_softmax(-1)[chosen])
        kept = biased / payload["temperature"]
        if payload["top_k"] > 0:
            kept[kept < kept.topk(payload["top_k"]).values[-1]] = -torch.inf
        if payload["top_p"] < 1:
            order = kept.argsort(descending=True)
            before = kept[order].softmax(-1).cumsum(-1) - kept[order].softmax(-1)
            kept[order[before >= payload["top_p"]]] = -torch.inf
        if payload["min_p"] > 0:
            kept[kept.softmax(-1) < payload["min_p"] * kept.softmax(-1).max()] = -torch.inf
        chosen = int(torch.multinomial(kept.softmax(-1), 1, generator=generator))
        return chosen, float((kept if self.processed else raw).log_softmax(-1)[chosen])


def untied(model: Any) -> Any:
    """The same weights in a model whose head is a tensor of its own."""
    config = copy.deepcopy(model.config)
    config.tie_word_embeddings = False
    with torch.random.fork_rng():
        own = type(model)(config)
    own.load_state_dict({k: v.clone() for k, v in model.state_dict().items()} | _head(model))
    return own.eval()


def _head(model: Any) -> dict[str, Tensor]:
    return {"lm_head.weight": model.get_output_embeddings().weight.detach().clone()}
