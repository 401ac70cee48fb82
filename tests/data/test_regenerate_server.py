"""Whatever a server does: every input ends once, the counts add up, the order stays, and a resume repeats nothing."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from draftsmith import cli
from draftsmith.data.regenerate import run
from draftsmith.data.regenerate.record import ANSWERS, LOG, REJECTS, SETTINGS
from draftsmith.data.regenerate.run import Inputs, Regenerated, regenerate
from draftsmith.data.regenerate.server import ServerAnswers, ServerSettings, _Rota, base_url
from draftsmith.data.regenerate.tasks import Sampling
from draftsmith.errors import ConfigError, InputError
from regenerate_servers import GARBAGE, STALL_S, Seen, serving

KEY = "sk-never-to-be-seen"


@pytest.fixture
def server() -> Iterator[tuple[str, Seen]]:
    with serving() as found:
        yield found


def write(path: Path, questions: list[Any]) -> str:
    """Strings are user turns, other things records."""
    records = [q if isinstance(q, dict) else {"messages": [{"role": "user", "content": q}]} for q in questions]
    path.write_text("".join(json.dumps(r) + "\n" if r != {"broken": 1} else "{broken\n" for r in records))
    return str(path)


def settings(*urls: str, **changes: Any) -> ServerSettings:
    usual = {"model": "m", "concurrency": 8, "attempts": 4, "timeout_s": 1.0, "first_wait_s": 0.01, "fields": {}}
    return ServerSettings(urls=urls, **(usual | {"api_key": KEY} | changes))


def ask(file: str, out: Path, how: ServerSettings, **more: Any) -> Regenerated | None:
    stop = threading.Event()
    answers = ServerAnswers(how, Sampling(64), stop)
    try:
        return regenerate(Inputs([file], None, None), out, {"model": answers.model}, answers, stop, **more)
    finally:
        answers.close()


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def answered(out: Path) -> list[str]:
    """The questions that have an answer, in the order of the file."""
    return [record["messages"][-2]["content"] for record in lines(out / ANSWERS)]


BAD_ONCE = [*GARBAGE, "crash", "busy", "gateway", "stall", "drip", "cut"]
BAD_ALWAYS = ["crash!", "nojson!", "blank!", "cut!", "toolong!", "length!", "drip!"]


def test_a_server_that_fails_stalls_and_returns_garbage(server: tuple[str, Seen], tmp_path: Path) -> None:
    url, seen = server
    good = [f"well:{n}" for n in range(20)]
    once = [f"{wish}:{n}" for n, wish in enumerate(BAD_ONCE)]
    twice = [f"{wish}2:{n}" for n, wish in enumerate(BAD_ONCE) if wish not in ("stall", "drip")]
    never = [f"{wish}:{n}" for n, wish in enumerate(BAD_ALWAYS)]
    nothing: list[Any] = [{"broken": 1}, {"text": "plain"}, {"messages": []}, {"prompt": ""}]
    groups = [good, once, twice, never, nothing]
    mixed = [q for k in range(20) for group in groups for q in group[k : k + 1]]  # one of each in turn
    done = ask(write(tmp_path / "in.jsonl", mixed), tmp_path / "out", settings(url))

    assert done is not None
    assert (done.success, done.error, done.skipped) == (len(good + once + twice), len(never), len(nothing))
    assert done.success + done.error + done.skipped == done.total == len(mixed)
    wanted = {*good, *once, *twice}
    assert answered(tmp_path / "out") == [q for q in mixed if isinstance(q, str) and q in wanted]
    for record in lines(tmp_path / "out" / ANSWERS):
        assert record["messages"][-1] == {"role": "assistant", "content": f"good 1 {record['messages'][0]['content']}"}
    rejects = lines(tmp_path / "out" / REJECTS)
    unanswered = [n for n, q in enumerate(mixed, 1) if not (isinstance(q, str) and q in wanted)]
    assert [(r["line"], r["status"]) for r in rejects] == [
        (n, "error" if isinstance(mixed[n - 1], str) else "skipped") for n in unanswered
    ]
    reasons = {mixed[r["line"] - 1]: r["reason"] for r in rejects if r["status"] == "error"}
    assert "answers 500: refused" in reasons["crash!:0"]
    assert "sends no JSON: '<html>busy</html>' (attempt 4 of 4)" in reasons["nojson!:1"]
    assert "the answer is empty" in reasons["blank!:2"]
    assert "cut at 3 tokens; raise --max-new-tokens 64" in reasons["length!:5"]
    assert "sends for more than 1 s" in reasons["drip!:6"]
    asked = {"well": 1, "toolong!": 1, "length!": 1, "crash!": 4, "cut!": 4, "stall": 2, "crash": 2, "crash2": 3}
    for question, attempts in seen.attempts.items():
        assert attempts == asked.get(question.partition(":")[0], attempts), question


def test_the_key_reaches_the_server_and_nothing_else(
    server: tuple[str, Seen], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if a server writes it into its error messages."""
    url, seen = server
    monkeypatch.setenv("MY_KEY", KEY)
    file = write(tmp_path / "in.jsonl", ["well:1", "toolong!:2", "crash!:3"])
    arguments = ["data", "regenerate", file, "--server", url, "--out", str(tmp_path / "out"), "--attempts", "2"]
    assert cli.main([*arguments, "--api-key-env", "MY_KEY"]) == 0
    assert seen.keys == {f"Bearer {KEY}"}
    (tmp_path / "key").write_text(KEY + "\n")
    refused = write(tmp_path / "refused.jsonl", ["nokey!:1"])
    arguments[2], arguments[6] = refused, str(tmp_path / "other")
    assert cli.main([*arguments, "--api-key-file", str(tmp_path / "key")]) == 1
    shown = capsys.readouterr()
    assert "answers 401: refused: your key is Bearer <api key>" in shown.err
    assert "1 answered + 2 errors + 0 skipped = 3 records" in shown.out
    written = [p.read_text() for folder in ("out", "other") for p in (tmp_path / folder).iterdir()]
    assert all(KEY not in text for text in [shown.out, shown.err, *written])
    assert KEY not in repr(settings(url))


def test_a_key_that_is_not_there_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["data", "regenerate", "x", "--server", "http://h", "--out", str(tmp_path / "o")]
    assert cli.main([*arguments, "--api-key-env", "NO_SUCH_NAME"]) == 2
    assert cli.main([*arguments, "--api-key-file", str(tmp_path / "none")]) == 2
    assert "no such environment variable" in capsys.readouterr().err


def test_later_turns_are_asked_in_the_context_of_the_new_answers(server: tuple[str, Seen], tmp_path: Path) -> None:
    url, seen = server
    turns = [("system", "Be kind."), ("user", "one"), ("assistant", "old 1"), ("user", "two"), ("assistant", "old 2")]
    chat = {"messages": [{"role": role, "content": text} for role, text in turns]}
    ends_in_a_question = {"messages": [*chat["messages"], {"role": "user", "content": "three"}]}
    done = ask(write(tmp_path / "in.jsonl", [chat, ends_in_a_question]), tmp_path / "out", settings(url))
    assert done is not None
    assert done.success == 2
    short, long = (record["messages"] for record in lines(tmp_path / "out" / ANSWERS))
    assert [m["content"] for m in short] == ["Be kind.", "one", "good 2 one", "two", "good 4 two"]
    assert [m["content"] for m in long[3:]] == ["two", "good 4 two", "three", "good 6 three"]
    assert all("old" not in m["content"] for body in seen.bodies for m in body["messages"])
    assert len(seen.bodies) == 5


def test_other_forms_tools_thinking_and_raw_prompts(server: tuple[str, Seen], tmp_path: Path) -> None:
    url, seen = server
    tools = [{"type": "function", "function": {"name": "f"}}]
    called = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}
    files = {
        "a": [{"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "old"}]}],
        "b": [{"instruction": "do", "input": "this", "output": "old"}],
        "c": [{"prompt": "Once", "completion": "old"}, {"prompt": "Twice"}],
        "d": [{"messages": [{"role": "user", "content": "call"}], "tools": tools}],
        "e": [{"messages": [{"role": "user", "content": "x"}, called, {"role": "tool", "content": "1"}]}],
        "f": [{"messages": [{"role": "assistant", "content": "I begin"}]}],
    }
    found = {}
    for name, records in files.items():
        done = ask(write(tmp_path / f"{name}.jsonl", records), tmp_path / name, settings(url))
        assert done is not None
        found[name] = lines(tmp_path / name / ANSWERS) or lines(tmp_path / name / REJECTS)
    assert found["a"][0]["messages"][1]["content"] == "good 1 hi"
    assert found["b"][0]["messages"][0]["content"] == "do\n\nthis"
    assert [r["completion"] for r in found["c"]] == ["good 0 Once", "good 0 Twice"]
    assert found["d"][0]["tools"] == tools
    assert next(b for b in seen.bodies if "tools" in b)["tools"] == tools
    assert "depends on its tool calls" in found["e"][0]["reason"]
    assert "no user or tool turn asks for" in found["f"][0]["reason"]


def test_killed_and_run_again_it_repeats_nothing(server: tuple[str, Seen], tmp_path: Path) -> None:
    url, seen = server
    seen.delay_s = 0.05
    questions = [f"{wish}:{n}" for n, wish in enumerate(["well", "well", "crash", "well", "crash!", "well"] * 5)]
    file = write(tmp_path / "in.jsonl", questions)
    whole = ask(file, tmp_path / "whole", settings(url, model="test-model", attempts=2))
    assert whole is not None
    arguments = [sys.executable, "-m", "draftsmith.cli"]
    command = "import sys; from draftsmith.cli import main; sys.exit(main(sys.argv[1:]))"
    arguments = [sys.executable, "-c", command, "data", "regenerate", file, "--out", str(tmp_path / "out")]
    arguments += ["--server", url, "--concurrency", "4", "--attempts", "2", "--max-new-tokens", "64"]
    seen.attempts.clear()
    process = subprocess.Popen(arguments, stdout=subprocess.DEVNULL)
    log = tmp_path / "out" / LOG
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and not (log.exists() and log.read_bytes().count(b"\n") >= 8):
        time.sleep(0.02)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    with log.open("ab") as torn:
        torn.write(b'{"number": 29, "fi')
    done_before = {questions[line["number"]] for line in map(json.loads, log.read_bytes().splitlines()[:-1])}
    assert 8 <= len(done_before) < len(questions)
    assert not (tmp_path / "out" / ANSWERS).exists()
    time.sleep(0.3)  # requests of the killed process still reach the server
    seen.attempts.clear()
    finished = subprocess.run(arguments, capture_output=True, text=True, timeout=120)
    assert finished.returncode == 0, finished.stderr
    assert "25 answered + 5 errors + 0 skipped = 30 records" in finished.stdout
    assert not done_before & set(seen.attempts)
    assert (tmp_path / "out" / ANSWERS).read_bytes() == (tmp_path / "whole" / ANSWERS).read_bytes()
    seen.attempts.clear()
    again = subprocess.run(arguments, capture_output=True, text=True, timeout=120)
    assert "25 answered + 5 errors + 0 skipped = 30 records" in again.stdout
    assert not seen.attempts
    assert len(log.read_bytes().splitlines()) == 30


def test_errors_are_asked_again_only_if_wanted(server: tuple[str, Seen], tmp_path: Path) -> None:
    url, _ = server
    file = write(tmp_path / "in.jsonl", ["well:0", "crash4:1", "well:2"])
    first = ask(file, tmp_path / "out", settings(url))
    assert first is not None
    assert (first.success, first.error) == (2, 1)
    again = ask(file, tmp_path / "out", settings(url))
    assert again is not None
    assert (again.asked, again.error) == (0, 1)
    retried = ask(file, tmp_path / "out", settings(url), retry_errors=True)
    assert retried is not None
    assert (retried.asked, retried.success, retried.error) == (1, 3, 0)
    assert answered(tmp_path / "out") == ["well:0", "crash4:1", "well:2"]
    assert not lines(tmp_path / "out" / REJECTS)


def test_a_dead_and_a_sick_server_do_not_hurt_while_one_is_well(server: tuple[str, Seen], tmp_path: Path) -> None:
    url, _ = server
    with serving() as (sick, sick_seen):
        sick_seen.delay_s = STALL_S
        file = write(tmp_path / "in.jsonl", [f"well:{n}" for n in range(30)])
        done = ask(file, tmp_path / "out", settings("http://127.0.0.1:9", sick, url, timeout_s=0.5))
        assert done is not None
        assert done.success == 30
        assert len(sick_seen.bodies) < 15  # it rests, longer each time


def test_a_server_that_stays_dead_rests_for_a_minute_at_most() -> None:
    rota = _Rota(["a", "b"])
    for _ in range(3000):
        rota.give_back("a", failed=True)
    assert 0 < rota._rests_until["a"] - time.monotonic() <= 60
    assert [rota.take(), rota.take()] == ["b", "b"]
    rota.give_back("a", failed=False)
    assert rota.take() == "a"


def test_the_load_is_spread_and_bounded(server: tuple[str, Seen], tmp_path: Path) -> None:
    url, one = server
    with serving() as (second, other):
        one.delay_s = other.delay_s = 0.1
        file = write(tmp_path / "in.jsonl", [f"well:{n}" for n in range(24)])
        begin = time.monotonic()
        done = ask(file, tmp_path / "out", settings(url, second, concurrency=6))
        assert done is not None
        assert done.success == 24
        assert time.monotonic() - begin > 0.39  # four rounds of six
        assert min(len(one.bodies), len(other.bodies)) >= 6


def test_what_will_never_work_stops_the_run(
    server: tuple[str, Seen], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, seen = server
    file = write(tmp_path / "in.jsonl", ["nomodel!:0", *[f"well:{n}" for n in range(200)]])
    with pytest.raises(InputError, match=r"answers 404: .*; check --server, --model and the API key"):
        ask(file, tmp_path / "out", settings(url))
    assert len(seen.bodies) < 100
    monkeypatch.setattr(run, "GIVE_UP_AFTER", 5)
    file = write(tmp_path / "b.jsonl", [f"toolong!:{n}" for n in range(100)])
    with pytest.raises(InputError, match=r"5 records in a row ended in an error, the last one: .*--retry-errors"):
        ask(file, tmp_path / "b", settings(url))
    assert sum("toolong" in q for q in seen.attempts) < 50


def test_a_stop_request_leaves_a_folder_that_goes_on(server: tuple[str, Seen], tmp_path: Path) -> None:
    url, seen = server
    seen.delay_s = 0.05
    file = write(tmp_path / "in.jsonl", [f"well:{n}" for n in range(40)])
    stop = threading.Event()
    answers = ServerAnswers(settings(url, concurrency=4), Sampling(64), stop)
    inputs = Inputs([file], None, None)
    stopped = regenerate(inputs, tmp_path / "out", {"model": "m"}, answers, stop, watch=lambda outcome: stop.set())
    assert stopped is None
    done = ask(file, tmp_path / "out", settings(url))
    assert done is not None
    assert (done.success, done.total) == (40, 40)
    assert 30 <= done.asked < 40
    assert sum(seen.attempts.values()) <= 40 + 4  # at most what was under way is asked twice


def test_other_settings_or_another_input_do_not_go_on(server: tuple[str, Seen], tmp_path: Path) -> None:
    url, _ = server
    file = write(tmp_path / "in.jsonl", ["well:0", "well:1"])
    ask(file, tmp_path / "out", settings(url))
    assert json.loads((tmp_path / "out" / SETTINGS).read_text()) == {"model": "m"}
    with pytest.raises(ConfigError, match="was begun with model 'm', now it is 'n'"):
        ask(file, tmp_path / "out", settings(url, model="n"))
    write(tmp_path / "in.jsonl", ["well:0", "well:2"])
    with pytest.raises(ConfigError, match=r"in.jsonl:2 is not the record .* the input has changed"):
        ask(file, tmp_path / "out", settings(url))
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("keep me")
    with pytest.raises(ConfigError, match="is not empty and no regeneration"):
        ask(file, tmp_path / "full", settings(url))


def test_sampling_goes_into_every_request_and_into_the_settings(server: tuple[str, Seen], tmp_path: Path) -> None:
    url, seen = server
    file = write(tmp_path / "in.jsonl", [f"well:{n}" for n in range(3)])
    arguments = ["data", "regenerate", file, "--server", url, "--out", str(tmp_path / "out"), "--temperature", "0.7"]
    arguments += ["--top-p", "0.9", "--top-k", "20", "--seed", "1", "--max-new-tokens", "77", "--limit", "2"]
    assert cli.main([*arguments, "--request-field", "chat_template_kwargs={enable_thinking: false}"]) == 0
    bodies = sorted(seen.bodies, key=lambda body: str(body["messages"]))
    assert len(bodies) == 2
    for body in bodies:
        wanted = {"model": "test-model", "temperature": 0.7, "top_p": 0.9, "top_k": 20, "max_tokens": 77}
        assert wanted | {"chat_template_kwargs": {"enable_thinking": False}} == {
            k: v for k, v in body.items() if k not in ("messages", "seed", "stream")
        }
    assert bodies[0]["seed"] != bodies[1]["seed"]
    saved = json.loads((tmp_path / "out" / SETTINGS).read_text())
    assert saved["sampling"] == {"max_new_tokens": 77, "temperature": 0.7, "top_p": 0.9, "top_k": 20, "seed": 1}


@pytest.mark.parametrize(
    ("url", "base"),
    [("http://h:1", "http://h:1/v1"), ("http://h:1/", "http://h:1/v1"), ("https://h/api/v3/", "https://h/api/v3")],
)
def test_base_url(url: str, base: str) -> None:
    assert base_url(url) == base


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://h", "http://", "http://user:pw@h/v1", "http://h/v1?key=pw"])
def test_urls_that_are_none_or_hold_a_key(url: str) -> None:
    with pytest.raises(ConfigError, match="--server") as error:
        base_url(url)
    assert "pw" not in str(error.value)
