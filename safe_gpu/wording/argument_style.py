"""How a message names an argument: as the command line or as Python."""


class ArgumentStyle:
    """How the caller of a claim writes its arguments, for use in messages. This class writes them as Python does.

    The command line has a subclass. The class is used without an instance, so that requests that hold it can be
    compared and pickled. ``argument`` is always the name in Python.

    Attributes:
        call: the function that was called; "" on the command line.
    """

    call = "claim_gpus"

    @staticmethod
    def option(argument: str) -> str:
        """Return an argument without a value: ``timeout=``."""
        return f"{argument}="

    @staticmethod
    def setting(argument: str, value: str) -> str:
        """Return an argument with a value, which is not quoted: ``exclude=0,3``."""
        return f"{argument}={value}"

    @staticmethod
    def value(value: object) -> str:
        """Return a value as the caller writes it: ``'20GiB'``."""
        return repr(value)


class EnsureStyle(ArgumentStyle):
    """The style of ``ensure_gpus``."""

    call = "ensure_gpus"
