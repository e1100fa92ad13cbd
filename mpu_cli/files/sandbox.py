"""A process of its own, with limits of time and memory, for libraries that compute with what another party wrote.

Chat templates are programs, the rules of a tokenizer.json can grow a word to gigabytes or take for ever, and so can the
regular expressions in an adapter's config. None of these can be interrupted inside a process. That process therefore
renders templates and converts vocabularies in older forms, and it tokenizes every text and decodes every sequence of
tokens before this one does.
"""

from __future__ import annotations

import atexit
import json
import os
import re
import selectors
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpu_cli.errors import first_line
from mpu_cli.files.boundary import LARGEST_TOKENIZER, read_json_object
from mpu_cli.subprocesses import python_command, safe_environment

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

REQUEST_SECONDS = 10.0  # for one request
SECONDS_EACH = 0.05  # more for each text in it: real templates and tokenizers take a thousandth of that
MEMORY = 2 << 30  # bytes of the process; a tokenizer of 262,144 tokens takes a quarter of that
STARTING = 60.0  # seconds for importing what it needs
MAX_ERROR = 500  # characters of an error

Outcome = tuple[bool, Any]  # whether it worked, and what came out or what was wrong


class LimitError(ValueError):
    """The process took too long, needed too much memory, wrote too much or ended."""


def load_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """The tokenizer that transformers reads in ``folder``, without code from there.

    Raises ValueError if its files name a class that is not a tokenizer's, as transformers takes whatever it has by that
    name, such as a model, and calls it; and for a tokenizer of more than texts, such as of boxes on a page.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerBase
    from transformers.models.auto.tokenization_auto import tokenizer_class_from_name

    for path in (folder / "tokenizer_config.json", folder / "config.json"):
        name = read_json_object(path, LARGEST_TOKENIZER).get("tokenizer_class") if path.exists() else None
        named = tokenizer_class_from_name(name) if isinstance(name, str) and name else None
        # The placeholder for a class whose library is missing says itself what is missing.
        is_missing = getattr(named, "is_dummy", False)
        if named and not is_missing and not (isinstance(named, type) and issubclass(named, PreTrainedTokenizerBase)):
            raise ValueError(f"{path.name}: {name!r} is not a tokenizer")
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    if not isinstance(tokenizer, PreTrainedTokenizerBase):
        raise ValueError(f"{type(tokenizer).__name__} is not a tokenizer")
    if type(tokenizer).__call__ is not PreTrainedTokenizerBase.__call__:
        raise ValueError(f"{type(tokenizer).__name__} is not a tokenizer of texts alone")
    return tokenizer


class Process:
    """The other process, started on first use and again after it was stopped."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.RLock()  # _ask loads a tokenizer while it holds this
        self._owner = 0
        self._tokenizer: int | None = None  # hash of the one that it has

    def start(self) -> subprocess.Popen[bytes]:
        """Make it import its libraries while this process does something else."""
        if self._process is None or self._process.poll() is not None or self._owner != os.getpid():
            quiet = {
                "TRANSFORMERS_VERBOSITY": "error", "OPENBLAS_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1",
                "TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1",
            }  # fmt: skip
            self._process = subprocess.Popen(
                python_command("mpu_cli.files.sandbox", "serve"),
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=safe_environment(**quiet),
                start_new_session=True,  # Ctrl-C is for this process, which then ends it
            )  # fmt: skip
            self._owner, self._tokenizer = os.getpid(), None
        return self._process

    def render(self, request: Mapping[str, object], dialogues: Sequence[object], longest: int) -> list[Outcome]:
        """Each dialogue as a template prints it; ``longest`` bytes may come back. Raises LimitError."""
        return self._ask("render", dialogues, request, _seconds(dialogues), longest)

    def load(self, text: str) -> Outcome:
        """Whether the tokenizers library reads a tokenizer.json of this content; then how many tokens it adds to its
        vocabulary, and the largest number of a token. Raises LimitError."""
        with self._lock:
            [outcome] = self._ask("load", [text], {}, REQUEST_SECONDS + len(text) / 1e6, MAX_ERROR * 8)
            self._tokenizer = hash(text) if outcome[0] else None
        return outcome

    def tokenize(self, tokenizer: str, texts: Sequence[str], special: bool, controls: bool) -> list[Outcome]:
        """The number of tokens that each text has with the tokenizer of this JSON; without ``controls``, the names of
        control tokens are text like any other. Raises LimitError."""
        seconds = _seconds(texts) + sum(map(len, texts)) / 100_000
        longest = MAX_ERROR * 8 * len(texts) + 100
        options = {"special": special, "controls": controls}
        return self._ask("tokenize", texts, options, seconds, longest, tokenizer)

    def convert(self, folder: Path) -> Outcome:
        """The tokenizer.json of the tokenizer that transformers makes of the files in ``folder``; "" if it is not of
        the tokenizers library. Raises LimitError."""
        size = sum(path.stat().st_size for path in folder.iterdir() if not path.is_symlink())
        [outcome] = self._ask("convert", [str(folder)], {}, REQUEST_SECONDS + size / 1e6, 4 * LARGEST_TOKENIZER)
        return outcome

    def decode(self, tokenizer: str, sequences: Sequence[Sequence[int]], skip_special: bool) -> list[Outcome]:
        """The number of characters in the text of each sequence of tokens. Raises LimitError."""
        longest = MAX_ERROR * 8 * len(sequences) + 100
        return self._ask("decode", sequences, {"skip_special": skip_special}, _seconds(sequences), longest, tokenizer)

    def match(self, patterns: Sequence[str], names: Sequence[str]) -> list[Outcome]:
        """For each name, the first pattern that matches its end, as peft looks for it; "" if none does. Raises
        LimitError."""
        longest = 8 * (sum(map(len, patterns)) + MAX_ERROR) * (len(names) + 1)
        return self._ask("match", names, {"patterns": patterns}, REQUEST_SECONDS, longest)

    def _ask(
        self, what: str, items: Sequence[object], options: Mapping[str, object], seconds: float, longest: int,
        tokenizer: str | None = None,
    ) -> list[Outcome]:  # fmt: skip
        """The outcome for each item of a kind of work, by the worker that holds the ``tokenizer`` of this JSON, if one
        is named."""
        with self._lock:
            process = self.start()
            if tokenizer is not None and self._tokenizer != hash(tokenizer):
                worked, problem = self.load(tokenizer)
                if not worked:
                    raise LimitError(str(problem))
                process = self.start()
            try:
                # Importing what this needs does not count.
                _exchange(process, ["ready", [], {"what": what}, STARTING], STARTING, 100)
                reply = _exchange(process, [what, items, options, seconds], seconds, longest)
            except BaseException:  # a reply that nobody read would be taken for the next one
                self.stop()
                raise
        return [(bool(worked), value) for worked, value in json.loads(reply)]

    def stop(self) -> None:
        if self._process is not None and self._owner == os.getpid():
            self._process.kill()
            self._process.wait()
            for pipe in (self._process.stdin, self._process.stdout):
                if pipe is not None:
                    pipe.close()
        self._process = None


PROCESS = Process()
atexit.register(PROCESS.stop)


def _seconds(items: Sequence[object]) -> float:
    return REQUEST_SECONDS + SECONDS_EACH * len(items)


def _exchange(process: subprocess.Popen[bytes], request: list[object], seconds: float, longest: int) -> bytes:
    """Send a request; the line that comes back. Raises LimitError after ``seconds`` or ``longest`` bytes."""
    line = json.dumps(request).encode() + b"\n"
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
                raise LimitError(f"it took longer than {seconds:.0f} s")
            piece = os.read(stdout.fileno(), 1 << 16)
            if not piece:
                raise LimitError(f"it needed more than {MEMORY >> 30} GiB of memory, or its process was stopped")
            reply += piece
            if len(reply) > longest:
                raise LimitError("it prints far more than it was given")
    writer.join()
    return bytes(reply)


def _write(pipe: Any, line: bytes) -> None:
    try:
        pipe.write(line)
        pipe.flush()
    except (OSError, ValueError):
        pass  # the process was stopped; the reader says why


Work = Callable[[Any], object]


class _Worker:
    """The work of the other process: for each kind, the function of one item, which takes its options."""

    def __init__(self) -> None:
        # The renderer takes a second to import, in which tokenizers can be read already.
        self._importing = threading.Thread(target=import_module, args=("transformers.utils.chat_template_utils",))
        self._importing.start()
        self._tokenizer: Any = None  # the one that was loaded last

    def ready(self, what: str) -> Work:
        """Import what a kind of work needs."""
        if what == "render":
            self._importing.join()
        elif what == "convert":
            import_module("transformers.models.auto.tokenization_auto")
        return str

    def render(self, /, **options: Any) -> Work:  # a special token may be called self
        from transformers.utils.chat_template_utils import render_jinja_template

        def text(dialogue: object) -> str:
            printed = render_jinja_template([dialogue], **options)[0][0]
            if not isinstance(printed, str):
                raise TypeError("it does not print text")
            printed.encode()  # halves of characters are not text
            return printed

        return text

    def load(self) -> Work:
        from tokenizers import Tokenizer

        def read(text: str) -> list[int]:
            self._tokenizer = Tokenizer.from_str(text)
            vocabulary = self._tokenizer.get_vocab()
            return [len(self._tokenizer.get_added_tokens_decoder()), max(vocabulary.values(), default=0)]

        return read

    def convert(self) -> Work:
        def canonical(folder: str) -> str:
            backend = getattr(load_tokenizer(Path(folder)), "backend_tokenizer", None)
            text = backend.to_str() if backend else ""
            if len(text) > LARGEST_TOKENIZER:
                raise ValueError("it is too large")
            return text

        return canonical

    def tokenize(self, special: bool, controls: bool) -> Work:
        self._tokenizer.encode_special_tokens = not controls
        return lambda text: len(self._tokenizer.encode(text, add_special_tokens=special).ids)

    def decode(self, skip_special: bool) -> Work:
        return lambda ids: len(self._tokenizer.decode(ids, skip_special_tokens=skip_special))

    def match(self, patterns: Sequence[str]) -> Work:
        def pattern_of(name: str) -> str:
            return next((pattern for pattern in patterns if re.match(rf"(.*\.)?({pattern})$", name)), "")

        return pattern_of


def serve() -> None:
    """The other process: a request a line on standard input, a list of outcomes a line on standard output."""
    import resource

    import_module("tokenizers")
    # Not the address space: libraries reserve much of it that they never use.
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    tempfile.tempdir = os.sep  # torch looks for one in which it could write, and there is none
    worker = _Worker()
    for line in sys.stdin.buffer:
        kind, items, options, seconds = json.loads(line)
        used = resource.getrusage(resource.RUSAGE_SELF)
        # Also if nobody is left to stop it.
        ends = int(used.ru_utime + used.ru_stime + seconds) + 2
        resource.setrlimit(resource.RLIMIT_CPU, (ends, resource.RLIM_INFINITY))
        work = getattr(worker, kind)(**options)
        sys.stdout.buffer.write(json.dumps([_outcome(work, item) for item in items]).encode() + b"\n")
        sys.stdout.buffer.flush()


def _outcome(work: Work, item: object) -> Outcome:
    """The result of ``work(item)``, or the first line of what it raised: tokenizers' panics are not Exceptions."""
    try:
        return True, work(item)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        return False, first_line(error)[:MAX_ERROR]
