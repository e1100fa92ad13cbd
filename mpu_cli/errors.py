"""The errors that a user can cause. Their text is the whole message: what is wrong, where, and what to do."""


class MpuError(Exception):
    """Something the user can act on: what is wrong and where and, on a second line of the text, what to do.

    The command line prints both and exits with ``exit_status``.

    >>> error = MpuError("keys.bin: no such file\\nname it with --keys")
    >>> error.problem, error.hint, str(error)
    ('keys.bin: no such file', 'name it with --keys', 'keys.bin: no such file; name it with --keys')
    """

    exit_status = 1

    @property
    def problem(self) -> str:
        return super().__str__().partition("\n")[0]

    @property
    def hint(self) -> str | None:
        return super().__str__().partition("\n")[2] or None

    def __str__(self) -> str:
        return "; ".join(filter(None, (self.problem, self.hint)))


class UsageError(MpuError):
    """An argument that no input could make right (κ < 0, m < 2); exits with 2, as wrong usage does."""

    exit_status = 2


class Stopped(BaseException):
    """A signal to stop, raised so that unfinished files are removed on the way out."""

    def __init__(self, number: int):
        super().__init__(number)
        self.status = 128 + number  # as shells count
