"""Functions that a user names as ``package.module:function``."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any


class NotNamed(ValueError):
    """A name does not lead to a function. The message names the option, what came and what is allowed."""


def load(name: str, option: str, called: str) -> Callable[..., Any]:
    """The function that ``module:function`` names.

    Args:
        option: what the name was given with.
        called: how the function is called, for a message: "with a model".

    Raises:
        NotNamed: the name has another form, or cannot be imported, or is not callable.
    """
    module, colon, function = name.partition(":")
    if not (module and colon and function):
        raise NotNamed(f"{option} {name!r} is not of the form package.module:function")
    try:
        found = functools.reduce(getattr, function.split("."), importlib.import_module(module))
    except (Exception, SystemExit) as error:  # an import runs whatever the module does
        raise NotNamed(f"{option} {name!r} cannot be imported: {error}; it takes package.module:function") from error
    if not callable(found):
        raise NotNamed(f"{option} {name!r} is a {type(found).__name__}; it takes a function that is called {called}")
    return found
