"""Things that are wrong with a store, as values."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from paramstore.core.key import ExpertKey


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that is not as it should be, and its place, as far as that is known."""

    what: str
    volume: int | None = None
    offset: int | None = None
    namespace: str | None = None
    key: ExpertKey | None = None
    step: int | None = None

    def describe(self) -> str:
        """The finding as one line for people."""
        named = (
            ("volume", self.volume), ("offset", self.offset), ("namespace", self.namespace), ("key", self.key), ("step", self.step),
        )  # fmt: skip
        place = ", ".join(f"{name} {value}" for name, value in named if value is not None)
        return f"{place}: {self.what}" if place else self.what

    def as_json(self) -> dict[str, object]:
        """All fields; those that are not known are null."""
        return asdict(self)
