"""A model that is only served: an OpenAI-compatible completions endpoint in place of weights.

With ``echo`` and ``logprobs`` (vLLM), the log-probability of each token of a prompt comes back, and with it every
metric that needs no more. Servers without ``echo`` (llama.cpp) can only be asked for answers.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from http.client import HTTPException
from threading import Thread
from typing import Any, TypeVar
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import HTTPRedirectHandler, Request, build_opener

import torch
from transformers import PreTrainedTokenizerBase

from mpu_cli.errors import MpuError
from mpu_cli.measuring.encoding import Item
from mpu_cli.measuring.generation import Answer, texts_of
from mpu_cli.measuring.scoring import TokenScores

REQUEST_SECONDS = 600.0  # for one request
KEY = "MPU_ENDPOINT_KEY"  # the environment variable with the endpoint's key
LOOPBACK = ("localhost", "127.0.0.1", "::1")
LONGEST_TOKEN = 64  # characters of an answer for each of its tokens
REPLY_EACH = 1 << 20  # bytes that a reply may have for each prompt, and as much again for the rest
Result = TypeVar("Result")
NO_TOKEN = -1  # in place of the likeliest token, which comes as text only, where it is not the right one


@dataclass(frozen=True)
class Endpoint:
    """The model ``name`` at ``url``, such as http://127.0.0.1:8000/v1; ``key`` is sent as a bearer token, over https or
    to this machine only."""

    url: str
    name: str
    key: str | None = None

    def prepare(self, items: Sequence[Item]) -> None:
        """Nothing: the server decides how it reads."""

    def score(
        self,
        items: Sequence[Item],
        *,
        batch_size: int,
        loss_items: Sequence[Item] = (),
        moments: bool = False,  # noqa: ARG002 (as of a ``Scorer``; the server tells no distributions)
        advance: Callable[[int], None] = lambda _: None,
    ) -> list[TokenScores]:
        """The scores of each item's tokens, and of those of ``loss_items``, without moments; see ``Scorer.score``."""
        scores: dict[tuple[tuple[int, ...], int], TokenScores] = {}
        all_items = [*items, *loss_items]
        unique = list({(item.ids, item.start): item for item in all_items}.values())
        for batch in _batches(unique, batch_size):
            # One token is generated because some servers refuse to generate none.
            settings = {"echo": True, "logprobs": 1, "max_tokens": 1}
            for item, choice in zip(batch, self._complete([list(item.ids) for item in batch], settings), strict=True):
                scores[item.ids, item.start] = self.scores_of(item, choice)
            advance(len(batch))
        return [scores[item.ids, item.start] for item in all_items]

    def answer(
        self,
        tokenizer: PreTrainedTokenizerBase,
        items: Sequence[Item],
        *,
        limit: int,
        stops: Sequence[str] = (),
        batch_size: int,
        advance: Callable[[int], None] = lambda _: None,
    ) -> list[Answer]:
        """The greedy answer to each prompt, at most ``limit`` tokens, cut at the first of ``stops``."""
        settings: dict[str, Any] = {"max_tokens": limit}
        if stops:
            settings["stop"] = list(stops)
        answers = []
        for batch in _batches(items, batch_size):
            choices = self._complete([list(item.prompt) for item in batch], settings)
            for item, choice in zip(batch, choices, strict=True):
                text = str(choice.get("text", ""))[: LONGEST_TOKEN * limit]
                answers.append(texts_of(tokenizer, item, text, stops))
            advance(len(batch))
        return answers

    def _complete(self, prompts: list[list[int]], settings: dict[str, Any]) -> list[dict[str, Any]]:
        body = {"model": self.name, "prompt": prompts, "temperature": 0.0, "n": 1, **settings}
        reply = _ask(self.url, "completions", self.key, body, REPLY_EACH * (1 + len(prompts)))
        return choices_of(reply, len(prompts), self.url)

    def scores_of(self, item: Item, choice: dict[str, Any]) -> TokenScores:
        """The scores of an item's tokens in one choice of a reply."""
        logprobs = choice.get("logprobs")
        fields = logprobs if isinstance(logprobs, dict) else {}
        values, tops = fields.get("token_logprobs"), fields.get("top_logprobs")
        if not isinstance(values, list) or not isinstance(tops, list) or min(len(values), len(tops)) < len(item.ids):
            raise MpuError(
                f"{self.url}: returns no log-probabilities of prompts (echo and logprobs)",
                "use a server that does, such as vLLM, or choose --metrics that only need answers",
            )
        labelled = range(item.start, len(item.ids))
        try:
            log_probs = torch.tensor([float(values[i]) for i in labelled], dtype=torch.float64)
            best = torch.tensor([max(map(float, tops[i].values())) for i in labelled], dtype=torch.float64)
        except (TypeError, ValueError, AttributeError, OverflowError) as error:
            raise MpuError(f"{item.location}: the server's log-probabilities cannot be read") from error
        if not all(map(math.isfinite, log_probs.tolist())):
            raise MpuError(f"{item.location}: the server's log-probabilities are NaN or infinite")
        likeliest = torch.where(log_probs >= best, torch.tensor(item.labels), NO_TOKEN)
        return TokenScores(-log_probs, log_probs, likeliest)


def choices_of(reply: Any, prompts: int, url: str) -> list[dict[str, Any]]:
    """The choices of a completion, in the order of its prompts."""
    try:
        choices = sorted(reply["choices"], key=lambda choice: int(choice.get("index", 0)))
    except (KeyError, TypeError, AttributeError, ValueError, OverflowError) as error:
        raise MpuError(f"{url}: the reply is not a completion", "check --endpoint") from error
    if len(choices) != prompts:
        raise MpuError(f"{url}: {len(choices)} replies to {prompts} prompts")
    return choices


def endpoint_at(url: str, name: str | None) -> Endpoint:
    """The endpoint at ``url``, of the first model that it lists if there is no ``name``. MpuError if it lists none."""
    key = os.environ.get(KEY)
    if name is None:
        try:
            name = str(_ask(url, "models", key)["data"][0]["id"])
        except (KeyError, IndexError, TypeError, AttributeError) as error:
            raise MpuError(f"{url}: lists no model", "check --endpoint, or give --endpoint-model") from error
    return Endpoint(url, name, key)


class _NoRedirects(HTTPRedirectHandler):
    """A redirect would carry the records, and the key, to an address that nobody named."""

    def redirect_request(self, *_: Any) -> None:
        return None


def check_key(url: str, key: str | None) -> None:
    """Raises MpuError if ``url`` is not an address, or the key would cross a network in the clear."""
    try:
        parts = urlsplit(url)
        host = parts.hostname
    except ValueError:
        host = None
    if not host or parts.scheme not in ("http", "https"):
        raise MpuError(f"{url}: not the address of an endpoint", "it looks like http://HOST:8000/v1")
    if key and parts.scheme == "http" and host not in LOOPBACK:
        raise MpuError(f"{url}: {KEY} is not sent over http, where others could read it", "use https, or unset it")


def _ask(url: str, route: str, key: str | None, body: object = None, max_bytes: int = REPLY_EACH) -> Any:
    """The JSON document that the server returns, of at most ``max_bytes``; redirects are not followed."""
    address = f"{url.rstrip('/')}/{route}"
    check_key(url, key)
    headers = {"Content-Type": "application/json"}
    if key:
        headers["Authorization"] = f"Bearer {key}"
    data = None if body is None else json.dumps(body).encode()

    def exchange() -> tuple[int, str, bytes]:
        try:
            with build_opener(_NoRedirects).open(Request(address, data, headers), timeout=REQUEST_SECONDS) as reply:
                return reply.status, "", reply.read(max_bytes + 1)
        except HTTPError as error:
            return error.code, str(error.headers.get("Location")), error.read(1000)

    try:
        status, location, text = _within(REQUEST_SECONDS, exchange)
    except (OSError, HTTPException, ValueError) as error:
        raise MpuError(
            f"{address}: cannot be reached ({getattr(error, 'reason', error)})", "check --endpoint"
        ) from error
    if 300 <= status < 400:
        raise MpuError(
            f"{address}: redirects to {location[:200]!r}, which is not followed", "name that address if you trust it"
        )
    if status >= 400:
        message = " ".join(text.decode(errors="replace").split())[:200]
        raise MpuError(f"{address}: the server refused ({status}: {message})")
    if len(text) > max_bytes:
        raise MpuError(f"{address}: the reply is longer than {max_bytes:,} bytes")
    return document_of(text, address)


def document_of(text: bytes, address: str) -> Any:
    """The JSON document in a reply."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise MpuError(f"{address}: the reply is not JSON", "check --endpoint") from error


def _within(seconds: float, work: Callable[[], Result]) -> Result:
    """The result of ``work``, or its exception; TimeoutError if all of it takes longer.

    A socket's own timeout is for each read, so that a server which sends a byte now and then, of the handshake, of the
    headers or of the body, would never exceed it. Nothing ends a thread that waits: it ends with the process.
    """
    future: Future[Result] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except Exception as error:
            future.set_exception(error)

    Thread(target=run, daemon=True).start()
    wait([future], seconds)
    if not future.done():
        raise TimeoutError(f"no complete reply within {seconds:.0f} s")
    return future.result()


def _batches(items: Sequence[Item], size: int) -> Iterator[Sequence[Item]]:
    for start in range(0, len(items), size):
        yield items[start : start + size]
