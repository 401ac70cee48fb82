"""No secret survives in a text, and nothing else is touched."""

import pytest

from draftsmith.redaction import without_secrets

TOKEN = "hf_" + "AbCdEfGhIjKlMnOpQrSt"
KEY = "sk-" + "proj-abcdefghij0123456789"


@pytest.mark.parametrize(
    ("text", "left"),
    [
        (f"401 for token {TOKEN}.", "401 for token <secret>."),
        (f"key={KEY}, refused", "key=<secret>, refused"),
        ("Authorization: Bearer abc.DEF-123", "Authorization: Bearer <secret>"),
        ("{'authorization': 'Basic bWU6cDRzcw=='}", "{'authorization': 'Basic <secret>'}"),
        ("GET https://me:p4ss@hub.example/x?y=1", "GET https://<secret>@hub.example/x?y=1"),
        ("https://hub.example/x?a=1&token=abc&b=2", "https://hub.example/x?a=1&token=<secret>&b=2"),
        ("https://s3/x?X-Amz-Signature=00ff&X-Amz-Date=1", "https://s3/x?X-Amz-Signature=<secret>&X-Amz-Date=1"),
        ("http://h/v1?api_key=q&key=z", "http://h/v1?api_key=<secret>&key=<secret>"),
        ("ghp_0123456789abcdefXYZ", "<secret>"),
    ],
)
def test_what_is_known_by_its_shape_is_taken_out(text: str, left: str) -> None:
    assert without_secrets(text, {}) == left
    assert without_secrets(left, {}) == left


def test_values_of_variables_that_hold_secrets_are_taken_out_whatever_they_look_like() -> None:
    environment = {
        "MY_API_KEY": "plain words as a key",
        "LONGER_TOKEN": "plain words as a key and more",
        "db_password": "correct horse",
        "AWS_ACCESS_KEY_ID": "identifier",
    }
    for value in environment.values():
        assert without_secrets(f"a {value} b", environment) == "a <secret> b"


def test_the_processs_own_environment_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_TOKEN", "a value like any other\n")
    assert without_secrets("it is a value like any other, really") == "it is <secret>, really"


@pytest.mark.parametrize(
    "text",
    [
        "disk-offload-of-everything-that-is-large and task-specific-heads-and-more",
        "hf_config, sk-learn, the key is missing, tokens per second 3.1e5",
        "https://huggingface.co/org/model?revision=main and mail to me@example.org",
        "the basic arithmetic of a bearer token",
        "/home/me/.cache/huggingface/token and 12345678",
    ],
)
def test_innocent_text_stays_as_it_is(text: str) -> None:
    environment = {"HF_TOKEN_PATH": "/home/me/.cache", "CI_KEY": "1234567", "TOKENIZERS_PARALLELISM": "offload-of"}
    assert without_secrets(text, environment) == text
