"""The errors that a user can cause: what is wrong and where, and what to do."""

from __future__ import annotations

import errno

MAX_MESSAGE = 2_000  # characters of a message


class MpuError(Exception):
    """Something the user can act on. The command line prints both parts, and exits with ``exit_status``.

    >>> error = MpuError("keys.bin: no such file", "name it with --keys")
    >>> error.problem, error.hint, str(error)
    ('keys.bin: no such file', 'name it with --keys', 'keys.bin: no such file; name it with --keys')
    """

    exit_status = 1

    def __init__(self, problem: str, hint: str | None = None):
        # What libraries say, and messages quote, may have several lines.
        problem = " ".join(line.strip() for line in problem.splitlines() if line.strip())
        if len(problem) > MAX_MESSAGE:  # names in a hostile file can be of any length
            problem = f"{problem[: MAX_MESSAGE - 500]} … {problem[-400:]}"
        super().__init__(problem, hint)
        self.problem, self.hint = problem, hint

    def __str__(self) -> str:
        return "; ".join(filter(None, (self.problem, self.hint)))


def first_line(error: BaseException) -> str:
    """The first line of an exception's message, or its type if it has none."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def no_space(error: BaseException) -> bool:
    """Whether a disk is full, or a file larger than allowed. Libraries in Rust and C++ word what the system said."""
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    # The numbers are Linux's ENOSPC, EDQUOT and EFBIG.
    signs = ("os error 28", "os error 122", "os error 27", "storagefull", "filetoolarge", "quotaexceeded",
             "no space left", "file write failed", "failed writing file", "unexpected pos")  # fmt: skip
    return any(sign in str(error).lower() for sign in signs)


class MpuWarning(UserWarning):
    """A probable mistake, as a warning in Python; the command line prints it."""


class UsageError(MpuError):
    """An argument that no input could make right (κ < 0, m < 2); exits with 2, as wrong usage does."""

    exit_status = 2


class Diverged(MpuError):
    """A training whose weights are no longer finite."""

    def __init__(self, what: str):
        super().__init__(f"training diverged: {what} no longer finite", "lower --lr, or use fewer --epochs")


class Stopped(BaseException):
    """A signal to stop, raised so that unfinished files are removed on the way out."""

    def __init__(self, number: int):
        super().__init__(number)
        self.status = 128 + number  # as shells count
