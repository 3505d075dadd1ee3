"""The logger of the package, which names its sender where logging is not configured."""

import logging


def package_logger() -> logging.Logger:
    """Return the logger ``safe_gpu``, to which claims log where the caller passes no logger."""
    logger = logging.getLogger("safe_gpu")
    logger.addFilter(_name_sender)  # once: a logger keeps one of a kind
    return logger


def _name_sender(record: logging.LogRecord) -> bool:
    """Begin the message with ``safe_gpu: `` where no handler is set: Python then prints the text of warnings alone."""
    if not logging.getLogger(record.name).hasHandlers() and not str(record.msg).startswith("safe_gpu: "):
        record.msg = f"safe_gpu: {record.msg}"
    return True
