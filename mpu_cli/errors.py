"""The errors that a user can cause. Their text is the whole message: what is wrong, where, and what to do."""


class MpuError(Exception):
    """Something the user can act on. The command line prints it as one line and exits with ``exit_status``."""

    exit_status = 1


class UsageError(MpuError):
    """An argument that no input could make right (κ < 0, m < 2); exits with 2, as wrong usage does."""

    exit_status = 2


class Stopped(BaseException):
    """A signal to stop, raised so that what is unfinished is removed on the way out."""

    def __init__(self, number: int):
        super().__init__(number)
        self.status = 128 + number  # as shells count
