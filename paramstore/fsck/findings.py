"""What is wrong, as values."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from paramstore.core.key import ExpertKey


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that is not as it should be, and where: whatever of the place is known."""

    what: str
    volume: int | None = None
    offset: int | None = None
    namespace: str | None = None
    key: ExpertKey | None = None
    step: int | None = None

    def describe(self) -> str:
        """One line for people."""
        named = (
            ("volume", self.volume), ("offset", self.offset), ("namespace", self.namespace), ("key", self.key), ("step", self.step),
        )  # fmt: skip
        place = ", ".join(f"{name} {value}" for name, value in named if value is not None)
        return f"{place}: {self.what}" if place else self.what

    def as_json(self) -> dict[str, object]:
        """Every field, those that are not known as null."""
        return asdict(self)
