"""Presets by name: `--config demo` finds the demo.toml that ships with the package."""

from pathlib import Path

from blocktrain.core.spelling import meant
from blocktrain.errors import ConfigError

PACKAGE = Path(__file__).resolve().parent.parent
# Inside an installed package, or beside src/ in a checkout.
FOLDERS = (PACKAGE / "presets", PACKAGE.parent.parent / "configs")


def resolve_config(path: Path) -> Path:
    """The path itself, or the preset of that name where no such file exists."""
    if path.is_file() or path.suffix or len(path.parts) > 1:
        return path
    presets = {file.stem: file for folder in FOLDERS for file in sorted(folder.glob("*.toml"))}
    if path.name not in presets:
        guess = meant(path.name, presets)
        raise ConfigError(
            f"no preset and no file {path.name!r};"
            + (f" did you mean {guess}?" if guess else "")
            + f" there are {', '.join(presets)}"
        )
    return presets[path.name]
