"""Logging into the trace."""

from __future__ import annotations

import logging

from .context import context


class TraceHandler(logging.Handler):
    """Writes each record as an event of type `log`: `logging.getLogger().addHandler(TraceHandler())`."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            message = record.getMessage()
            if record.exc_info:
                message += "\n" + logging.Formatter().formatException(record.exc_info)
            context().trace("log", level=record.levelname, logger=record.name, message=message)
        except Exception:
            self.handleError(record)
