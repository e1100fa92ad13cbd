"""A folder that another party can write to as well: opened once, and walked from its handle without following links.

Paths are relative, with ``/``. Between looking at an entry and using it, anything may have been put in its place, so
every step goes through directory handles (``openat`` with ``O_NOFOLLOW``), never through a path.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from mpu_cli.errors import MpuError
from mpu_cli.files.boundary import (
    NAMES,
    open_inside,
    random_name,
    unreadable,
)

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
MOST_ENTRIES = 10_000  # of a folder that are looked at
DEEPEST_FOLDER = 8  # folders below one that is removed


class Folder:
    """The directory ``root``, which may itself be a link.

    What is made inside has the root's own mode (files: without execution), whatever the umask: who may use the root may
    use that.
    """

    def __init__(self, root: Path):
        self.root = root
        try:
            self._handle = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise unreadable(root, error) from error
        self._mode = stat.S_IMODE(os.fstat(self._handle).st_mode)

    def __del__(self) -> None:
        with suppress(AttributeError, OSError):
            os.close(self._handle)

    @contextmanager
    def _open_folder(self, path: str, *, make: bool = False) -> Iterator[int]:
        """A handle of the folder ``path``; "" is the root. With ``make``, missing folders are made."""
        handle = os.dup(self._handle)
        try:
            for part in filter(None, path.split("/")):
                created = False
                if make:
                    with suppress(FileExistsError):
                        os.mkdir(part, dir_fd=handle)
                        created = True
                below = os.open(part, _DIRECTORY, dir_fd=handle)
                if created:
                    os.fchmod(below, self._mode)
                os.close(handle)
                handle = below
            yield handle
        finally:
            os.close(handle)

    @contextmanager
    def _open_parent(self, path: str, *, make: bool = False) -> Iterator[tuple[int, str]]:
        """A handle of the folder that holds ``path``, and its name there."""
        parent, _, name = path.rpartition("/")
        with self._open_folder(parent, make=make) as handle:
            yield handle, name

    def names(self, path: str) -> list[str]:
        """The entries of a folder, sorted; none if it is missing or is not a folder."""
        try:
            with self._open_folder(path) as handle, os.scandir(handle) as entries:
                names = []
                for entry in entries:
                    names.append(entry.name)
                    if len(names) > MOST_ENTRIES:
                        raise MpuError(f"{self.root / path}: more than {MOST_ENTRIES:,} entries", "clear it")
                return sorted(names)
        except OSError:
            return []

    def kind(self, path: str) -> str | None:
        """ "file", "folder", "other" (a link, a FIFO, …), or None if there is nothing."""
        status = self._status(path)
        if status is None:
            return None
        if stat.S_ISREG(status.st_mode):
            return "file"
        return "folder" if stat.S_ISDIR(status.st_mode) else "other"

    def size(self, path: str) -> int:
        """The bytes of a regular file; 0 for anything else."""
        status = self._status(path)
        return status.st_size if status and stat.S_ISREG(status.st_mode) else 0

    def _status(self, path: str) -> os.stat_result | None:
        try:
            with self._open_parent(path) as (handle, name):
                return os.stat(name, dir_fd=handle, follow_symlinks=False)
        except OSError:
            return None

    def open(self, path: str) -> BinaryIO:
        """A regular file, for reading."""
        try:
            with self._open_parent(path) as (handle, name):
                return open_inside(handle, name, self.root / path)
        except OSError as error:
            raise unreadable(self.root / path, error) from error

    def write_at(self, path: str, offset: int, data: bytes) -> None:
        """Write into a regular file, which is made if it is missing. OSError if it is anything else."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC
        with self._open_parent(path, make=True) as (handle, name):
            descriptor = os.open(name, flags, 0o600, dir_fd=handle)
        with os.fdopen(descriptor, "wb") as file:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise MpuError(f"{self.root / path}: not a regular file", "remove it")
            if status.st_size == 0 and status.st_uid == os.geteuid():
                os.fchmod(descriptor, self._mode & 0o666)
            file.seek(offset)
            file.write(data)

    @contextmanager
    def create(self, path: str) -> Iterator[BinaryIO]:
        """A new file that appears as ``path``, in place of whatever is there, when the block ends; never half-written.

        It is written under a random hidden name, which nobody can have prepared.
        """
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with self._open_parent(path, make=True) as (handle, name):
            fresh = random_name(name)
            try:
                with os.fdopen(os.open(fresh, flags, 0o600, dir_fd=handle), "wb") as file:
                    os.fchmod(file.fileno(), self._mode & 0o666)
                    yield file
                    file.flush()
                    os.fsync(file.fileno())
                os.replace(fresh, name, src_dir_fd=handle, dst_dir_fd=handle)
                os.fsync(handle)
            except BaseException:
                with suppress(OSError):
                    os.unlink(fresh, dir_fd=handle)
                raise

    def make(self, path: str) -> None:
        """Make a folder, and those above it. OSError if something else has one of the names."""
        with self._open_folder(path, make=True):
            pass

    def move(self, source: str, target: str) -> None:
        """Rename an entry; the folders above ``target`` are made."""
        with self._open_parent(source) as (old, name), self._open_parent(target, make=True) as (new, new_name):
            os.replace(name, new_name, src_dir_fd=old, dst_dir_fd=new)
            os.fsync(new)

    def remove(self, path: str) -> None:
        """Remove a file, a link (not what it leads to), or a folder with everything in it."""
        with suppress(FileNotFoundError, NotADirectoryError), self._open_parent(path) as (handle, name):
            _remove(name, handle, DEEPEST_FOLDER)


def _remove(name: str, parent: int, deeper: int) -> None:
    try:
        os.unlink(name, dir_fd=parent)
        return
    except (IsADirectoryError, PermissionError):  # a folder, for which macOS raises the second
        pass
    if deeper == 0:
        raise MpuError(f"{name}: folders nested too deep to be removed", "remove them yourself")
    handle = os.open(name, _DIRECTORY, dir_fd=parent)
    try:
        with os.scandir(handle) as entries:
            for inner in [entry.name for entry in entries]:
                _remove(inner, handle, deeper - 1)
    finally:
        os.close(handle)
    os.rmdir(name, dir_fd=parent)


# The contents that the JSON files of a model may have: allow-lists of names, and of the kinds of values.
#
# Both directions use them. A config from another party could name files, repositories or code for the libraries that
# read it (``transformers_weights``, ``auto_map``, ``quantization_config``, kernels); one that is published could name
# paths on the server. So names that are not listed are left out, and words that could be paths or addresses are as
# well.

DEEPEST = 6  # levels of JSON in each other
MOST_ITEMS = 100_000  # of a list or table
LONGEST_TOKEN = 1_000  # characters
MAX_ADDED_TOKENS = 20_000  # Gemma 3 has 6,415
MAX_TOKEN_NUMBER = 1 << 22  # 262,144 tokens are the most that are known
LONGEST_TEMPLATE = 1 << 18  # characters of a chat template; the longest that are known have 30,000
LARGEST_NUMBER = 2**53
_WORD = re.compile(r"[A-Za-z0-9_.+-]{0,80}")  # no slash, colon, tilde or space
_LAYER = re.compile(r"\d{1,5}")  # the number of a layer, in a table that has entries for some
_LAYERS = re.compile(r"[ME*-]{1,1000}")  # Nemotron-H's layers, a letter each
_MISSING = object()


# Entries that do not change what a model computes: labels, where it came from, what trained it.
HARMLESS = {
    "_name_or_path", "_model_name_or_path", "auto_map", "id2label", "label2id", "unsloth_fixed", "unsloth_version",
    "torchscript", "task_specific_params", "problem_type", "finetuning_task", "_attn_implementation",
    "output_attentions",
}  # fmt: skip
# Entries of other files that change neither tokens nor what is generated: where files lay, and what limits nothing.
_HARMLESS_BESIDE = {
    "tokenizer_config.json": {
        "model_max_length", "name_or_path", "auto_map", "is_local", "local_files_only", "tokenizer_file", "vocab_file",
        "merges_file", "special_tokens_map_file",
    },
}  # fmt: skip


def clean_config(config: Mapping[str, object], also: Collection[str] = ()) -> dict[str, object]:
    """A config.json, with the names that supported families have and those in ``also``."""
    return _table(config, {*NAMES["config"], *NAMES["rope"], *also})


def left_out(config: Mapping[str, object], fields: Collection[str] | None = None) -> list[str]:
    """The entries of a config.json that ``clean_config`` drops and that matter: those of ``fields``, which a library
    reads, or, without ``fields``, all but those that do not describe the architecture."""
    return sorted(_dropped_entries(config, clean_config(config), HARMLESS if fields is None else None, fields or ()))


def _dropped_entries(
    config: Mapping[str, Any], cleaned: Mapping[str, Any], harmless: Collection[str] | None, fields: Collection[str]
) -> Iterator[str]:
    for name, value in config.items():
        if name in cleaned and isinstance(value, dict):  # a part, such as that for images
            yield from (f"{name}.{inner}" for inner in _dropped_entries(value, cleaned[name], harmless, fields))
            continue
        matters = name in fields if harmless is None else name not in harmless
        if matters and name not in cleaned and value not in (None, False, [], {}):
            yield name


def left_out_of(file: str, table: Mapping[str, object]) -> list[str]:
    """The entries of a JSON file beside the config that cleaning drops and that matter."""
    return sorted(_dropped_entries(table, JSON_FILES[file](table), _HARMLESS_BESIDE.get(file, ()), ()))


def clean_generation(config: Mapping[str, object]) -> dict[str, object]:
    """A generation_config.json: numbers and flags, and texts at which generating ends."""
    texts = {name: _texts(config.get(name, _MISSING), LONGEST_TOKEN) for name in NAMES["generation_texts"]}
    cleaned = _table(config, NAMES["generation"]) | {name: text for name, text in texts.items() if text is not _MISSING}
    return {name: cleaned[name] for name in config if name in cleaned}


def clean_processor(config: Mapping[str, object]) -> dict[str, object]:
    """A preprocessor_config.json or processor_config.json."""
    return _table(config, NAMES["processor"])


def clean_tokenizer_config(config: Mapping[str, object]) -> dict[str, object]:
    """A tokenizer_config.json. Its tokens and chat templates may be any text."""
    plain = {k: v for k, v in config.items() if not isinstance(v, list | dict) or k == "model_input_names"}
    cleaned = _table(plain, NAMES["tokenizer"])
    if not isinstance(cleaned.get("model_max_length"), int | float) or isinstance(cleaned["model_max_length"], bool):
        cleaned.pop("model_max_length", None)
    for name in NAMES["tokenizer_texts"]:
        limit = LONGEST_TEMPLATE if name == "chat_template" else LONGEST_TOKEN
        raw = config.get(name, _MISSING)
        if isinstance(raw, list | dict):
            check_tokens(len(raw))
        value = _texts(raw, limit)
        if name == "chat_template" and not _is_template(value):
            continue
        if value is not _MISSING:
            cleaned[name] = value
    return {name: cleaned[name] for name in config if name in cleaned}


def clean_tokens(table: Mapping[str, object]) -> dict[str, object]:
    """A special_tokens_map.json or added_tokens.json: tokens by role, or numbers by token."""
    check_tokens(len(table))
    values = {name: _texts(value, LONGEST_TOKEN) for name, value in table.items() if len(name) <= LONGEST_TOKEN}
    return {name: value for name, value in values.items() if value is not _MISSING}


def check_tokens(count: int, largest: int = 0) -> None:
    """Raise MpuError for more tokens beside a vocabulary, or a larger number of a token, than libraries can read in
    seconds: they make lists as long as the largest number."""
    if largest > MAX_TOKEN_NUMBER:
        raise MpuError(f"a token has the number {largest:,}, and mpu takes {MAX_TOKEN_NUMBER:,}")
    if count > MAX_ADDED_TOKENS:
        raise MpuError(f"{count:,} added tokens, and mpu takes {MAX_ADDED_TOKENS:,}: libraries take minutes for them")


def clean_chat_template(table: Mapping[str, object]) -> dict[str, object]:
    """A chat_template.json, the form before chat_template.jinja."""
    value = _texts(table.get("chat_template", _MISSING), LONGEST_TEMPLATE)
    return {"chat_template": value} if _is_template(value) else {}


def _is_template(value: object) -> bool:
    """Whether ``value`` is a chat template, or a list of templates by name."""
    if isinstance(value, str):
        return True
    return isinstance(value, list) and all(
        isinstance(entry, dict) and isinstance(entry.get("name"), str) and isinstance(entry.get("template"), str)
        for entry in value
    )


JSON_FILES: dict[str, Callable[[Mapping[str, object]], dict[str, object]]] = {
    "generation_config.json": clean_generation,
    "preprocessor_config.json": clean_processor,
    "processor_config.json": clean_processor,
    "video_preprocessor_config.json": clean_processor,
    "tokenizer_config.json": clean_tokenizer_config,
    "special_tokens_map.json": clean_tokens,
    "added_tokens.json": clean_tokens,
    "chat_template.json": clean_chat_template,
}


def _table(table: Mapping[str, object], names: Collection[str]) -> dict[str, object]:
    """The entries that are ``names``, or numbers of layers, with values of plain words, numbers and flags."""

    def has_name(name: str) -> bool:
        return name in names or _LAYER.fullmatch(name) is not None

    cleaned = {name: _only(value, _is_plain, has_name, 1) for name, value in table.items() if has_name(name)}
    return {name: value for name, value in cleaned.items() if value is not _MISSING}


def _texts(value: object, limit: int) -> object:
    """``value`` if it is a text, a number, a flag, or lists and tables of these with short names; else _MISSING."""

    def is_short(text: object) -> bool:
        return not isinstance(text, str) or len(text) <= limit

    return _only(value, is_short, lambda name: len(name) <= LONGEST_TOKEN, 0)


def _is_plain(value: object) -> bool:
    if isinstance(value, str):
        return bool(_LAYERS.fullmatch(value) or (_WORD.fullmatch(value) and ".." not in value))
    # Infinity means no limit, as in Mamba2's time_step_limit.
    return not isinstance(value, int | float) or not LARGEST_NUMBER < abs(value) < float("inf")


def _only(value: object, is_kept: Callable[[object], bool], has_name: Callable[[str], bool], depth: int) -> object:
    """``value`` if it ``is_kept``, a list of such values, or the entries with such values of a table, if it
    ``has_name``; else _MISSING."""
    if not isinstance(value, list | dict):
        return value if is_kept(value) else _MISSING
    if depth >= DEEPEST or len(value) > MOST_ITEMS:
        return _MISSING
    if isinstance(value, dict):
        cleaned = {name: _only(inner, is_kept, has_name, depth + 1) for name, inner in value.items() if has_name(name)}
        return {name: inner for name, inner in cleaned.items() if inner is not _MISSING}
    items = [_only(item, is_kept, has_name, depth + 1) for item in value]
    return _MISSING if any(item is _MISSING for item in items) else items
