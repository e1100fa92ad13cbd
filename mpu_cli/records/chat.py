"""Chat templates are programs from another party. They run in a process of their own, with limits of time and memory.

transformers' sandbox keeps a template from files and attributes, but not from loops that never end or numbers that fill
the memory, and such a computation cannot be interrupted inside a process. Rendering itself is transformers' own.
"""

from __future__ import annotations

import atexit
import json
import os
import selectors
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mpu_cli.errors import MpuError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SECONDS = 10.0  # for one request
SECONDS_EACH = 0.05  # more for each dialogue in it: real templates take a thousandth of that
MEMORY = 1 << 30  # bytes of the process
LONGEST = 1 << 16  # characters that a template may add to a dialogue
STARTING = 60.0  # seconds for importing what renders

Dialogue = Sequence[Mapping[str, str]]


class TemplateError(ValueError):
    """A chat template that rejected a dialogue, took too long or wrote too much."""


def render(
    tokenizer: PreTrainedTokenizerBase, dialogues: Sequence[Dialogue], *, generation_prompt: bool, **variables: object
) -> list[str]:
    """Each dialogue as the tokenizer's chat template prints it, as ``apply_chat_template`` does.

    ``variables`` are what the template sees besides; ``chat_template`` replaces the template. Raises TemplateError.
    """
    template = variables.pop("chat_template", None) or tokenizer.get_chat_template()
    request = {
        "conversations": [[dict(turn) for turn in dialogue] for dialogue in dialogues], "chat_template": template,
        "add_generation_prompt": generation_prompt, **tokenizer.special_tokens_map, **variables,
    }  # fmt: skip
    room = sum(len(json.dumps(dialogue)) + LONGEST for dialogue in request["conversations"])
    texts = _RENDERER.ask(request, SECONDS + SECONDS_EACH * len(dialogues), 6 * room)
    if len(texts) != len(dialogues):
        raise TemplateError("it returned another number of dialogues")
    return texts


def tokens(
    tokenizer: PreTrainedTokenizerBase, dialogues: Sequence[Dialogue], *, generation_prompt: bool, **variables: object
) -> list[list[int]]:
    """The tokens of each dialogue, without special tokens beyond the template's."""
    texts = render(tokenizer, dialogues, generation_prompt=generation_prompt, **variables)
    return tokenizer(texts, add_special_tokens=False).input_ids


def prepare() -> None:
    """Start the process that renders, so that it imports its libraries while this one does something else."""
    _RENDERER.start()


class _Renderer:
    """The other process, started on first use and again after it was stopped."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()
        self._owner = 0

    def start(self) -> subprocess.Popen[bytes]:
        if self._process is None or self._process.poll() is not None or self._owner != os.getpid():
            quiet = {"TRANSFORMERS_VERBOSITY": "error", "OPENBLAS_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
            self._process = subprocess.Popen(
                [sys.executable, "-c", "from mpu_cli.records.chat import serve; serve()"],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=os.environ | quiet,
                start_new_session=True,  # Ctrl-C is for this process, which then ends it
            )  # fmt: skip
            self._owner = os.getpid()
        return self._process

    def ask(self, request: Mapping[str, object], seconds: float, longest: int) -> list[str]:
        with self._lock:
            process = self.start()
            try:
                _expect(process, b"ready\n", STARTING)
                reply = _exchange(process, json.dumps(request).encode() + b"\n", seconds, longest)
            except TemplateError:
                self.stop()
                raise
            except BrokenPipeError as error:
                self.stop()
                raise TemplateError("its process ended") from error
        found = json.loads(reply)
        if isinstance(found, str):
            raise TemplateError(found)
        return found

    def stop(self) -> None:
        if self._process is not None and self._owner == os.getpid():
            self._process.kill()
            self._process.wait()
            for pipe in (self._process.stdin, self._process.stdout):
                if pipe is not None:
                    pipe.close()
        self._process = None


_RENDERER = _Renderer()
atexit.register(_RENDERER.stop)


def _expect(process: subprocess.Popen[bytes], line: bytes, seconds: float) -> None:
    """Ask the process whether it is there, and wait until it has imported what it needs."""
    if _exchange(process, line, seconds, len(line)) != line:
        raise MpuError("chat templates cannot be rendered: their process does not answer")


def _exchange(process: subprocess.Popen[bytes], line: bytes, seconds: float, longest: int) -> bytes:
    """Send a line, and the line that comes back. Raises TemplateError after ``seconds`` or ``longest`` bytes."""
    stdin, stdout = process.stdin, process.stdout
    assert stdin is not None
    assert stdout is not None
    writer = threading.Thread(target=_write, args=(stdin, line), daemon=True)  # both pipes could be full
    writer.start()
    ends = time.monotonic() + seconds
    reply = bytearray()
    with selectors.DefaultSelector() as ready:
        ready.register(stdout, selectors.EVENT_READ)
        while not reply.endswith(b"\n"):
            if not ready.select(max(0.0, ends - time.monotonic())):
                raise TemplateError(f"it took longer than {seconds:.0f} s")
            piece = os.read(stdout.fileno(), 1 << 16)
            if not piece:
                raise TemplateError(f"it needed more than {MEMORY >> 30} GiB of memory, or its process was stopped")
            reply += piece
            if len(reply) > longest:
                raise TemplateError("it prints far more than the dialogue")
    writer.join()
    return bytes(reply)


def _write(pipe: Any, line: bytes) -> None:
    try:
        pipe.write(line)
        pipe.flush()
    except (OSError, ValueError):
        pass  # the process was stopped; the reader says why


def serve() -> None:
    """The other process: a request a line on standard input, a list of texts or an error's text on standard output."""
    import resource

    import jinja2
    from transformers.utils.chat_template_utils import render_jinja_template

    # Not the address space: libraries reserve much of it that they never use.
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    expected = (jinja2.TemplateError, ArithmeticError, TypeError, ValueError, AttributeError, LookupError,
                RecursionError, MemoryError)  # fmt: skip
    out = sys.stdout.buffer
    for line in sys.stdin.buffer:
        if line == b"ready\n":
            out.write(line)
            out.flush()
            continue
        reply: list[str] | str
        try:
            reply = render_jinja_template(**json.loads(line))[0]
        except expected as error:
            reply = (str(error) or type(error).__name__)[:500]
        try:
            text = json.dumps(reply)
        except (TypeError, ValueError, MemoryError):
            text = json.dumps("it does not print text")
        out.write(text.encode() + b"\n")
        out.flush()
