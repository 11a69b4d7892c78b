"""Sections of settings as dataclasses: declared with `setting`, built from dictionaries, checked.

Knows how settings are renamed and added from release to release, but not which settings there are.
"""

import dataclasses
import difflib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import field
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from blocktrain.errors import ConfigError

# 1: what the first release knew. 2: model.layer and swarm.heartbeat_timeout; swarm.kept became
# swarm.top_k_per_4096.
CONFIG_VERSION = 2
VERSION_KEY = "config_version"

T = TypeVar("T")
Values = dict[str, Any]  # sections by name, each a dictionary of settings; and config_version


def setting(
    default: Any,
    doc: str,
    *,
    low: float | None = None,
    high: float | None = None,
    choices: Sequence[str] | None = None,
    since: int = 1,
    formerly: str | None = None,
) -> Any:
    """A field of a section. `since`: the config_version that added it, or, of one that was
    `formerly` called something else, that renamed it."""
    rules = {"doc": doc, "low": low, "high": high, "choices": choices}
    return field(default=default, metadata={**rules, "since": since, "formerly": formerly})


def build(config: type[T], values: Mapping[str, Any]) -> T:
    """Validated settings of any dataclass of sections, from any config_version up to this one."""
    version, values = _version_of(values), {k: v for k, v in values.items() if k != VERSION_KEY}
    sections = get_type_hints(config)
    for name in values:
        if name not in sections:
            raise ConfigError(f"unknown section [{name}]; {_remedy(name, sections, version)}")
    return config(
        **{
            name: _build_section(name, kind, values.get(name, {}), version)
            for name, kind in sections.items()
        }
    )


def describe(config: type) -> list[tuple[str, Any, str]]:
    """Every setting as (dotted name, default, sentence)."""
    return [
        (f"{section}.{item.name}", item.default, item.metadata["doc"])
        for section, kind in get_type_hints(config).items()
        for item in dataclasses.fields(kind)
    ]


def stored_values(config: Any) -> Values:
    """Settings as they are stored and sent: in the oldest config_version that can express them.

    Every setting of that version is written, so that a later change of a default changes no run;
    newer settings are left out, since all of them have their defaults. An older release can
    therefore read what it needs to take part in a run that uses nothing it does not know.
    """
    sections = [(item.name, getattr(config, item.name)) for item in dataclasses.fields(config)]
    needed = max(
        item.metadata["since"]
        for _, section in sections
        for item in dataclasses.fields(section)
        if item.metadata["formerly"] is None and _is_needed(section, item)
    )
    values: Values = {VERSION_KEY: needed} if needed > 1 else {}
    for name, section in sections:
        values[name] = {
            stored_name: getattr(section, item.name)
            for item in dataclasses.fields(section)
            if (stored_name := _name_in(needed, item))
        }
    return values


def toml_text(values: Values) -> str:
    lines = []
    for name, value in values.items():
        if not isinstance(value, dict):
            lines += [f"{name} = {_toml_value(value)}", ""]
            continue
        lines.append(f"[{name}]")
        lines += [f"{key} = {_toml_value(item)}" for key, item in value.items()]
        lines.append("")
    return "\n".join(lines)


def _toml_value(value: Any) -> str:
    """JSON is valid TOML for strings, numbers, booleans and flat arrays, except for surrogate pairs
    and a bare DEL."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _is_needed(section: Any, item: "dataclasses.Field[Any]") -> bool:
    return bool(item.metadata["since"] == 1 or getattr(section, item.name) != item.default)


def _name_in(version: int, item: "dataclasses.Field[Any]") -> str | None:
    """What a config_version calls a setting; None: it does not know it."""
    if version >= item.metadata["since"]:
        return item.name
    former: str | None = item.metadata["formerly"]
    return former


def current_name(config: type, section: str, key: str) -> str:
    """The name that a setting has now; `key` itself unless it was renamed."""
    kind = get_type_hints(config).get(section)
    fields = dataclasses.fields(kind) if kind else ()
    return {item.metadata["formerly"]: item.name for item in fields}.get(key, key)


def closest_match(word: str, candidates: Iterable[str]) -> str | None:
    """The candidate a mistyped word most resembles; None if none is close."""
    nearest = difflib.get_close_matches(word, list(candidates), n=1)
    return nearest[0] if nearest else None


def _version_of(values: Mapping[str, Any]) -> int:
    version = values.get(VERSION_KEY, 1)
    if type(version) is not int or version < 1:
        raise ConfigError(f"{VERSION_KEY} = {version!r} must be a positive whole number")
    return version


def _remedy(word: str, candidates: Iterable[str], version: int) -> str:
    if version > CONFIG_VERSION:
        return (
            f"it was written by a newer blocktrain ({VERSION_KEY} {version}, this release knows"
            f" {CONFIG_VERSION}); update blocktrain"
        )
    guess = closest_match(word, candidates)
    return f"did you mean {guess}?" if guess else f"there are {', '.join(candidates)}"


def _build_section(section: str, kind: Any, values: Any, version: int) -> Any:
    if not isinstance(values, Mapping):
        raise ConfigError(f"[{section}] must be a section, not a value")
    fields = {item.name: item for item in dataclasses.fields(kind)}
    current_names = {str(item.metadata["formerly"]): name for name, item in fields.items()}
    types = get_type_hints(kind)
    checked = {}
    for given_name, value in values.items():
        name = current_names.get(str(given_name), str(given_name))
        if name not in fields:
            remedy = _remedy(name, fields, version)
            raise ConfigError(f"unknown setting {section}.{name}; {remedy}")
        if name in checked:
            raise ConfigError(f"{section}.{given_name} and {section}.{name} are the same setting")
        checked[name] = _check_value(f"{section}.{name}", value, types[name], fields[name].metadata)
    return kind(**checked)


def _check_value(name: str, value: Any, kind: Any, rules: Mapping[str, Any]) -> Any:
    value = _coerce(name, value, kind)
    if rules["choices"] and value not in rules["choices"]:
        raise ConfigError(f"{name} = {value!r} must be one of {', '.join(rules['choices'])}")
    if rules["low"] is not None and value < rules["low"]:
        raise ConfigError(f"{name} = {value} must be at least {rules['low']}")
    if rules["high"] is not None and value > rules["high"]:
        raise ConfigError(f"{name} = {value} must be at most {rules['high']}")
    return value


def _coerce(name: str, value: Any, kind: Any) -> Any:
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if kind is int and isinstance(value, float) and value.is_integer():
        value = int(value)
    if get_origin(kind) is tuple:
        if not isinstance(value, (list, tuple)):
            raise ConfigError(f"{name} = {value!r} must be a list of numbers")
        return tuple(_coerce(name, item, get_args(kind)[0]) for item in value)
    if not isinstance(value, kind) or (kind is not bool and isinstance(value, bool)):
        raise ConfigError(f"{name} = {value!r} must be of type {kind.__name__}")
    if kind is float and not math.isfinite(value):
        raise ConfigError(f"{name} = {value} must be finite")
    return value
