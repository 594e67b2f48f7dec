"""Connection to the Hugging Face Hub."""

import functools
import logging
import os
import re

from huggingface_hub import constants, get_session

logger = logging.getLogger("picotron")

SECONDS = 5


@functools.cache
def is_reachable() -> bool:
    """Return whether the hub answers. If not, switch its client libraries to offline mode for this process: they then
    use only downloaded files, and do not retry for up to a minute.
    """
    if constants.HF_HUB_OFFLINE:
        return False
    try:
        get_session().head(constants.ENDPOINT, timeout=SECONDS)
    except Exception as error:  # the client raises many types: no network, no such host, no certificate, ...
        logger.warning("no connection to the Hugging Face Hub (%s); only files downloaded earlier are used", error)
        os.environ["HF_HUB_OFFLINE"] = "1"  # for libraries that are imported later
        constants.HF_HUB_OFFLINE = True
        return False
    return True


def connect(name: str) -> None:
    """Log that `name` is looked for on the hub, and work offline if there is no connection.

    Raises:
        FileNotFoundError: the name cannot be that of a hub model.
    """
    if not re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", name):
        raise FileNotFoundError("there is no such folder")
    logger.info("%s is not a local folder; looking for it on the Hugging Face Hub", name)
    is_reachable()
