"""Errors that a user can mend: one line, naming the place and the remedy; the command line prints nothing else."""


class InputError(ValueError):
    """Something a user gave (a file, a model, a value) cannot be used. Exit code 1."""

    exit_code = 1


class NothingToTrainOnError(InputError):
    """No conversation is left. `rejects` are the lines of `rejects.jsonl`, so that their reasons are not lost."""

    def __init__(self, message: str, rejects: list[str]) -> None:
        super().__init__(message)
        self.rejects = rejects


class ConfigError(InputError):
    """A configuration or an argument is wrong. Exit code 2."""

    exit_code = 2


class StoppedError(RuntimeError):
    """Raised in a worker that waits when its neighbour has failed or the run ends; never the cause itself."""
