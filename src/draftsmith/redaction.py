"""Secrets are taken out of every text that leaves the program: messages, tracebacks, reports, records."""

import os
import re
from collections.abc import Mapping

HIDDEN = "<secret>"
SHORTEST = 8  # characters; a shorter value of a variable is no secret, and would be found in innocent words
_SECRET_WORDS = ("TOKEN", "KEY", "APIKEY", "SECRET", "PASSWORD", "PASSWD", "PASS", "CREDENTIALS", "PAT")

_SHAPES = re.compile(
    r"(?<![A-Za-z0-9])(?:"
    r"hf_[A-Za-z0-9]{16,}|api_org_[A-Za-z0-9]{16,}"  # Hugging Face
    r"|sk-[A-Za-z0-9_-]{16,}"  # OpenAI and many that speak its protocol
    r"|gh[a-z]_[A-Za-z0-9]{16,}|github_pat_\w{16,}|glpat-[\w-]{16,}"
    r"|AKIA[A-Z0-9]{16}|AIza[\w-]{30,}|xox[a-z]-[\w-]{10,}"
    r"|eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]{8,}"  # a JSON web token
    r")"
)
_HEADER = re.compile(r"((?i:\bauthorization)\W{1,4}(?:\w+ )?|\bBearer )[A-Za-z0-9._~+/=-]{8,}")
_USER_OF_URL = re.compile(r"(?i)(\b[a-z][a-z0-9+.-]{1,20}://)[^\s/?#@]+@")
_QUERY_OF_URL = re.compile(
    r"(?i)([?&](?:[a-z0-9_-]*(?:token|api_?key|secret|password|passwd|signature|credential)|key|sig|auth)=)[^\s&#\"'<>]+"
)


def without_secrets(text: str, environment: Mapping[str, str] | None = None) -> str:
    """The text with every secret that can be told as one replaced by `<secret>`.

    Taken out are: values of environment variables whose names end in words like TOKEN, KEY or PASSWORD; tokens whose
    shape says what they are (`hf_…`, `sk-…`); what follows `Bearer`; user and password of a URL, and the values of
    query fields like `token`. A text without any comes back unchanged, and doing it twice changes nothing more.

    Args:
        environment: default: this process's.
    """
    for value in _values(os.environ if environment is None else environment):
        text = text.replace(value, HIDDEN)
    text = _SHAPES.sub(HIDDEN, text)
    text = _HEADER.sub(rf"\g<1>{HIDDEN}", text)
    text = _USER_OF_URL.sub(rf"\g<1>{HIDDEN}@", text)
    return _QUERY_OF_URL.sub(rf"\g<1>{HIDDEN}", text)


def _values(environment: Mapping[str, str]) -> list[str]:
    """Values of secret-looking variables, the longest first: one may hold another."""
    found = {value.strip() for name, value in environment.items() if _is_secret(name)}
    return sorted((value for value in found if len(value) >= SHORTEST), key=len, reverse=True)


def _is_secret(name: str) -> bool:
    """By the last word of its name: `HF_TOKEN`, `AWS_ACCESS_KEY_ID`; but `HF_TOKEN_PATH` holds a path."""
    return name.upper().removesuffix("_ID").rpartition("_")[2] in _SECRET_WORDS
