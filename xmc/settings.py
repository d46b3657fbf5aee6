"""Typed settings: dataclasses from YAML and `key=value` words, and back. Knows no particular setting.

A wrong key is answered with its nearest neighbour, a wrong type with what was expected, both with where it stood.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, TypeVar

import yaml

from xmc.errors import InputError

T = TypeVar("T")


def from_mapping(cls: type[T], values: Mapping[str, Any], where: str = "settings") -> T:
    """Build the dataclass `cls` from nested `values`; `where` names their origin in errors."""
    return _build(cls, values, "", where, cls)


def from_overrides(cls: type[T], overrides: Sequence[str]) -> T:
    """Build `cls` from its defaults and words like `a.b=3`."""
    return from_mapping(cls, parse_overrides(overrides), "command line")


def parse_overrides(overrides: Sequence[str]) -> dict[str, Any]:
    """`["a.b=1", "c=x"]` → `{"a": {"b": 1}, "c": "x"}`; values are read as YAML."""
    tree: dict[str, Any] = {}
    for word in overrides:
        key, equals, text = word.partition("=")
        if not equals or not key:
            raise InputError(f"command line: {word!r} is not a setting; write key=value, e.g. seed=1")
        value = _read_value(text)
        *parents, last = key.split(".")
        node = tree
        for parent in parents:
            child = node.setdefault(parent, {})
            if not isinstance(child, dict):
                raise InputError(f"command line: {key} sets a part of {parent}, which is set whole before it")
            node = child
        node[last] = value
    return tree


def _read_value(text: str) -> Any:
    """A word's value as YAML; as text what YAML cannot read or reads as nothing (a separator such as |, a blank)."""
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        return text
    nothing = value in (None, "") and text not in ("", "null", "~", "''", '""')
    return text if nothing else value


def merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """`base` with the leaves of `over` put over it."""
    result = dict(base)
    for key, value in over.items():
        old = result.get(key)
        result[key] = merge(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return result


def to_mapping(settings: Any) -> dict[str, Any]:
    """The nested plain values of a settings dataclass (tuples as lists), such as YAML and JSON take."""
    return {f.name: _plain(getattr(settings, f.name)) for f in dataclasses.fields(settings)}


def to_yaml(settings: Any) -> str:
    return yaml.safe_dump(to_mapping(settings), sort_keys=False, allow_unicode=True)


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """`{"a": {"b": 1}}` → `{"a.b": 1}`."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat.update(
            flatten(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {prefix + key: value}
        )
    return flat


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return to_mapping(value)
    if isinstance(value, (tuple, list)):
        return [_plain(item) for item in value]
    return dict(value) if isinstance(value, Mapping) else value


def _build(cls: type[T], values: Any, prefix: str, where: str, root: type) -> T:
    if not isinstance(values, Mapping):
        raise InputError(
            f"{where}: {prefix.rstrip('.') or 'the file'} holds {values!r}; it is a group of settings"
        )
    hints = typing.get_type_hints(cls)
    fields = {f.name: f for f in dataclasses.fields(cls) if f.init}  # type: ignore[arg-type]
    for key in values:
        if key not in fields:
            raise InputError(f"{where}: unknown setting {prefix}{key}{_nearest(prefix + str(key), root)}")
    arguments = {
        key: _convert(hints[key], _over_default(fields[key], value), prefix + key, where, root)
        for key, value in values.items()
    }
    missing = [
        prefix + name
        for name, f in fields.items()
        if name not in arguments
        and f.default is dataclasses.MISSING
        and f.default_factory is dataclasses.MISSING
    ]
    if missing:
        raise InputError(f"{where}: {', '.join(missing)} must be given, e.g. {missing[0]}=…")
    return cls(**arguments)


def _over_default(field: dataclasses.Field, value: Any) -> Any:
    """A group of settings on top of the defaults that its owner gives it, which may differ from the group's own."""
    if isinstance(value, Mapping) and field.default_factory is not dataclasses.MISSING:
        default = field.default_factory()
        if dataclasses.is_dataclass(default):
            return merge(to_mapping(default), value)
    return value


def _convert(hint: Any, value: Any, key: str, where: str, root: type) -> Any:
    """`value` as the type `hint` says, or an InputError that names `key`."""
    origin = typing.get_origin(hint)
    if dataclasses.is_dataclass(hint):
        return _build(hint, value, key + ".", where, root)  # type: ignore[arg-type]
    if origin in (typing.Union, types.UnionType):
        return _convert_union(hint, value, key, where, root)
    if origin is Literal:
        if value not in typing.get_args(hint):
            choices = ", ".join(map(str, typing.get_args(hint)))
            raise InputError(f"{where}: {key} is {value!r}; it is one of: {choices}")
        return value
    if hint is dict:
        if not isinstance(value, Mapping):
            raise InputError(f"{where}: {key} is {value!r}; it is a group of settings")
        return dict(value)
    if origin is tuple:
        item = typing.get_args(hint)[0]
        if not isinstance(value, (list, tuple)):
            raise InputError(f"{where}: {key} is {value!r}; it takes a list, e.g. {key}=[…]")
        return tuple(_convert(item, element, f"{key}[{i}]", where, root) for i, element in enumerate(value))
    return _scalar(hint, value, key, where)


def _convert_union(hint: Any, value: Any, key: str, where: str, root: type) -> Any:
    options = typing.get_args(hint)
    if value is None and type(None) in options:
        return None
    # An exact match first, so that `int | float` keeps 2 an int and 2.0 a float.
    for option in options:
        if isinstance(option, type) and type(value) is option:
            return value
    problem: InputError | None = None
    for option in (o for o in options if o is not type(None)):
        try:
            return _convert(option, value, key, where, root)
        except InputError as error:
            problem = problem or error
    assert problem is not None
    raise problem


def _scalar(hint: Any, value: Any, key: str, where: str) -> Any:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if hint is float and (number or isinstance(value, str)):
        with contextlib.suppress(ValueError):  # YAML reads 1e-4 (without a dot) as text
            return float(value)
    if hint is int and number and float(value).is_integer():
        return int(value)
    if hint is bool and isinstance(value, bool):
        return value
    if hint is str and (number or isinstance(value, str)):
        return str(value)
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
    raise InputError(f"{where}: {key} is {value!r}; it takes {names.get(hint, str(hint))}")


def _keys(cls: type, prefix: str = "") -> Iterator[str]:
    hints = typing.get_type_hints(cls)
    for f in dataclasses.fields(cls):
        hint = hints[f.name]
        yield prefix + f.name
        if dataclasses.is_dataclass(hint):
            yield from _keys(hint, f"{prefix}{f.name}.")  # type: ignore[arg-type]


def _nearest(key: str, root: type) -> str:
    names = list(_keys(root))
    # The last part counts alone too: `workers` means `train.workers`.
    by_tail = {name.rsplit(".", 1)[-1]: name for name in names}
    close = difflib.get_close_matches(key, names, n=1, cutoff=0.6)
    close = close or [
        by_tail[m] for m in difflib.get_close_matches(key.rsplit(".", 1)[-1], by_tail, n=1, cutoff=0.6)
    ]
    return f"; did you mean {close[0]}?" if close else "; --print-config lists all settings"
