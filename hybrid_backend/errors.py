"""The errors that a user reads. Each message is one line that names what is wrong and how to fix it."""


class HybridError(Exception):
    """An error for the user, one line; the command line prints it without a traceback."""


class ConfigError(HybridError):
    """The configuration cannot be used."""


class EngineError(HybridError):
    """The engine is missing, too old, or refused what it was asked for."""


class ModelError(HybridError):
    """The model cannot be found, fetched or converted."""


class WorkerError(HybridError):
    """A CPU worker failed."""


class DeadlineError(WorkerError):
    """A CPU worker did not answer in time."""
