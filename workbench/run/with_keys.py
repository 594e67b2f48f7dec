"""Configs with other values of some keys. No torch, so that a browser can use it."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from picotron.config import Config


def with_keys(config: "Config", **sections: dict[str, Any]) -> "Config":
    """Return a config with other values of some keys, unchecked, as in `with_keys(config, training={"seed": 1})`."""
    changed = {name: getattr(config, name).model_copy(update=keys) for name, keys in sections.items()}
    return config.model_copy(update=changed)
