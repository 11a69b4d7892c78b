"""Sections of settings as dataclasses: declared with `setting`, built from dictionaries, checked.

Handles settings that a release adds or renames. The settings themselves are in settings.py.
"""

import dataclasses
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import field
from typing import Any, NamedTuple, TypeVar, get_args, get_origin, get_type_hints

from blocktrain.errors import ConfigError, closest_match

# 1: the first release. 2: adds every setting with since=2, such as model.layer; renames swarm.kept
# to swarm.top_k_per_4096.
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
    """A field of a section. `formerly`: its old name. `since`: the config_version that added the
    setting or, if it has an old name, renamed it."""
    rules = {"doc": doc, "low": low, "high": high, "choices": choices}
    return field(default=default, metadata={**rules, "since": since, "formerly": formerly})


def build(config: type[T], values: Mapping[str, Any]) -> T:
    """Build and validate a dataclass of sections; any config_version up to this one is accepted."""
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


class SettingDescription(NamedTuple):
    name: str  # with its section
    default: Any
    allowed: str
    doc: str


def describe(config: type) -> list[SettingDescription]:
    """Every setting."""
    return [
        SettingDescription(
            f"{section}.{item.name}", item.default, allowed_values(item), item.metadata["doc"]
        )
        for section, kind in get_type_hints(config).items()
        for item in dataclasses.fields(kind)
    ]


def allowed_values(item: "dataclasses.Field[Any]") -> str:
    """What a setting can be set to: its choices, or a type with its limits."""
    rules = item.metadata
    if rules["choices"]:
        return ", ".join(rules["choices"])
    if isinstance(item.default, bool):
        return "true, false"
    kind = "list of numbers" if isinstance(item.default, tuple) else type(item.default).__name__
    limits = [
        f"{word} {rules[limit]}"
        for word, limit in (("from", "low"), ("to", "high"))
        if rules[limit] is not None
    ]
    return " ".join([{"int": "integer", "float": "number", "str": "text"}.get(kind, kind), *limits])


def stored_values(config: Any) -> Values:
    """Settings as stored and sent: in the oldest config_version that can express them.

    All settings of that version are written, so that a new default in a later release changes no
    existing run. Newer settings are left out, since they have their defaults. So an older release
    can take part in any run that uses no newer setting.
    """
    sections = [(item.name, getattr(config, item.name)) for item in dataclasses.fields(config)]
    newer = (
        item.metadata["since"]
        for _, section in sections
        for item in dataclasses.fields(section)
        if item.metadata["formerly"] is None and getattr(section, item.name) != item.default
    )
    needed = max(newer, default=1)
    values: Values = {VERSION_KEY: needed} if needed > 1 else {}
    for name, section in sections:
        for item in dataclasses.fields(section):
            is_known = needed >= item.metadata["since"]
            if stored_name := item.name if is_known else item.metadata["formerly"]:
                values.setdefault(name, {})[stored_name] = getattr(section, item.name)
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


def current_names(section: Any) -> dict[str, str]:
    """The current names of a section's renamed settings, by their former names."""
    fields = dataclasses.fields(section)
    return {item.metadata["formerly"]: item.name for item in fields if item.metadata["formerly"]}


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
    return f"did you mean {guess}?" if guess else f"use one of {', '.join(candidates)}"


def _build_section(section: str, kind: Any, values: Any, version: int) -> Any:
    if not isinstance(values, Mapping):
        raise ConfigError(f"[{section}] must be a section, not a value")
    fields = {item.name: item for item in dataclasses.fields(kind)}
    renamed, types, checked = current_names(kind), get_type_hints(kind), {}
    for written_name, value in values.items():
        name = renamed.get(written_name, str(written_name))
        if name not in fields:
            remedy = _remedy(name, fields, version)
            raise ConfigError(f"unknown setting {section}.{name}; {remedy}")
        if name in checked:
            raise ConfigError(
                f"{section}.{written_name} and {section}.{name} are the same setting; remove one"
            )
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
