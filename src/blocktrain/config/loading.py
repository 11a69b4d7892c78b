"""Settings from TOML files and the command line.

Knows the files that people write and those that blocktrain stores; the settings are in settings.py.
"""

import logging
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from blocktrain.config.sections import Values, build, current_name
from blocktrain.config.settings import Config
from blocktrain.errors import ConfigError

log = logging.getLogger(__name__)


def load_config(path: Path | str, overrides: Sequence[str] = ()) -> Config:
    """The settings of a file that a person wrote, with `section.key=value` overrides applied."""
    return build(Config, read_settings(path, overrides))


def load_stored_config(path: Path | str) -> Config:
    """The settings of a file that `to_toml` wrote."""
    return from_dict(_without_removed(_parsed(_read(path), path)))


def from_toml(text: str) -> Config:
    """The settings in a text that `to_toml` wrote."""
    return from_dict(_without_removed(tomllib.loads(text)))


def from_dict(values: Mapping[str, Any]) -> Config:
    return build(Config, values)


def read_settings(path: Path | str, overrides: Sequence[str] = ()) -> Values:
    """A TOML file that a person wrote with overrides applied, not validated yet."""
    text = _read(path)
    values = _without_removed(_parsed(text, path))
    is_stored = _is_stored(text, values)
    for section, settings in values.items():
        if isinstance(settings, dict):
            names = [_current(section, key, warn=not is_stored) for key in settings]
            if len(set(names)) == len(names):  # or `build` says which setting is given twice
                values[section] = dict(zip(names, settings.values(), strict=True))
    for override in overrides:
        _apply_override(values, override)
    return values


def _read(path: Path | str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot read config {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from None


def _parsed(text: str, path: Path | str) -> Values:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from None


def _is_stored(text: str, values: Values) -> bool:
    """Whether the text is what `to_toml` writes, which uses old names on purpose."""
    try:
        return from_dict(values).to_toml() == text
    except ConfigError:
        return False


def _current(section: str, key: str, *, warn: bool = True) -> str:
    """The name that a setting has now, with a warning if it was renamed."""
    name = current_name(Config, section, key)
    if name != key and warn:
        log.warning("the setting %s.%s was renamed; use %s.%s", section, key, section, name)
    return name


def _without_removed(values: Values) -> Values:
    """Files that still have objective.stagger were written when AdamW was the only optimizer and
    blocks had no lead."""
    objective, train = values.get("objective", {}), values.get("train", {})
    if "stagger" not in objective:
        return values
    if objective["stagger"]:
        raise ConfigError("objective.stagger was removed; use objective.lead")
    remaining = {key: value for key, value in objective.items() if key != "stagger"}
    return {
        **values,
        "objective": {"lead": 0.0, **remaining},
        "train": {"optimizer": "adamw", **train},
    }


def _apply_override(values: Values, override: str) -> None:
    name, equals, text = override.partition("=")
    section, dot, key = name.strip().partition(".")
    if not (equals and dot and key):
        raise ConfigError(f"--set {override!r} is not of the form section.key=value")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text.strip()  # a bare word is a string
    if not isinstance(values.setdefault(section, {}), dict):
        raise ConfigError(f"[{section}] must be a section, not a value")
    values[section][_current(section, key)] = value
