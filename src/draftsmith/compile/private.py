"""Everything that PyTorch does not document and the guard needs, in one file, for the versions it was tested with.

Names move between versions; `load_compiler` refuses a version that lacks one instead of guarding half.
"""

import importlib
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
import torch.fx._symbolic_trace
from torch import nn

_symbolic_trace: Any = torch.fx._symbolic_trace
TESTED = ((2, 11), (2, 16))  # from the first, below the second


class UnsupportedTorch(RuntimeError):
    """This PyTorch lacks something the guard relies on."""


@dataclass(frozen=True, slots=True)
class TracingState:
    """What tracing changes for the whole process (on some versions for the thread)."""

    fx_flag: bool  # asked on every call of compiled code
    compiling_flag: bool  # what torch.compiler.is_compiling() says, also to eager code
    module_call: Any  # nn.Module.__call__ and __getattr__, patched by FX while it traces
    module_getattr: Any
    patcher: Any


def tracing_state() -> TracingState:
    """As this thread sees it now."""
    return TracingState(
        fx_flag=_fx_flag(),
        compiling_flag=bool(torch.compiler._is_compiling_flag),
        module_call=nn.Module.__call__,
        module_getattr=nn.Module.__getattr__,
        patcher=getattr(_symbolic_trace, "CURRENT_PATCHER", None),
    )


def restore(state: TracingState) -> None:
    """Sets everything back. Only for a thread that knows itself alone."""
    if flag_is_thread_local():
        _symbolic_trace._set_is_fx_tracing(state.fx_flag)
    else:
        _symbolic_trace._is_fx_tracing_flag = state.fx_flag
    torch.compiler._is_compiling_flag = state.compiling_flag
    nn.Module.__call__, nn.Module.__getattr__ = state.module_call, state.module_getattr  # type: ignore[method-assign]
    if hasattr(_symbolic_trace, "CURRENT_PATCHER"):
        _symbolic_trace.CURRENT_PATCHER = state.patcher


def damage(healthy: TracingState) -> list[str]:
    """What differs now from `healthy`, in words."""
    now = tracing_state()
    words = {
        "fx_flag": "the FX tracing flag is on",
        "compiling_flag": "torch.compiler.is_compiling() says yes",
        "module_call": "nn.Module.__call__ is patched",
        "module_getattr": "nn.Module.__getattr__ is patched",
        "patcher": "an FX patcher is installed",
    }
    return [text for name, text in words.items() if getattr(now, name) != getattr(healthy, name)]


def flag_is_thread_local() -> bool:
    """Does each thread have a tracing flag of its own (torch >= 2.14)?"""
    return hasattr(_symbolic_trace, "_get_is_fx_tracing")


def _fx_flag() -> bool:
    if flag_is_thread_local():
        return bool(_symbolic_trace._get_is_fx_tracing())
    return bool(_symbolic_trace._is_fx_tracing_flag)


def load_code_generator() -> None:
    """Imports what turns graphs into code. It takes seconds; without `torch.compile` nobody needs it."""
    importlib.import_module("torch._inductor.compile_fx")


def load_compiler() -> None:
    """Imports the compiler, which several threads must not do at once, and checks that this version is a known one.

    Raises:
        UnsupportedTorch: outside the tested range, or a name is missing.
    """
    low, high = TESTED
    if not low <= version() < high:
        raise UnsupportedTorch(
            f"torch {torch.__version__}: the compile guard was tested with {low[0]}.{low[1]} up to, not including, "
            f"{high[0]}.{high[1]}; install one of these"
        )
    for module, names in {
        "torch._dynamo": ("run", "reset"),
        "torch._dynamo.convert_frame": ("compile_lock",),
        "torch._dynamo.config": ("recompile_limit", "accumulated_recompile_limit", "suppress_errors"),
        "torch._dynamo.callback": ("callback_handler",),
        "torch._dynamo.exc": ("FailOnRecompileLimitHit", "BackendCompilerFailed"),
        "torch._dynamo.utils": ("counters",),
        "torch._functorch.config": ("force_non_lazy_backward_lowering",),
        "torch._inductor.utils": ("clear_caches",),
        "torch._inductor.runtime.cache_dir_utils": ("default_cache_dir",),
        "torch.compiler._cache": ("CacheArtifactManager",),
    }.items():
        loaded = importlib.import_module(module)
        missing = [name for name in names if not hasattr(loaded, name)]
        if missing:
            raise UnsupportedTorch(
                f"torch {torch.__version__} has no {module}.{missing[0]}; the compile guard needs it"
            )


class _AloneLock:
    """Stands in for the lock that the compiler takes around every compilation and `torch._dynamo.reset`, whoever asked
    for it. It takes the guard first, so code that never heard of the guard compiles alone, too; and it sees to it that
    compilations are counted, which a reset ends."""

    def __init__(
        self,
        own: AbstractContextManager[Any],
        exclusive: Callable[[str], AbstractContextManager[None]],
        started: Callable[[], None],
    ) -> None:
        self._own, self._exclusive = own, exclusive
        self._count = lambda arguments: started()
        self._open = threading.local()

    def __enter__(self) -> None:
        with ExitStack() as stack:
            stack.enter_context(self._exclusive("compiling"))
            stack.enter_context(self._own)
            handler = torch._dynamo.callback.callback_handler
            if self._count not in handler.start_callbacks:
                handler.register_start_callback(self._count)
            self._open.stacks = [*getattr(self._open, "stacks", []), stack.pop_all()]

    def renew(self) -> None:
        self._own = threading.RLock()  # as PyTorch's

    def __exit__(self, *error: Any) -> None:
        self._open.stacks.pop().__exit__(*error)


def compile_alone(exclusive: Callable[[str], AbstractContextManager[None]], started: Callable[[], None]) -> None:
    """From now on every compilation of this process is inside `exclusive`, and `started` is called as it starts, also
    of a backward that is compiled late. Once per process; more calls do nothing."""
    import torch._dynamo.convert_frame as convert_frame

    own: Any = convert_frame.compile_lock
    if not isinstance(own, _AloneLock):
        with exclusive("installing the compile guard"), own:
            convert_frame.compile_lock = _AloneLock(own, exclusive, started)  # type: ignore[assignment]


def free_compile_lock() -> None:
    """For a forked child: the thread that held the compiler's lock does not live here."""
    import torch._dynamo.convert_frame as convert_frame

    if isinstance(lock := cast(Any, convert_frame.compile_lock), _AloneLock):
        lock.renew()


def version() -> tuple[int, ...]:
    """Of PyTorch, without the patch level."""
    return tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])


def run_only(function: Callable[..., Any]) -> Callable[..., Any]:
    """Calls the compiled code of `function` where there is some for these arguments, else `function` itself, eagerly.

    Never traces. It looks up what `torch.compile` of the same code object has compiled.
    """
    import torch._dynamo

    runner: Callable[..., Any] = torch._dynamo.run(function)
    return runner


@contextmanager
def compile_settings(recompile_limit: int) -> Iterator[None]:
    """Settings of a compilation: the limit (config is thread-local since 2.12, so it is set where it is needed), and
    the backward compiled at once instead of at the first backward, which runs on a thread of autograd's."""
    import torch._dynamo
    import torch._functorch.config

    with ExitStack() as settings:
        settings.enter_context(
            torch._dynamo.config.patch(
                recompile_limit=recompile_limit,
                accumulated_recompile_limit=max(recompile_limit, torch._dynamo.config.accumulated_recompile_limit),
                suppress_errors=False,
            )
        )
        settings.enter_context(torch._functorch.config.patch(force_non_lazy_backward_lowering=True))
        yield


def is_limit_error(error: BaseException) -> bool:
    """Has the compiler refused because of the recompile limit?"""
    import torch._dynamo.exc

    return isinstance(error, torch._dynamo.exc.FailOnRecompileLimitHit)


def cache_counters() -> dict[str, int]:
    """How often the compiler's disk caches were hit and missed so far in this process."""
    import torch._dynamo.utils

    counters = torch._dynamo.utils.counters
    return {
        "hit": counters["inductor"]["fxgraph_cache_hit"] + counters["aot_autograd"]["autograd_cache_hit"],
        "miss": counters["inductor"]["fxgraph_cache_miss"] + counters["aot_autograd"]["autograd_cache_miss"],
    }


def reset_compiler() -> None:
    """Forgets all compiled code. Crashes the process if another thread is inside compiled code."""
    import torch._dynamo

    torch._dynamo.reset()


# For the hunt (hunt.py): who traces, who asks, and whose stack shows that it is inside.


def healthy_state() -> TracingState:
    """The state of a process in which nobody traces: what PyTorch itself remembers from before it patched anything."""
    module_call, module_getattr = _symbolic_trace._orig_module_call, _symbolic_trace._orig_module_getattr
    return TracingState(False, False, module_call, module_getattr, None)


def is_fx_patch(function: Any) -> bool:
    """Is this what FX puts in place of `nn.Module.__call__` and `__getattr__`, rather than somebody else's patch?"""
    code = getattr(function, "__code__", None)
    return code is not None and code.co_filename == _symbolic_trace.__file__ and code.co_name in _FX_WRAPPERS


_FX_WRAPPERS = ("module_call_wrapper", "module_getattr_wrapper")


def is_compiling_is_process_wide() -> bool:
    """Does `torch.compiler.is_compiling()` say yes to every thread while one compiles (torch >= 2.13)?"""
    return hasattr(torch.compiler, "_compile_session_context")


def watch_compilations(start: Callable[[], None], end: Callable[[], None]) -> Callable[[], None]:
    """Calls `start` when the first of simultaneous compilations starts and `end` when the last ends, under a lock of
    PyTorch's. Returns what ends the watch."""
    import torch._dynamo.callback

    handler = torch._dynamo.callback.callback_handler
    on_start, on_end = (lambda arguments: start()), (lambda arguments: end())
    handler.register_start_callback(on_start)
    handler.register_end_callback(on_end)

    def stop() -> None:
        for callbacks, callback in ((handler.start_callbacks, on_start), (handler.end_callbacks, on_end)):
            if callback in callbacks:  # a reset of the compiler drops them all
                callbacks.remove(callback)

    return stop


def watch_question(met: Callable[[], None]) -> Callable[[], None]:
    """Calls `met` in the thread that called compiled code and was told that FX traces. Returns what ends the watch.

    Every compiled function, new or old, asks the same function object; so its code is replaced, not its name.
    """
    question = _symbolic_trace.is_fx_symbolic_tracing
    original = question.__code__
    if original.co_freevars:
        raise UnsupportedTorch(f"torch {torch.__version__}: is_fx_symbolic_tracing is not a plain function any more")
    answer = type(question)(original, question.__globals__)

    def asked() -> bool:
        yes = bool(answer())
        if yes:
            met()
        return yes

    _symbolic_trace._draftsmith_asked = asked
    question.__code__ = _ask.__code__

    def stop() -> None:
        question.__code__ = original
        del _symbolic_trace._draftsmith_asked

    return stop


def _ask() -> Any:
    return _draftsmith_asked()  # type: ignore[name-defined]  # noqa: F821 - runs with FX's globals


def is_compile_wrapper(code: Any) -> bool:
    """Is this the function that every call of compiled code goes through?"""
    return bool(code.co_name == "compile_wrapper" and code.co_filename.endswith("_dynamo/eval_frame.py"))


def is_compiling_code(code: Any) -> bool:
    """Does a thread with this function on its stack compile or export?"""
    if code.co_name == "_compile_session_context" or code.co_filename.endswith("torch/export/_trace.py"):
        return True
    return bool(code.co_name in ("_compile", "compile_inner") and code.co_filename.endswith("_dynamo/convert_frame.py"))


def fallback_settings() -> list[str]:
    """What is set, as this thread sees it, that lets code which should be compiled run as it is, in words."""
    import torch._dynamo.config
    import torch._dynamo.eval_frame
    from torch.nn.attention import flex_attention

    config, stance = torch._dynamo.config, torch._dynamo.eval_frame._stance.stance
    found = {
        "TORCHDYNAMO_DISABLE is 1 in the environment": os.environ.get("TORCHDYNAMO_DISABLE") == "1",
        "torch._dynamo.config.disable is True (TORCH_COMPILE_DISABLE)": bool(config.disable),
        "torch._dynamo.config.error_on_nested_fx_trace is False": not config.error_on_nested_fx_trace,
        "torch._dynamo.config.suppress_errors is True (TORCHDYNAMO_SUPPRESS_ERRORS)": bool(config.suppress_errors),
        f"the compiler stance is {stance!r} (torch.compiler.set_stance)": stance in EAGER_STANCES,
        "flex_attention._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG is True": bool(
            getattr(flex_attention, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", False)
        ),
    }
    return [words for words, on in found.items() if on]


EAGER_STANCES = ("force_eager", "eager_on_recompile")


def recompile_limit() -> int:
    """PyTorch's own, as this thread sees it: signatures of a function before it runs as it is, in silence."""
    import torch._dynamo.config

    return int(torch._dynamo.config.recompile_limit)


def cache_directory() -> Path:
    """Where the compiler keeps what it made. Creates nothing."""
    given = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    if given is None:
        from torch._inductor.runtime.cache_dir_utils import default_cache_dir

        given = default_cache_dir()
    return Path(os.path.abspath(given))


def is_backend_error(error: BaseException) -> bool:
    """Did the compiler fail behind tracing, where it also loads from its cache? No error of the function itself is."""
    import torch._dynamo.exc

    return isinstance(error, torch._dynamo.exc.BackendCompilerFailed)


def forget_loaded() -> None:
    """Forgets which files of the cache directory are loaded. What is compiled already keeps working."""
    import torch._inductor.utils

    torch._inductor.utils.clear_caches()


def recorded_artifacts() -> set[str]:
    """`type/key` of every cache entry that this process has written or read so far."""
    from torch.compiler._cache import CacheArtifactManager

    return {f"{artifact.type()}/{artifact.key}" for artifact in CacheArtifactManager._seen_artifacts}


def artifact_keys(artifacts: bytes) -> list[str] | None:
    """The keys that loading would make paths of, read without running anything; None if they cannot be read."""
    from torch.compiler._cache import CacheArtifactManager

    CacheArtifactManager._ensure_cache_artifacts_registered()
    found = CacheArtifactManager.deserialize(artifacts)
    return None if found is None else [artifact.key for entries in found.values() for artifact in entries]


def make_artifacts(entries: list[tuple[str, str, Any]]) -> bytes | None:
    """What `torch.compiler.save_cache_artifacts` gives in a process that has compiled exactly these entries.

    Args:
        entries: type, key and content, as `torch.compiler._cache` records them while it compiles.
    """
    from torch.compiler._cache import CacheArtifactManager

    CacheArtifactManager._ensure_cache_artifacts_registered()
    with CacheArtifactManager.with_fresh_cache():
        for kind, key, content in entries:
            CacheArtifactManager.record_artifact(kind, key, content)
        saved = torch.compiler.save_cache_artifacts()
    return saved[0] if saved else None
