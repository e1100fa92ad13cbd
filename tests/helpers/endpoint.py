"""A completions server like OpenAI's for a small model: ``python -m tests.helpers.endpoint MODEL [--no-echo]``,
which prints its port.

Speaks the part of the protocol that vLLM serves and ``mpu eval --endpoint`` uses: /v1/models, and /v1/completions with
prompts of token ids, echo, logprobs, max_tokens and stop.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.helpers.paths import ROOT


def completion(model, tokenizer, prompt: list[int], request: dict, echoes: bool) -> dict:
    """One choice: the greedy continuation and, with echo, the log-probabilities of the prompt's tokens."""
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        new = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=request["max_tokens"], do_sample=False,
            temperature=None, top_p=None, top_k=None, pad_token_id=tokenizer.eos_token_id,
        )[0, len(prompt):]  # fmt: skip
        text = tokenizer.decode(new, skip_special_tokens=True)
        for stop in request.get("stop", []):
            text = text.split(stop)[0]
        choice = {"text": text}
        if request.get("echo") and echoes:
            sequence = torch.cat([ids[0], new])
            log_p = model(sequence[None]).logits[0].double().log_softmax(-1)
            values = log_p[:-1].gather(1, sequence[1:, None])[:, 0].tolist()
            tops = [{tokenizer.decode([int(row.argmax())]): float(row.max())} for row in log_p[:-1]]
            choice["logprobs"] = {"token_logprobs": [None, *values], "top_logprobs": [None, *tops]}
            choice["text"] = tokenizer.decode(sequence)
    return choice


@contextmanager
def serving(model: Path, *options: str) -> Iterator[str]:
    """The address of a server process for ``model``."""
    command = [sys.executable, "-m", "tests.helpers.endpoint", str(model), *options]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield f"http://127.0.0.1:{int(process.stdout.readline())}/v1"
        finally:
            process.kill()


def serve(folder: Path, echoes: bool) -> None:
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)

    class Handler(BaseHTTPRequestHandler):
        def reply(self, document: object) -> None:
            body = json.dumps(document).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def do_GET(self) -> None:
            self.reply({"data": [{"id": "small"}]})

        def do_POST(self) -> None:
            request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            choices = [completion(model, tokenizer, prompt, request, echoes) for prompt in request["prompt"]]
            self.reply({"choices": [{"index": i, **choice} for i, choice in enumerate(choices)]})

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    print(server.server_port, flush=True)
    server.serve_forever()


if __name__ == "__main__":
    serve(Path(sys.argv[1]), "--no-echo" not in sys.argv)
