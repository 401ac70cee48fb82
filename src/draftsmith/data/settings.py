"""What the chat template is told besides the messages. Light, so that the config can be read before anything heavy."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from typing import Any

import yaml

from draftsmith.errors import ConfigError
from draftsmith.redaction import without_secrets

TODAY = date(2026, 1, 1)  # what templates that print the date print: data must not change overnight


@dataclass(frozen=True, slots=True)
class TemplateSettings:
    """What the template is told besides the messages.

    `thinking` sets the template's own switch; None leaves it alone. `arguments` are its other variables.
    """

    thinking: bool | None = None
    arguments: Mapping[str, Any] = field(default_factory=dict)
    today: date = TODAY

    def to_json(self) -> dict[str, Any]:
        """For a file, and to be compared."""
        return {"thinking": self.thinking, "arguments": dict(self.arguments), "today": self.today.isoformat()}


def parse_settings(thinking: bool | None, arguments: Sequence[str], today: str | None) -> TemplateSettings:
    """Settings from a command line; `arguments` are `name=value` with values as in YAML.

    Raises:
        ConfigError: names the argument.
    """
    given = parse_values("--template-argument", arguments)
    try:
        day = TODAY if today is None else date.fromisoformat(today)
    except ValueError:
        raise ConfigError(f"--template-date {today}: write it as YYYY-MM-DD") from None
    return TemplateSettings(thinking, given, day)


def parse_values(option: str, arguments: Sequence[str]) -> dict[str, Any]:
    """`name=value` with values as in YAML, and no others than JSON has: they are saved and sent as JSON.

    Raises:
        ConfigError: names the option and the argument.
    """
    given: dict[str, Any] = {}
    for argument in arguments:
        if without_secrets(argument) != argument:
            raise ConfigError(
                f"{option} {without_secrets(argument)}: a secret here would be written down; leave it out"
            )
        name, equals, value = argument.partition("=")
        if not (name and equals):
            raise ConfigError(f"{option} {argument}: write it as name=value")
        try:
            given[name] = yaml.safe_load(value)
            json.dumps(given[name], allow_nan=False)
        except (yaml.YAMLError, OverflowError, RecursionError):
            raise ConfigError(f"{option} {argument}: the value is not YAML") from None
        except (ValueError, TypeError):  # ValueError: no such day, NaN
            raise ConfigError(f"{option} {argument}: JSON has no such value; put a text into quotes") from None
    return given
