"""What a scrub tells of its findings: all that it kept as a result, the newest few in a summary, their number in both."""

from __future__ import annotations

from paramstore.upkeep.notes import SUPERBLOCK, CopyFinding
from paramstore.upkeep.progress import FINDINGS_MAX, STATS_FINDINGS_MAX, Finding, Pace, Scrub


def found(count: int) -> Scrub:
    """A scrub that found so many damaged records, and as many copies."""
    scrub = Scrub([], None, Pace(None, 0.0), 0.0)
    for number in range(count):
        scrub.findings.add_record(Finding("moe", (0, number), (1,), 0, 1, 0, 4096 * number, "damaged"))
        scrub.findings.add_copy(CopyFinding(SUPERBLOCK, None, None, 0, 4096 * number, 0, "damaged"))
    return scrub


def test_a_result_describes_findings_of_each_kind_up_to_the_limit_and_counts_all() -> None:
    result = found(FINDINGS_MAX + 5).describe(1.0)
    assert result["found"] == 2 * (FINDINGS_MAX + 5)
    assert [len(result[kind]) for kind in ("findings", "copy_findings")] == [FINDINGS_MAX] * 2  # type: ignore[arg-type]


def test_a_summary_differs_from_the_result_in_that_it_has_the_newest_few_findings() -> None:
    for count in (0, 1, STATS_FINDINGS_MAX, STATS_FINDINGS_MAX + 1, FINDINGS_MAX + 5):
        scrub = found(count)
        summary, result = scrub.summarise(1.0), scrub.describe(1.0)
        for kind in ("findings", "copy_findings"):
            assert result[kind][-STATS_FINDINGS_MAX:] == summary.pop(kind)  # type: ignore[index]
        assert result == {**result, **summary}
        assert summary.keys() == result.keys() - {"findings", "copy_findings"}
