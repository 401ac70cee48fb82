"""Answers through OpenAI-compatible servers: several at once, each request retried, whatever a server sends back."""

import json
import random
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any

import httpx2
import tenacity

from draftsmith.data.regenerate.tasks import Answer, Context, Failed, Outcome, Sampling, Task, dialogue, failed
from draftsmith.errors import ConfigError, InputError, StoppedError
from draftsmith.redaction import without_secrets

MAX_BODY_BYTES = 64 * 2**20
CONNECT_S = 10.0
FATAL = (401, 403, 404)  # no request of this run will ever do better
NOT_RETRIED = (400, 413, 422)  # this one will not
LONGEST_WAIT_S = 60.0


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """How servers are used. `fields` are added to every request; `api_key` never leaves this module but in a header."""

    urls: tuple[str, ...]
    model: str | None
    concurrency: int
    attempts: int  # for each answer
    timeout_s: float  # for a whole response
    first_wait_s: float
    fields: Mapping[str, Any]
    api_key: str | None = None

    def __repr__(self) -> str:
        return f"ServerSettings({', '.join(self.urls)})"


class _Again(Exception):
    """This attempt failed; another may not. `wait_s` is what the server asks for."""

    def __init__(self, reason: str, wait_s: float = 0.0) -> None:
        super().__init__(reason)
        self.wait_s = wait_s


class _Rota:
    """Which server takes the next request: the one with the fewest open; one that failed rests, longer each time.

    Guarded by one lock; if all rest, the one that is back first is taken.
    """

    def __init__(self, urls: Sequence[str]) -> None:
        self._lock = threading.Lock()
        self._open = dict.fromkeys(urls, 0)
        self._failures = dict.fromkeys(urls, 0)
        self._rests_until = dict.fromkeys(urls, 0.0)

    def take(self) -> str:
        with self._lock:
            now = time.monotonic()
            url = min(self._open, key=lambda u: (max(0.0, self._rests_until[u] - now), self._open[u]))
            self._open[url] += 1
            return url

    def give_back(self, url: str, *, failed: bool) -> None:
        with self._lock:
            self._open[url] -= 1
            self._failures[url] = self._failures[url] + 1 if failed else 0
            self._rests_until[url] = time.monotonic() + (_doubled(1.0, self._failures[url]) if failed else 0.0)


def _doubled(first_s: float, count: int) -> float:
    """`first_s`, twice that the second time, and so on."""
    return min(LONGEST_WAIT_S, first_s * 2.0 ** min(count - 1, 30))


class ServerAnswers:
    """Answers tasks on a pool of threads, one task per thread, its turns one after the other."""

    def __init__(self, settings: ServerSettings, sampling: Sampling, stop: threading.Event) -> None:
        """
        Raises:
            ConfigError: a URL is none.
        """
        self.settings, self.sampling, self._stop = settings, sampling, stop
        headers = {"Authorization": f"Bearer {settings.api_key}"} if settings.api_key else {}
        self._client = httpx2.Client(
            headers=headers,
            timeout=httpx2.Timeout(settings.timeout_s, connect=min(CONNECT_S, settings.timeout_s)),
            limits=httpx2.Limits(max_connections=None, max_keepalive_connections=settings.concurrency),
        )
        self._rota = _Rota([base_url(url) for url in settings.urls])
        self.model = settings.model or self._served_model()

    def outcomes(self, tasks: Iterable[Task]) -> Iterator[Outcome]:
        """Outcomes in the order they come. After a stop request the requests under way are waited for, as somebody pays
        for them; a task that needs more of them ends without an outcome.

        Raises:
            InputError: a server refuses the key, or does not know the model.
        """
        with ThreadPoolExecutor(self.settings.concurrency, "ask") as pool:
            running: set[Future[Outcome]] = set()
            try:
                for task in tasks:
                    if len(running) == self.settings.concurrency:
                        done, running = wait(running, return_when=FIRST_COMPLETED)
                        yield from _results(done)
                    if self._stop.is_set():
                        break
                    running.add(pool.submit(self._outcome, task))
                while running:
                    done, running = wait(running, return_when=FIRST_COMPLETED)
                    yield from _results(done)
            except BaseException:
                self._stop.set()
                raise

    def close(self) -> None:
        self._client.close()

    def _outcome(self, task: Task) -> Outcome:
        turns = dialogue(task, self.sampling)
        try:
            context = next(turns)
            while True:
                context = turns.send(self._ask(context))
        except StopIteration as ended:
            outcome: Outcome = ended.value
            return outcome
        except Failed as error:
            return failed(task, self._without_key(str(error)))

    def _ask(self, context: Context) -> Answer:
        """One answer.

        Raises:
            Failed: all attempts failed; the reason is the last one's.
        """
        settings = self.settings
        retrying = tenacity.Retrying(
            stop=tenacity.stop_after_attempt(settings.attempts),
            wait=self._wait,
            retry=tenacity.retry_if_exception_type(_Again),
            sleep=self._sleep,
            reraise=True,
        )
        try:
            return retrying(self._attempt, context)
        except _Again as error:
            raise Failed(f"{context.name}: {error} (attempt {settings.attempts} of {settings.attempts})") from None

    def _wait(self, state: tenacity.RetryCallState) -> float:
        """Doubles each time, with jitter, and is never shorter than the server asks."""
        error = state.outcome.exception() if state.outcome else None
        backoff_s = _doubled(self.settings.first_wait_s, state.attempt_number) * random.uniform(0.75, 1.25)
        asked_s = min(LONGEST_WAIT_S, error.wait_s) if isinstance(error, _Again) else 0.0
        return max(backoff_s, asked_s)

    def _sleep(self, seconds: float) -> None:
        if self._stop.wait(seconds):
            raise StoppedError("stopped while waiting for another attempt")

    def _attempt(self, context: Context) -> Answer:
        if self._stop.is_set():
            raise StoppedError("stopped")
        base = self._rota.take()
        bad = True
        try:
            raw = context.task.prompt is not None
            path = "/completions" if raw else "/chat/completions"
            answer = _answer(self._post(base + path, self._body(context)), raw=raw)
            bad = False
            return answer
        except Failed:
            bad = False  # the server is well, the request is not
            raise
        finally:
            self._rota.give_back(base, failed=bad)

    def _body(self, context: Context) -> dict[str, Any]:
        sampling, task = self.sampling, context.task
        body: dict[str, Any] = {
            "model": self.model,
            "max_tokens": sampling.max_new_tokens,
            "temperature": sampling.temperature,
            "stream": False,
        }
        optional = {
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "seed": sampling.seed_of(task.number, context.turn),
        }
        body |= {key: value for key, value in optional.items() if value is not None}
        asked: dict[str, Any] = {"prompt": task.prompt} if task.prompt is not None else {"messages": context.messages}
        return body | asked | ({"tools": task.tools} if task.tools else {}) | dict(self.settings.fields)

    def _post(self, url: str, body: Mapping[str, Any]) -> Any:
        """The JSON of a response that came whole, in time and with status 200."""
        deadline = time.monotonic() + self.settings.timeout_s
        data = bytearray()
        try:
            with self._client.stream("POST", url, json=body) as response:
                for block in response.iter_bytes():
                    data += block
                    if len(data) > MAX_BODY_BYTES or time.monotonic() > deadline:
                        raise _Again(f"{_shown(url)} sends for more than {self.settings.timeout_s:g} s, or too much")
        except httpx2.TimeoutException:
            raise _Again(f"{_shown(url)} does not answer within {self.settings.timeout_s:g} s") from None
        except httpx2.HTTPError as error:
            raise _Again(f"{_shown(url)}: {type(error).__name__}: {error}") from None
        text = data.decode("utf-8", "replace")
        if response.status_code != 200:
            self._refuse(url, response, self._without_key(" ".join(text.split()))[:300])
        try:
            return json.loads(text)
        except (ValueError, RecursionError):
            said = self._without_key(" ".join(text.split()))[:80]  # in this order: half a key would not be known
            raise _Again(f"{_shown(url)} sends no JSON: {said!r}") from None

    def _refuse(self, url: str, response: httpx2.Response, text: str) -> None:
        status = response.status_code
        said = f"{_shown(url)} answers {status}: {text}"
        if status in FATAL:
            raise InputError(f"{said}; check --server, --model and the API key, then run the same command again")
        if status in NOT_RETRIED:
            raise Failed(said)
        raise _Again(said, _retry_after_s(response.headers.get("retry-after")))

    def _served_model(self) -> str:
        """The first model that the first server names."""
        url = base_url(self.settings.urls[0]) + "/models"
        try:
            response = self._client.get(url)
            data = response.json()
            return str(data["data"][0]["id"])
        except (httpx2.HTTPError, ValueError, KeyError, IndexError, TypeError) as error:
            raise InputError(
                f"{_shown(url)} does not say which model it serves ({type(error).__name__}); is the server up? else "
                "give --model"
            ) from None

    def _without_key(self, text: str) -> str:
        key = self.settings.api_key
        return without_secrets(text.replace(key, "<api key>") if key else text)


def _results(done: Iterable[Future[Outcome]]) -> Iterator[Outcome]:
    for future in done:
        try:
            yield future.result()
        except StoppedError:
            continue  # has no outcome yet: the next run asks again


def base_url(url: str) -> str:
    """The URL that paths are appended to: `/v1` is added where there is no path.

    Raises:
        ConfigError: not http or https, or without a host.
    """
    try:
        parsed = httpx2.URL(url)
    except httpx2.InvalidURL:
        parsed = None
    if parsed is None or parsed.scheme not in ("http", "https") or not parsed.host:
        raise ConfigError(f"--server {_shown(url)}: give a URL like http://localhost:8000/v1")
    if parsed.query or parsed.userinfo:
        raise ConfigError("--server: a key in the URL would be written down; use --api-key-env or --api-key-file")
    return url.rstrip("/") if parsed.path.strip("/") else url.rstrip("/") + "/v1"


def _shown(url: str) -> str:
    return url.partition("?")[0].rpartition("@")[2]


def _retry_after_s(value: str | None) -> float:
    """Seconds that a server asks to wait; dates and nonsense count as not said."""
    try:
        return max(0.0, float(value or 0))
    except ValueError:
        return 0.0


def _answer(data: Any, *, raw: bool) -> Answer:
    """The answer in a response.

    Raises:
        _Again: it does not have the shape of one.
    """
    try:
        choice = data["choices"][0]
        message = {"content": choice["text"]} if raw else choice["message"]
        finish = choice.get("finish_reason")
        calls = message.get("tool_calls") or []
        content = message.get("content")
        tokens = (data.get("usage") or {}).get("completion_tokens") or 0
        thought = message.get("reasoning_content") or message.get("reasoning")
        well = isinstance(content or "", str) and isinstance(thought or "", str) and isinstance(tokens, int)
        if not (well and isinstance(calls, list) and isinstance(finish, str)):
            raise TypeError("a field of another type")
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise _Again(f"the response is no completion ({type(error).__name__}: {error})") from None
    if not (content or "").strip() and not calls and finish == "stop":
        raise _Again("the answer is empty")
    more = ({"reasoning_content": thought} if thought else {}) | ({"tool_calls": calls} if calls else {})
    return Answer(content or "", "tool_calls" if calls and finish != "length" else finish, tokens, more)
