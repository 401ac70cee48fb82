"""The folder of a regeneration: a log of outcomes in the order they came, and at the end the answers in input order."""

import json
import os
from array import array
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from draftsmith.data.regenerate.tasks import ERROR, SUCCESS, Outcome, Task
from draftsmith.errors import ConfigError, InputError
from draftsmith.files import FileLock, file_aside, lock_folder, write_text
from draftsmith.redaction import without_secrets

SETTINGS, LOG, ANSWERS, REJECTS = "settings.json", "outcomes.log", "answers.jsonl", "rejects.jsonl"
_MAY_DIFFER = ("servers", "batch_size")  # they say how answers are made, not which


class Record:
    """What has been answered so far. Owner: one thread. Guarantees:

    - An outcome that was added is in the log, as one whole line, before `add` returns; half a line that a killed
      process left is cut off.
    - A record has one outcome: the last one in the log. One that was asked for something else is refused.
    - Memory is 16 bytes per input; the answers themselves are read back from the log.
    """

    def __init__(self, folder: Path, settings: Mapping[str, Any], *, retry_errors: bool = False) -> None:
        """Opens the folder, or makes it.

        Args:
            folder: holds one regeneration and nothing else.
            settings: all that decides the answers; must be those the folder began with.
            retry_errors: records that ended in an error are open again.

        Raises:
            ConfigError: another process has it, it holds something else, or a setting differs.
        """
        self.folder = folder
        self._places, self._keys = array("q"), array("Q")
        self._lock = _locked(folder)
        self._check_settings(settings)
        self._log = (folder / LOG).open("ab+")
        self._read_log(retry_errors)

    def __contains__(self, item: Task | Outcome) -> bool:
        """Whether a record has its outcome.

        Raises:
            ConfigError: it has one, but it was another record then.
        """
        if item.number >= len(self._places) or self._places[item.number] < 0:
            return False
        if self._keys[item.number] != _hash(item.key):
            raise ConfigError(
                f"{item.file}:{item.line} is not the record that {self.folder} has an outcome for: the input has "
                "changed; put it back, or choose another --out"
            )
        return True

    def add(self, outcome: Outcome) -> None:
        """Keeps an outcome, with no secrets in its reason: servers may repeat what they were sent."""
        kept = asdict(outcome) | {"reason": without_secrets(outcome.reason)}
        line = json.dumps(kept, ensure_ascii=False).encode() + b"\n"
        place = self._log.seek(0, os.SEEK_END)
        self._log.write(line)
        self._log.flush()
        self._note(outcome.number, place, outcome.key)

    def finish(self, total: int) -> Counter[str]:
        """Writes the answers and the rejects, both in input order. Returns the number of records of each status.

        Raises:
            InputError: a record has no outcome.
        """
        counts: Counter[str] = Counter()
        with (
            file_aside(self.folder / ANSWERS) as answers_path,
            file_aside(self.folder / REJECTS) as rejects_path,
            answers_path.open("w", encoding="utf-8") as answers,
            rejects_path.open("w", encoding="utf-8") as rejects,
        ):
            for number in range(total):
                if number >= len(self._places) or self._places[number] < 0:
                    raise InputError(f"{self.folder}: record {number} has no outcome; run the same command again")
                self._log.seek(self._places[number])
                found = json.loads(self._log.readline())
                counts[found["status"]] += 1
                if found["status"] == SUCCESS:
                    answers.write(json.dumps(found["record"], ensure_ascii=False) + "\n")
                else:
                    kept = {key: found[key] for key in ("file", "line", "status", "reason")}
                    rejects.write(json.dumps(kept, ensure_ascii=False) + "\n")
        return counts

    def close(self) -> None:
        self._log.close()
        self._lock.release()

    def __enter__(self) -> "Record":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check_settings(self, settings: Mapping[str, Any]) -> None:
        path = self.folder / SETTINGS
        if not path.exists():
            write_text(path, [json.dumps(settings, indent=2, ensure_ascii=False) + "\n"])
            return
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            asked = json.loads(json.dumps(settings))
            differing = [k for k in {**asked, **found} if k not in _MAY_DIFFER and asked.get(k) != found.get(k)]
        except (ValueError, TypeError) as error:
            raise InputError(f"{path} cannot be read: {error}; choose another --out") from None
        if differing:
            key = differing[0]
            raise ConfigError(
                f"--out {self.folder} was begun with {key} {found.get(key)!r}, now it is {asked.get(key)!r}; choose "
                "another --out, or go on with the same"
            )

    def _read_log(self, retry_errors: bool) -> None:
        kept = 0
        for place, line in _whole_lines(self.folder / LOG):
            try:
                found = json.loads(line)
                number, key, status = found["number"], found["key"], found["status"]
                if not isinstance(number, int) or number < 0 or _hash(key) < 0:
                    raise ValueError
            except (ValueError, KeyError, TypeError, AttributeError):
                raise InputError(f"{self.folder / LOG} is damaged at byte {place}; cut it there to go on") from None
            self._note(number, -1 if status == ERROR and retry_errors else place, key)
            kept = place + len(line)
        self._log.truncate(kept)

    def _note(self, number: int, place: int, key: str) -> None:
        missing = number + 1 - len(self._places)
        if missing > 0:
            self._places.extend([-1] * missing)
            self._keys.extend([0] * missing)
        self._places[number], self._keys[number] = place, _hash(key)


def _hash(key: str) -> int:
    return int(key, 16) if key else 0


def _whole_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    place = 0
    with path.open("rb") as file:
        for line in file:
            if not line.endswith(b"\n"):
                return
            yield place, line
            place += len(line)


def _locked(folder: Path) -> FileLock:
    """The folder's lock, held until it is released."""
    if folder.is_dir():
        others = [p.name for p in folder.iterdir() if p.name not in (SETTINGS, LOG, ANSWERS, REJECTS)]
        strange = [name for name in others if not name.startswith(".")]
        if strange or (any(folder.glob("*.jsonl")) and not (folder / SETTINGS).exists()):
            raise ConfigError(f"--out {folder} is not empty and no regeneration; choose another folder")
    return lock_folder(folder, "--out")
