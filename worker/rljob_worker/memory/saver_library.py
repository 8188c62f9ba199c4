"""torch_memory_saver's C functions: those that its CUDA build and its Ascend build both have."""

from __future__ import annotations

import ctypes
import importlib
import os
from enum import StrEnum

from rljob_api.spec import MemorySaverMode
from rljob_worker.errors import UserError

_ALL = (
    "tms_set_interesting_region",
    "tms_get_interesting_region",
    "tms_set_current_tag",
    "tms_set_enable_cpu_backup",
    "tms_pause",
    "tms_resume",
)
_UPSTREAM_ONLY = "tms_get_cpu_backup_pointer"
_TORCH_MODE = ("tms_torch_malloc", "tms_torch_free")
_FILE = "torch_memory_saver_hook_mode_{mode}"
_DEFAULT_TAG = b"default"


class Build(StrEnum):
    """Whose library it is."""

    UPSTREAM = "upstream"
    """github.com/fzyzcjy/torch_memory_saver: CUDA."""
    ASCEND = "ascend"
    """sgl-kernel-npu's fork for CANN."""


class _DlInfo(ctypes.Structure):
    _fields_ = [
        ("path", ctypes.c_char_p),
        ("base", ctypes.c_void_p),
        ("name", ctypes.c_char_p),
        ("address", ctypes.c_void_p),
    ]


class SaverLibrary:
    """The loaded library. Its settings belong to the calling thread; pausing and resuming, to the process.

    It keeps no state that could be asked for, and ends the process (exit code 1) when it is paused twice, when
    memory is short, or when paused memory is freed: callers of `pause` and `resume` must make sure that they are
    due.
    """

    def __init__(self, library: ctypes.CDLL, mode: MemorySaverMode) -> None:
        """Use `open_saver_library`; UserError when functions are missing."""
        needed = _ALL + (_TORCH_MODE if mode is MemorySaverMode.TORCH else ())
        if missing := [name for name in needed if not hasattr(library, name)]:
            raise UserError(
                f"memory saver: the library lacks {', '.join(missing)}; build the image with the torch_memory_saver "
                "that docs/ascend-contracts.md names"
            )
        self.mode = mode
        self.build = Build.UPSTREAM if hasattr(library, _UPSTREAM_ONLY) else Build.ASCEND
        self._library = library
        library.tms_set_interesting_region.argtypes = [ctypes.c_bool]
        library.tms_get_interesting_region.restype = ctypes.c_bool
        library.tms_set_current_tag.argtypes = [ctypes.c_char_p]
        library.tms_set_enable_cpu_backup.argtypes = [ctypes.c_bool]
        library.tms_pause.argtypes = [ctypes.c_char_p]
        library.tms_resume.argtypes = [ctypes.c_char_p]

    @property
    def tracking(self) -> bool:
        """Whether memory that this thread allocates now would be paused."""
        return bool(self._library.tms_get_interesting_region())

    @tracking.setter
    def tracking(self, value: bool) -> None:
        self._library.tms_set_interesting_region(value)

    def configure(self, *, tag: bytes = _DEFAULT_TAG, backup: bool) -> None:
        """Tag of this thread's next allocations, and whether the library keeps their contents on the host."""
        self._library.tms_set_current_tag(tag)
        self._library.tms_set_enable_cpu_backup(backup)

    def pause(self) -> None:
        """Unmap all that is tracked. The device must be idle."""
        self._call(self._library.tms_pause)

    def resume(self) -> None:
        """Map it again, and copy back what the library keeps."""
        self._call(self._library.tms_resume)

    def allocator(self) -> tuple[str, str, str] | None:
        """For a torch memory pool in torch mode: path, and functions that allocate and free; None in preload mode."""
        return None if self.mode is MemorySaverMode.PRELOAD else (str(self._library._name), *_TORCH_MODE)

    def _call(self, function: ctypes._NamedFuncPointer) -> None:
        # Upstream's functions return an error code, which is 0 on CUDA; Ascend's return nothing.
        function.restype = ctypes.c_int if self.build is Build.UPSTREAM else None
        if code := function(None):
            raise RuntimeError(f"memory saver: {function.__name__} returned {code}")


def open_saver_library(mode: MemorySaverMode) -> SaverLibrary:
    """The preloaded library, or the one that torch_memory_saver's package has for torch mode.

    Raises:
        UserError: it is not there, with what to do.
    """
    if mode is MemorySaverMode.PRELOAD:
        return SaverLibrary(ctypes.CDLL(None), mode)
    return SaverLibrary(ctypes.CDLL(package_library(mode)), mode)


def package_library(mode: MemorySaverMode) -> str:
    """Path of the package's library for a mode; UserError when the package is missing or has none, or several."""
    try:
        utils = importlib.import_module("torch_memory_saver.utils")
        return os.fspath(utils.get_binary_path_from_package(_FILE.format(mode=mode.value)))
    except (ImportError, AssertionError, RuntimeError) as error:
        raise UserError(
            f"memory saver: torch_memory_saver has no library for {mode.value} mode here ({error}); install the build "
            "for this kind of device and do not copy its libraries, or take another spec.memorySaver.mode"
        ) from error


def defined_in(name: str) -> str | None:
    """Path of the file whose function a library loaded from now on would get for `name`; None when there is none."""
    process = ctypes.CDLL(None)
    if not hasattr(process, name):
        return None
    process.dladdr.argtypes = [ctypes.c_void_p, ctypes.POINTER(_DlInfo)]
    info = _DlInfo()
    address = ctypes.cast(getattr(process, name), ctypes.c_void_p)
    if not process.dladdr(address, ctypes.byref(info)) or not info.path:
        return None
    return os.fsdecode(info.path)
