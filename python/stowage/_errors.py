"""What goes wrong. Every error of this package is an Error."""


class Error(RuntimeError):
    """Wrong use, or a device or machine that failed; one sentence says what to do."""


class Overflow(Error):
    """A step had more rows than room. There is more now: run the step again, from the
    same state (Runtime.run does)."""


for _e in (Error, Overflow):
    _e.__module__ = "stowage"  # as people import them
