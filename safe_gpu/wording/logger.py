"""The logger of the package, which names its sender where logging is not configured."""

import logging


def _name_sender(record: logging.LogRecord) -> bool:
    """Begin the message with ``safe_gpu: `` where no handler is set: Python then prints the text of warnings alone."""
    if not logging.getLogger(record.name).hasHandlers() and not str(record.msg).startswith("safe_gpu: "):
        record.msg = f"safe_gpu: {record.msg}"
    return True


package_logger = logging.getLogger("safe_gpu")
"""To which claims log where the caller passes no logger."""

package_logger.addFilter(_name_sender)
