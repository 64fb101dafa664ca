"""The configuration file: finding and reading it."""

from collections.abc import Mapping
from pathlib import Path

from deadpool_run.cli.options.machine import xdg_dir
from deadpool_run.errors import UsageError


def read_config(named: str, environment: Mapping[str, str]) -> tuple[str, Mapping[str, object]]:
    """Return name and content of the named file, else of ./deadpool.yaml, else of the user's file; empty without one.

    Raises `UsageError`.
    """
    if named:
        return _read(Path(named))
    places = (Path("deadpool.yaml"), xdg_dir(environment, "XDG_CONFIG_HOME", ".config") / "deadpool" / "config.yaml")
    found = next((place for place in places if place.is_file()), None)
    return _read(found) if found else ("", {})


def _read(path: Path) -> tuple[str, Mapping[str, object]]:
    import yaml  # noqa: PLC0415 - most runs have no file

    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(
            f"{path}: cannot be read: {error.strerror}\nname another file with --config, or add --no-config"
        ) from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UsageError(
            f"{path}: not YAML: {error}\nwrite one `option: value` per line, or add --no-config"
        ) from error
    if not isinstance(content, dict | None):
        raise UsageError(f"{path}: not a mapping of options\nwrite one `option: value` per line, or add --no-config")
    return str(path), content or {}
