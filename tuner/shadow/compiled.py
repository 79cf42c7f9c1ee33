"""Functions compiled to machine code by numba, and where that code is kept between runs.

Answers how a function is compiled once for each machine and never stands in the way of a run:
numba keeps machine code in the first of these folders that can be written, NUMBA_CACHE_DIR,
__pycache__ beside the source, and the user's cache folder, and ends with an error where there
is none, where a file is damaged or where the disk is full. Here each of these costs a
compilation and no more. Code that was compiled beside the sources, as while an image was built,
is used where it cannot be written.

    python -m tuner.shadow.compiled     # compiles all that is registered, as make setup does
"""

from __future__ import annotations

import gc
import hashlib
import importlib
import inspect
import logging
import pkgutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any, Final, Protocol, TypeVar

from tuner.errors import UsageError

try:
    import llvmlite
    import numba
    import numpy as np
    from numba.core import caching
except (ImportError, OSError) as missing:  # OSError: LLVM's library cannot be loaded
    raise UsageError(
        f"predictions need numba, which cannot be imported: {missing}",
        "pip install --upgrade max-num-seqs-tuner; `tune doctor` shows what is installed",
    ) from missing

_log = logging.getLogger(__name__)
_FOLDER: Final = Path(__file__).resolve().parent
_Function = TypeVar("_Function", bound=Callable[..., Any])
_WarmUp = TypeVar("_WarmUp", bound=Callable[[], object])


class _Decorator(Protocol):
    def __call__(self, function: _Function, /) -> _Function: ...


_warm_ups: list[Callable[[], object]] = []


def compiled(function: _Function) -> _Function:
    """Let numba compile a function at its first call, and keep the machine code.

    For arrays and numbers alone: what it fills has to be an argument, as it makes no array, and
    so has what it takes from outside this package. Indices count from the front: a negative one
    is outside the array. The code is compiled anew when any source beside this module has
    changed, and so has a compiled function that calls another.
    """
    dispatcher: Any = numba.njit(_nrt=False, nogil=True, error_model="numpy")(function)
    if dispatcher is not function:  # as it is with NUMBA_DISABLE_JIT=1
        compiler = dispatcher._compiler  # noqa: SLF001 - what numba asks to compile
        compiler.compile = _as_a_whole(compiler.compile)
        try:
            # What Dispatcher.enable_caching() does, with a cache of ours.
            dispatcher._cache = _Cache(function)  # noqa: SLF001 - numba takes no other cache
        except RuntimeError as nowhere:  # NUMBA_CACHE_LOCATOR_CLASSES leaves no folder
            _note_once(str(nowhere))
    made: _Function = dispatcher
    return made


def _as_a_whole(compile_it: Callable[..., Any]) -> Callable[..., Any]:
    """Return what compiles a function with its parts into one piece of machine code.

    Without machine code for each part besides, which nothing could call, and without a look at
    each index whether it counts from the back: each takes a third of the time, the first of
    compiling, the other of running. numba holds its lock while it compiles, so that the code of
    nobody else is made so.
    """

    def compile_whole(*signature: object) -> Any:  # noqa: ANN401 - numba's
        from numba.core import codegen, cpu
        from numba.np import arrayobj

        library, context = codegen.CPUCodeLibrary, cpu.CPUContext
        with (
            _replaced(arrayobj, "fix_integer_index", _index_as_it_is),
            _replaced(context, "get_executable", _linked(context.get_executable)),
            _replaced(library, "finalize", _joined(library.finalize)),
            _no_garbage_sought(),
        ):
            return compile_it(*signature)

    return compile_whole


@contextmanager
def _no_garbage_sought() -> Iterator[None]:
    """Leave garbage for later: numba makes millions of objects, and nearly all of them stay.

    A tenth of the time that compiling takes, against 170 MB more while it does.
    """
    usual = gc.get_threshold()
    gc.set_threshold(0)
    try:
        yield
    finally:
        gc.set_threshold(*usual)


@contextmanager
def _replaced(owner: object, name: str, by: Callable[..., Any]) -> Iterator[None]:
    usual = getattr(owner, name)
    setattr(owner, name, by)
    try:
        yield
    finally:
        setattr(owner, name, usual)


def _index_as_it_is(
    context: Any,  # noqa: ANN401
    builder: object,
    kind: Any,  # noqa: ANN401
    index: object,
    _size: object,
) -> object:
    from numba.core import types

    plain = types.intp if kind.signed else types.uintp
    return context.cast(builder, index, kind, plain)


def _is_part() -> bool:
    """Whether what numba compiles right now has no door to Python: it is called by others."""
    from numba.core.targetconfig import ConfigStack

    flags = ConfigStack.top_or_none()
    return flags is not None and bool(flags.no_cpython_wrapper)


def _linked(usual: Callable[..., Any]) -> Callable[..., Any]:
    """Return what makes nothing callable of a part.

    Source: numba/core/cpu.py, CPUContext.get_executable, less the address of the function.
    """

    def get_executable(context: object, library: Any, described: Any, env: object) -> Any:  # noqa: ANN401
        if not _is_part():
            return usual(context, library, described, env)
        from numba import _dynfunc

        library._ensure_finalized()  # noqa: SLF001 - as the original does
        name = described.qualname.split(".")[-1]
        return _dynfunc.make_function(described.lookup_module(), name, "", 0, env, (library,))

    return get_executable


def _joined(usual: Callable[..., Any]) -> Callable[..., Any]:
    """Return what joins a part with those that it calls, and leaves it at that.

    Source: numba/core/codegen.py, CPUCodeLibrary.finalize, less optimisation and machine code,
    which whoever calls the part makes of all of it.
    """

    def finalize(library: Any) -> None:  # noqa: ANN401
        if not _is_part():
            usual(library)
            return
        module = library._final_module  # noqa: SLF001
        for other in dict.fromkeys(library._linking_libraries):  # noqa: SLF001
            library._reload_init.update(other._reload_init)  # noqa: SLF001
            module.link_in(other._get_module_for_linking(), preserve=True)  # noqa: SLF001
        module.verify()
        library._finalized = True  # noqa: SLF001

    return finalize


def part(*, is_inlined: bool = False) -> _Decorator:
    """Let a function be compiled as a part of those that call it, for arrays and numbers only.

    It has no door to Python and no cache of its own. Where it is inlined, arguments cost
    nothing: what is called in every step, and takes many arrays, has to be.
    """
    decorated: _Decorator = numba.njit(
        _nrt=False,
        error_model="numpy",
        forceinline=is_inlined,
        no_cpython_wrapper=True,
        no_cfunc_wrapper=True,
    )
    return decorated


def warms_up(call: _WarmUp) -> _WarmUp:
    """Register what calls a compiled function once with each kind of arguments it takes."""
    _warm_ups.append(call)
    return call


def warm_up() -> int:
    """Compile all that is registered in this package and return how many calls that took."""
    package = importlib.import_module("tuner.shadow")
    for module in pkgutil.walk_packages(package.__path__, "tuner.shadow."):
        importlib.import_module(module.name)
    for call in _warm_ups:
        call()
    return len(_warm_ups)


@contextmanager
def compiled_meanwhile(call: Callable[[], object]) -> Iterator[None]:
    """Have a call compile what it needs, if it is not yet, while something else is waited for.

    What keeps it from being compiled is raised where it is first asked.
    """

    def compile_it() -> None:
        with suppress(Exception):
            call()

    thread = threading.Thread(target=compile_it, name="compile", daemon=True)
    thread.start()
    yield
    thread.join()


def cache_folder() -> Path | None:
    """Return the folder that keeps this package's code, None where none can be written."""
    try:
        locator = _Place(cache_folder).locator
    except RuntimeError:  # NUMBA_CACHE_LOCATOR_CLASSES leaves none
        return None
    return None if isinstance(locator, _InPlace) else Path(locator.get_cache_path())


class _InPlace(caching.InTreeCacheLocator):  # type: ignore[misc]  # numba is untyped
    """The folder beside the source, writable or not."""

    @classmethod
    def from_function(cls, py_func: object, py_file: str) -> _InPlace:
        return cls(py_func, py_file)


class _Place(caching.CompileResultCacheImpl):  # type: ignore[misc]  # numba is untyped
    """Where numba keeps a function's code; beside the source where nothing is writable."""

    _locator_classes = (*caching.CacheImpl._locator_classes, _InPlace)  # noqa: SLF001 - its list


class _Cache(caching.FunctionCache):  # type: ignore[misc]  # numba is untyped
    """numba's cache of one function, whose faults end no run.

    File names hold a digest of the sources, so that no process loads the data file of a state
    whose index another is just replacing.

    Source: numba/core/caching.py, Cache and IndexDataCacheFile.
    """

    _impl_class = _Place

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__(function)
        path = Path(inspect.getfile(function)).resolve()
        self._is_ours = path.is_relative_to(_FOLDER)
        self._digest = _digest(_FOLDER if self._is_ours else path.parent)
        self._base: str = self._impl.filename_base  # module.function-line.pyXY
        folders = dict.fromkeys([self._cache_path, *_readable(function, str(path))])
        self._files = [
            caching.IndexDataCacheFile(folder, f"{self._base}-{self._digest}", self._digest)
            for folder in folders
        ]
        self._cache_file = self._files[0]

    def load_overload(self, sig: object, target_context: Any) -> Any:  # noqa: ANN401 - numba's
        """Return the code for a signature, None where there is none that can be read.

        numba would first load all that it can compile, half a second, and what makes arrays
        needs some of that; what is compiled here does not.
        """
        key = self._index_key(sig, target_context.codegen())
        for file in self._files:
            try:
                data = file.load(key)
                if data is not None:
                    return self._impl.rebuild(target_context, data)
            except Exception as damaged:  # noqa: BLE001 - a damaged pickle raises anything
                _log.info("damaged code of %s is compiled anew: %r", self._base, damaged)
                self._forget()
        if self._is_ours:
            _note_compiling()
        return None

    def _forget(self) -> None:
        """Empty the index that can be written, so that what comes replaces what was damaged."""
        try:
            self._cache_file.flush()
        except OSError as unwritable:
            _log.info("the index of %s cannot be emptied: %s", self._base, unwritable)

    def save_overload(self, sig: object, data: object) -> None:
        """Keep the code for a signature, if it can be kept."""
        try:
            super().save_overload(sig, data)
            self._tidy()
        except OSError as unwritable:
            _note_once(str(unwritable.strerror or unwritable))

    def _tidy(self) -> None:
        """Remove the files of earlier states of the sources."""
        function, python = self._base.rpartition("-")[0], self._base.rpartition(".")[2]
        for path in Path(self._cache_path).glob(f"{function}-*.{python}-*.nb[ic]"):
            if self._digest not in path.name:
                path.unlink(missing_ok=True)


def _readable(function: Callable[..., Any], path: str) -> Iterator[str]:
    """Yield the folders that may hold code compiled by others, who could write there."""
    if numba.config.CACHE_DIR:
        yield caching.UserProvidedCacheLocator(function, path).get_cache_path()
    yield _InPlace(function, path).get_cache_path()


@cache
def _digest(folder: Path) -> str:
    """Return what stands for the sources in a folder and for those who compile them."""
    digest = hashlib.sha256()
    for version in (numba.__version__, llvmlite.__version__, np.__version__):
        digest.update(f"{version}\n".encode())
    for path in sorted(folder.rglob("*.py")):
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()[:16]


@cache
def _note_compiling() -> None:
    """Tell once in a process what it is busy with."""
    _log.warning("compiling the simulator for this machine, once: about half a minute")


@cache
def _note_once(reason: str) -> None:
    """Tell once in a process that nothing is kept."""
    _log.warning(
        "compiled code cannot be kept (%s), so every start compiles it anew, about half a"
        " minute: set NUMBA_CACHE_DIR to a folder that can be written",
        reason,
    )


def main() -> None:
    """Compile what is registered, and say how long that took."""
    began_s = time.monotonic()
    calls = warm_up()
    took_s = time.monotonic() - began_s
    sys.stdout.write(f"compiled code is ready ({calls} warm-up calls, {took_s:.1f} s)\n")


if __name__ == "__main__":
    # The registry is the one that the compiled modules import, not that of __main__.
    importlib.import_module("tuner.shadow.compiled").main()
