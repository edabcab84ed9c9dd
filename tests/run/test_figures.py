"""The closing line: of one answer, of several, of none."""

from __future__ import annotations

from paramstore.run.figures import Figures

ONE = Figures(tokens=11, answers=1, first_s=0.5, further_s=2.0, uses=80, hits=60, bytes_read=3_000_000, waited_s=0.25)


def test_the_line_has_every_figure() -> None:
    assert ONE.line() == (
        "11 tokens, 5.00 tokens/s, the first after 0.50 s; experts there when used: 75.0%; 3.0 MB read from the volume; 0.25 s "
        "waited for experts"
    )


def test_answers_add_up_and_none_has_a_line_too() -> None:
    both = ONE + Figures(tokens=1, answers=1, first_s=1.5, uses=20, hits=20)
    assert (both.tokens, both.uses, both.hits, both.waited_s) == (12, 100, 80, 0.25)
    assert "12 tokens, 5.00 tokens/s, the first after 1.00 s; experts there when used: 80.0%" in both.line()
    assert Figures().line().startswith("0 tokens, no token after the first, the first after 0.00 s; experts there when used: none")
