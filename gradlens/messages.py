"""What gradlens says to the user: the category of its warnings, and its logger."""

from __future__ import annotations

import logging

LOGGER = logging.getLogger("gradlens")
LOGGER.setLevel(logging.INFO)  # whatever the root logger's is: each message is said once


class GradlensWarning(UserWarning):
    """The category of all warnings of gradlens, such as the notes on a run.

    ``warnings.simplefilter("ignore", gradlens.GradlensWarning)`` silences them. The history still
    has the notes.
    """


def log(text: str) -> None:
    """Log to the logger "gradlens" as INFO.

    It is what ``verbose`` and ``debug`` ask for, and what sums up the first steps. A program
    without any handler of logging has it on stderr.
    """
    if LOGGER.hasHandlers() or not LOGGER.isEnabledFor(logging.INFO):
        LOGGER.info(text)
    else:  # Python's own last resort drops what is below WARNING
        record = LOGGER.makeRecord(LOGGER.name, logging.INFO, __file__, 0, text, (), None)
        logging.StreamHandler().handle(record)
