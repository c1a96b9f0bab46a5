"""From the TARGET of the command line to a training step and its arguments.

A target is a user's file or code, and may fail in any way. Each failure becomes an `ArgumentError`
with its cause.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import inspect
import os
import re
import sys
import traceback
import zipfile
from collections.abc import Sequence
from typing import Any

from memsaving_gradients.cli.target import Target, cause
from memsaving_gradients.errors import ArgumentError

__all__ = ["target_of"]

#: Endings of files that Keras saves models in.
SAVED = (".keras", ".h5", ".hdf5")
_WANTED = "a Keras model, or (train_step, args)"


def target_of(options: argparse.Namespace) -> Target:
    """Find the target that the command line names, import or load it, and prepare it.

    Raises
    ------
    ArgumentError
        If that cannot be done.
    """
    # Keras takes seconds to import.
    import keras

    from memsaving_gradients._keras import check_backend
    from memsaving_gradients.cli import models

    check_backend("only the TensorFlow backend has graphs to explain")
    for module in options.imports:
        _imported("--import", module, module)
    found = _found(options.target)
    if isinstance(found, keras.Model):
        return models.ready(found, options)
    step, args = found
    for name in ("optimizer", "loss", "length"):
        if getattr(options, name) is not None:
            raise ArgumentError(
                f"--{name}",
                getattr(options, name),
                f"{options.target} is a training step, which has its own; leave it out",
            )
    looked: dict[str, Any] = {"batch_size": options.batch, "loop_steps": options.loop_steps}
    if options.xla:
        looked["xla"] = True
    return Target(step, args, looked)


def _found(target: str) -> Any:
    """Return a Keras model, or a training step and its arguments as a tuple."""
    import keras

    if target.endswith(SAVED) or os.path.exists(target):
        return _loaded(target)
    module, colon, name = target.partition(":")
    if not colon or not name or not module:
        raise ArgumentError(
            "TARGET",
            target,
            "is neither a file nor package.module:name; give a saved model (.keras), or the"
            f" package.module:name of {_WANTED}",
        )
    if module.endswith(".py") or os.sep in module:
        name_of = module.removesuffix(".py").replace(os.sep, ".").strip(".")
        raise ArgumentError(
            "TARGET", target, f"give a module, not a file: {name_of}:{name}, in the folder it is in"
        )
    found = _attribute(_imported("TARGET", target, module), target, name)
    if isinstance(found, keras.Model):
        return found
    if not callable(found):
        raise ArgumentError(
            "TARGET",
            target,
            f"is {_kind(found)}; give {_WANTED}, or a function that returns one of these",
        )
    return _checked(target, _called(target, found))


def _checked(target: str, found: Any) -> Any:
    """Return the result of a target function; raise if it cannot be explained."""
    import keras

    if isinstance(found, keras.Model):
        return found
    if isinstance(found, (tuple, list)) and len(found) == 2 and callable(found[0]):
        step, args = found
        return step, tuple(args) if isinstance(args, (tuple, list)) else (args,)
    raise ArgumentError(
        "TARGET", target, f"returns {_kind(found)}; return {_WANTED}, with a tuple of args"
    )


def _loaded(path: str) -> Any:
    import keras

    if not os.path.exists(path):
        raise ArgumentError("TARGET", path, "there is no such file")
    if os.path.isdir(path):
        raise ArgumentError(
            "TARGET",
            path,
            "is a folder, from which Keras cannot load a training step; give a .keras file written"
            " by model.save",
        )
    if path.endswith(".keras") and not zipfile.is_zipfile(path):
        raise ArgumentError("TARGET", path, "is damaged, or was not written by model.save")
    try:
        return keras.models.load_model(path)
    except Exception as error:
        raise ArgumentError("TARGET", path, _why_not_loaded(error)) from error


def _why_not_loaded(error: Exception) -> str:
    """Return why a saved model cannot be loaded, and the way out."""
    text = str(error)
    missing = re.search(r"Could not locate (?:class|function) '([^']+)'", text)
    if missing:
        return (
            f"needs {missing[1]!r}, which is not part of Keras: name the module that registers it"
            " (keras.saving.register_keras_serializable) with --import module"
        )
    if "safe_mode" in text:
        return (
            "contains code (a lambda), which Keras runs only if you trust the file: if you do,"
            " write a function that returns keras.models.load_model(path, safe_mode=False), and"
            " give module:function"
        )
    return f"cannot be loaded: {cause(error)}"


def _imported(argument: str, value: str, module: str) -> Any:
    if (here := os.getcwd()) not in sys.path:
        sys.path.insert(0, here)
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise ArgumentError(argument, value, _failed(module, error)) from error
        raise ArgumentError(
            argument,
            value,
            f"there is no module {error.name!r} here or among the installed packages; run this in"
            " its folder, or set PYTHONPATH",
        ) from error
    except (Exception, SystemExit) as error:
        raise ArgumentError(argument, value, _failed(module, error)) from error


def _failed(module: str, error: BaseException) -> str:
    where = ""
    if frames := [f for f in traceback.extract_tb(error.__traceback__) if "importlib" not in f[0]]:
        where = f" ({os.path.basename(frames[-1].filename)}:{frames[-1].lineno})"
    return f"importing {module!r} failed: {cause(error)}{where}"


def _attribute(module: Any, target: str, name: str) -> Any:
    found = module
    for part in name.split("."):
        if not hasattr(found, part):
            known = [known for known in dir(found) if not known.startswith("_")]
            close = difflib.get_close_matches(part, known, n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"there are {_few(known)}"
            raise ArgumentError(
                "TARGET", target, f"{getattr(found, '__name__', name)!r} has no {part!r}; {hint}"
            )
        found = getattr(found, part)
    return found


def _few(names: Sequence[str]) -> str:
    shown = ", ".join(names[:12]) or "no names in it"
    return f"{shown}, …" if len(names) > 12 else shown


def _called(target: str, function: Any) -> Any:
    try:
        inspect.signature(function).bind()
    except TypeError as error:
        raise ArgumentError(
            "TARGET",
            target,
            f"is a function that cannot be called without arguments ({error}); give one that needs"
            f" none and returns {_WANTED}",
        ) from error
    except ValueError:
        # The callable does not show its parameters.
        pass
    try:
        return function()
    except (Exception, SystemExit) as error:
        raise ArgumentError("TARGET", target, f"fails when it is called: {cause(error)}") from error


def _kind(value: Any) -> str:
    if value is None:
        return "nothing (None)"
    if isinstance(value, (tuple, list)):
        return (
            f"a {type(value).__name__} of {len(value)} ({_few([type(v).__name__ for v in value])})"
        )
    return f"of type {type(value).__name__}"
