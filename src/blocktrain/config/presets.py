"""Finds the file of a config: a path, or the name of a preset."""

from pathlib import Path

from blocktrain.errors import ConfigError, closest_match

PACKAGE = Path(__file__).resolve().parent.parent
# In an installed package, or beside src/ in a checkout.
PRESET_FOLDERS = (PACKAGE / "presets", PACKAGE.parent.parent / "configs")


def presets() -> dict[str, Path]:
    """The files of all presets by their names."""
    return {file.stem: file for folder in PRESET_FOLDERS for file in sorted(folder.glob("*.toml"))}


def config_path(name: Path | str, option: str = "config") -> Path:
    """The path itself, or the file of the preset with that name. `option`: for the error."""
    path = Path(name)
    if (path / "config.toml").is_file():
        return path / "config.toml"  # a run's settings
    if path.is_file() or path.suffix or len(path.parts) > 1:
        return path
    known = presets()
    if path.name not in known:
        guess = closest_match(path.name, known)
        raise ConfigError(
            f"{option} {path.name}: no such file or preset;"
            + (f" did you mean {guess}?" if guess else "")
            + f" The presets are {', '.join(known)}."
        )
    return known[path.name]
