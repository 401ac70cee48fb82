"""Names on the Hugging Face hub: `owner/name`, or `owner/name@revision` to pin a download."""

import re

_NAME = re.compile(r"[\w-][\w.-]*/[\w.-]+(@[\w./-]+)?")


def is_hub_name(name: str) -> bool:
    """Whether a name that is no file or folder here can be one on the hub."""
    return _NAME.fullmatch(name) is not None


def pinned(name: str) -> tuple[str, str | None]:
    """The repository and its revision (commit, tag or branch); None: whatever the hub has now."""
    repository, _, revision = name.partition("@")
    return repository, revision or None
