"""Names that a package offers without importing the modules that hold them."""

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def lazy_exports(
    package: str, exports: Mapping[str, str]
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Make a package's `__init__` cost nothing until a name is used (PEP 562).

    Args:
        package: The package's `__name__`.
        exports: Public name -> the module that holds it. Names of the package itself that exist already (`__version__`)
            need no entry.

    Returns:
        `__getattr__`, `__dir__` and `__all__`, to be assigned to exactly these names.

    Raises:
        AttributeError: From `__getattr__`, for a name the package does not have.

    Example:
        In `posttrain_sft/__init__.py`:

        >>> from posttrain_cli import lazy_exports
        >>> __getattr__, __dir__, __all__ = lazy_exports("json", {"scan_string": "json.scanner"})
        >>> __all__
        ['scan_string']
        >>> try:
        ...     __getattr__("scan")
        ... except AttributeError as error:
        ...     print(error)
        module 'json' has no attribute 'scan'; did you mean 'scan_string'?
    """

    def getattribute(name: str) -> Any:
        if name in exports:
            value = getattr(import_module(exports[name]), name)
            setattr(sys.modules[package], name, value)
            return value
        raise AttributeError(f"module {package!r} has no attribute {name!r}{_hint(name, exports)}", name=name)

    def names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *exports})

    return getattribute, names, sorted(exports)


def _hint(name: str, exports: Mapping[str, str]) -> str:
    if name.startswith("__"):
        return ""
    from posttrain_cli.values import nearest

    close = nearest(name, exports)
    return f"; did you mean {close[0]!r}?" if close else ""
