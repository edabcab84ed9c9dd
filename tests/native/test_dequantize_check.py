"""A kernel that differs from torch anywhere is found out."""

from __future__ import annotations

from pathlib import Path

import pytest

from paramstore_native.compiled import Unavailable, build
from paramstore_native.dequantize import DEQUANTIZE, SOURCE
from paramstore_native.dequantize_check import difference
from paramstore_native.dequantize_kernel import Kernel

MUTANTS = {
    "cut off": ("(bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16", "bits >> 16"),
    "halves up": ("(bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16", "(bits + 0x8000u) >> 16"),
    "NaN is a number": ("magnitude == 0x7f ? 0x7fc00000u : (magnitude", "magnitude == 0x80 ? 0x7fc00000u : (magnitude"),
    "no small numbers": ("(magnitude < 8 ? small_bits : normal)", "(magnitude < 7 ? small_bits : normal)"),
    "sign lost": ("small_bits : normal) | sign", "small_bits : normal)"),
    "the first row's scales": ("scales[row / job->block_rows * blocks + block]", "scales[block]"),
    "lanes: cut off": ("_mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff))", "odd"),
    "lanes: halves up": ("_mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff))", "_mm256_set1_epi32(0x8000)"),
    "lanes: NaN is a number": ("_mm256_blendv_epi8(made, _mm256_set1_epi16(0x7fc0), is_nan)", "made"),
    "lanes: sign lost": ("_mm256_or_si256(_mm256_slli_epi16(magnitude, 7), sign)", "_mm256_slli_epi16(magnitude, 7)"),
    "lanes: another order": ("lower, upper), 0xd8)", "lower, upper), 0xe4)"),
    "lanes: a scale too large for them": ("fabsf(scale) < 0x1p119f", "scale == scale"),
    "lanes: zero has an exponent": ("UPPER_LESS[16] = {-1", "UPPER_LESS[16] = {0"),
    "lanes: zero has an odd exponent": ("0, 0, -1, 1, 1", "0, 0, 0, 1, 1"),
    "lanes: odd exponents as even ones": ("_mm256_set1_epi8(7)), odd)", "_mm256_set1_epi8(7)), _mm256_setzero_si256())"),
    "lanes: a nibble's sign lost": ("_mm256_or_si256(upper, _mm256_and_si256(signs, _mm256_set1_epi8(-128)))", "upper"),
    "lanes: upper before lower": ("_mm256_srli_epi16(columns[i], 4), columns[i], odd", "columns[i], columns[i], odd"),
    "lanes: rows in another order": ("(i + (i & 8)) * stride", "i * stride"),
    "lanes: scales in another order": ("of_rows), 0xd8)", "of_rows), 0xe4)"),
    "lanes: the first row's scales": ("of_rows[row] = scales[row * groups]", "of_rows[row] = scales[0]"),
    "lanes: halfway into columns": ("i < 2; i++", "i < 1; i++"),
    "products below normal ones": ("LEAST = 2", "LEAST = 1"),
    "products above normal ones": ("MOST = 252", "MOST = 253"),
    "zero has an exponent": ("(magnitude ? (uint16_t)(unscaled + shift) : 0)", "(uint16_t)(unscaled + shift)"),
    "a half is one": ("magnitude < 2 ? 126u << 7", "magnitude < 2 ? 127u << 7"),
    "small exponents": ("exponents[row] >= LEAST &&", "exponents[row] >= 0 &&"),
    "large exponents": ("exponents[row] <= MOST", "exponents[row] <= 255"),
    "upper before lower": ("memcpy(to + rows, upper", "memcpy(to + rows, lower"),
    "a row less at the end": ("memcpy(to, lower, count * sizeof *lower)", "memcpy(to, lower, (count - 1) * sizeof *lower)"),
    "a tile is left out": ("job->next, TILE, memory_order", "job->next, 2 * TILE, memory_order"),
    "threads do nothing": ("GOMP_parallel(make_tiles, job, threads, 0);", ";"),
}
needs_kernel = pytest.mark.skipif(DEQUANTIZE.kernel() is None, reason=DEQUANTIZE.known_state())


def has_lanes() -> bool:
    """Whether the fast way is compiled here."""
    flags = next((line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("flags")), "").split()
    return {"avx2", "f16c"} <= {*flags}


@needs_kernel
@pytest.mark.slow
@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_is_found(name: str, tmp_path: Path) -> None:
    text, (right, wrong) = SOURCE.read_text(), MUTANTS[name]
    assert right in text
    if name.startswith("lanes") and not has_lanes():
        pytest.skip("no AVX2 with F16C here: the loop computes all")
    source = tmp_path / "dequantize.c"
    source.write_text(text.replace(right, wrong))
    library = build(source, cache=tmp_path / "cache")
    assert not isinstance(library, Unavailable), library
    assert "differ from those of torch" in difference(Kernel(library))


@needs_kernel
def test_the_kernel_in_use_has_passed() -> None:
    kernel = DEQUANTIZE.kernel()
    assert kernel is not None
    assert difference(kernel) == ""
