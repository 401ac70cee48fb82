"""The suspects, in the order a person would go through them. A new one is a function and a line here."""

from collections.abc import Callable, Sequence

from draftsmith.compile import hunt, private
from draftsmith.config import Config
from draftsmith.doctor import pytorch, run
from draftsmith.doctor.check import Check, Subject
from draftsmith.errors import InputError

CHECKS: tuple[Callable[[Subject], Check], ...] = (
    pytorch.versions,
    pytorch.shared_state,
    pytorch.block_mask,
    run.target_code,
    run.checkpointing,
    run.recompile_limit,
    pytorch.compiler_cache,
    pytorch.left_on,
    pytorch.fallback_settings,
    pytorch.reproduction,
    run.dense_memory,
    run.hunted_run,
)


def run_checks(
    config: Config | None = None,
    *,
    hunt_run: bool = False,
    checks: Sequence[Callable[[Subject], Check]] = CHECKS,
    progress: Callable[[str], None] = lambda what: None,
) -> list[Check]:
    """Works through the suspects, in this process and thread.

    If tracing was left on here, it is switched off while the checks run, so that they measure what they are about,
    and put back afterwards.

    Args:
        config: of a run; without it the checks that need one are `skipped`.
        hunt_run: also train a few steps and record who traces.
        checks: functions like those in `CHECKS`.
        progress: told what each check asks, before it starts.

    Raises:
        InputError, ConfigError: the config's target or devices cannot be used.
    """
    state, left_on = private.tracing_state(), hunt.stuck()
    subject = Subject(config, hunt=hunt_run, left_on=tuple(left_on))
    if config is not None:
        _refuse_unusable(subject)
    if left_on:
        private.restore(private.healthy_state())
    try:
        return [_run(check, subject, progress) for check in checks]
    finally:
        if left_on:
            private.restore(state)


def _refuse_unusable(subject: Subject) -> None:
    """A target that is not there is said before minutes of checks, not after."""
    try:
        _ = subject.outline
    except InputError:
        raise
    except Exception:  # noqa: BLE001 - a finding of each check that needs it
        return


def _run(check: Callable[[Subject], Check], subject: Subject, progress: Callable[[str], None]) -> Check:
    question = (check.__doc__ or "").splitlines()[0]
    progress(question)
    try:
        return check(subject)
    except InputError:
        raise
    except Exception as error:  # noqa: BLE001 - a check that breaks is a finding, and the others still count
        remedy = "report it with the versions above"
        return Check(check.__name__, "fail", f"the check itself failed: {type(error).__name__}: {error}", remedy)
