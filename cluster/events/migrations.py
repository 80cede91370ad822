"""Numbered SQL files that bring a database's schema up to date, each applied once.

A package of migrations holds files such as ``0001_events.sql``. Statements end in a semicolon at the end of a line and hold none elsewhere.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files

from cluster.errors import BackendUnavailable


@dataclass(frozen=True)
class Migration:
    """One step of a schema: the schema has version `number` once it is applied."""

    number: int
    name: str
    sql: str

    @property
    def statements(self) -> list[str]:
        """The statements of the file, without their semicolons."""
        return [statement.strip() for statement in f"{self.sql}\n".split(";\n") if statement.strip()]


def read_migrations(package: str) -> list[Migration]:
    """The package's migrations in order. They are numbered from 1 without a gap."""
    texts = sorted((file.name, file.read_text("utf-8")) for file in files(package).iterdir() if file.name.endswith(".sql"))
    found = [Migration(int(name.partition("_")[0]), name.removesuffix(".sql"), text) for name, text in texts]
    numbers = [migration.number for migration in found]
    if not found or numbers != list(range(1, len(found) + 1)):
        raise BackendUnavailable(f"the migrations of {package} are numbered {numbers}, not 1, 2, ...; install genrec anew")
    return found


def pending(migrations: Sequence[Migration], applied: int, where: str) -> Sequence[Migration]:
    """The migrations still to be applied to a schema of version `applied`, 0 where there is none.

    Raises BackendUnavailable where the schema is newer than the code: the code would write rows that the newer one does not expect.
    """
    if applied > len(migrations):
        known = f"has schema version {applied}, and this genrec knows versions up to {len(migrations)}"
        raise BackendUnavailable(f"{where} {known}; update genrec, or use a store that this version made")
    return migrations[applied:]
