"""The figures of answers, and the one line that closes a run with them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """What answers took. tokens: new ones. first_s: seconds to the first of each answer; further_s: from there to the last. uses:
    experts that layers have used; hits: those whose bytes were there by then. bytes_read: from the volumes. waited_s: seconds that
    computing has waited for the daemon, for experts nearly all of it."""

    tokens: int = 0
    answers: int = 0
    first_s: float = 0.0
    further_s: float = 0.0
    uses: int = 0
    hits: int = 0
    bytes_read: int = 0
    waited_s: float = 0.0

    def __add__(self, other: Figures) -> Figures:
        return Figures(**{name: getattr(self, name) + getattr(other, name) for name in self.__slots__})

    def line(self) -> str:
        """The figures, for people. Tokens a second are those after the first of an answer, which waits for the whole prompt."""
        further = self.tokens - self.answers
        speed = f"{further / self.further_s:.2f} tokens/s" if further > 0 and self.further_s > 0 else "no token after the first"
        hits = f"{self.hits / self.uses:.1%}" if self.uses else "none"
        return (
            f"{self.tokens} tokens, {speed}, the first after {self.first_s / max(self.answers, 1):.2f} s; experts there when used: "
            f"{hits}; {self.bytes_read / 1e6:.1f} MB read from the volume; {self.waited_s:.2f} s waited for experts"
        )
