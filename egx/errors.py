"""The errors that egx raises on purpose, each a subclass of one base."""


class EgxError(Exception):
    """Base of every error raised on purpose; it names what is wrong and what was expected."""


class GraphError(EgxError, ValueError):
    """A graph or model description that cannot be used."""


class FormatError(EgxError, ValueError):
    """A file that cannot be read as what it claims to be."""


class HardwareError(EgxError, ValueError):
    """A machine description with a missing, unknown or impossible entry."""


class ProblemError(EgxError, ValueError):
    """A problem whose options are unknown, malformed or exclude each other."""


class DecisionError(EgxError, ValueError):
    """Decisions of a wrong name, shape, type or range."""


class SearchError(EgxError, ValueError):
    """A searcher that is unknown, or that cannot run on the given problem."""


class CheckpointError(EgxError, ValueError):
    """A checkpoint that is missing, damaged, or of another problem, configuration or version."""


class MissingExtraError(EgxError, ImportError):
    """An optional dependency that is not installed; the message says how to install it."""


class InternalError(EgxError, RuntimeError):
    """Two results that contradict each other, so that neither can be trusted: a defect of egx."""
