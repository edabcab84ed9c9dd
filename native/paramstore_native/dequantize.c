/* One expert's matrix out of its quantized bytes, in bf16, with the bits that transformers gives: fp8 with a scale for each block
 * (products in fp32, rounded to bf16), and mxfp4 (OCP Microscaling Formats 1.0: 32 values of e2m1 share an exponent of e8m0).
 *
 * Loops are written so that compilers make vectors of them: bits are computed, not looked up. Where there is AVX2 with F16C, whole
 * vectors go another way, more than twice as fast as the loops: blocks of fp8 through x86's own conversion of half precision; tiles
 * of mxfp4 become columns as bytes, which are a quarter of what bf16 has, and then values, by two lookups each.
 *
 * Tiles of rows are shared by the threads of the OpenMP that torch computes with, where the process has loaded it: threads of our
 * own would wait for cores on which those spin. */

#if defined(__AVX2__) && defined(__F16C__)
#include <immintrin.h>
#endif
#include <math.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define EXPORT __attribute__((visibility("default")))

/* Rows that one thread makes at a time; of mxfp4, those that are turned into columns together: what they write is a cache line. */
enum { TILE = 32, GROUP_BYTES = 16, GROUP = 2 * GROUP_BYTES };

/* The entry of libgomp and of what stands in for it; null where none was loaded for all to see. */
extern void GOMP_parallel(void (*work)(void *), void *job, unsigned threads, unsigned flags) __attribute__((weak));

typedef struct Job {
    void (*make)(const struct Job *job, size_t first, size_t count);
    const uint8_t *from;
    const void *scales;
    uint16_t *out;
    size_t rows, cols, block_rows, block_cols;
    atomic_size_t *next;
} Job;

static void make_tiles(void *given)
{
    const Job *job = given;
    size_t first;
    while ((first = atomic_fetch_add_explicit(job->next, TILE, memory_order_relaxed)) < job->rows)
        job->make(job, first, job->rows - first < TILE ? job->rows - first : TILE);
}

static void run(Job *job, unsigned threads)
{
    atomic_size_t next = 0;
    job->next = &next;
    if (threads > 1 && job->rows > TILE && GOMP_parallel)
        GOMP_parallel(make_tiles, job, threads, 0);
    else
        make_tiles(job);
}

/* fp32 to bf16, to nearest even, as ATen rounds. */
static inline uint16_t to_bf16(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    return (uint16_t)((bits & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : rounded);
}

/* float8_e4m3fn to fp32: its bits, moved and with another bias; below 8 they count 2^-9; all ones is the one NaN. */
static inline float from_e4m3(uint8_t byte)
{
    uint32_t magnitude = byte & 0x7fu, sign = (uint32_t)(byte & 0x80u) << 24;
    uint32_t normal = magnitude == 0x7f ? 0x7fc00000u : (magnitude << 20) + (120u << 23);
    float small = (float)(int32_t)magnitude * 0x1p-9f, value;
    uint32_t small_bits;
    memcpy(&small_bits, &small, sizeof small_bits);
    uint32_t bits = (magnitude < 8 ? small_bits : normal) | sign;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static void fp8_run(const uint8_t *restrict from, float scale, uint16_t *restrict to, size_t count)
{
    for (size_t i = 0; i < count; i++)
        to[i] = to_bf16(from_e4m3(from[i]) * scale);
}

#if defined(__AVX2__) && defined(__F16C__)
enum { LANES = 16 };

static inline __m256i to_bf16_lanes(__m256 values)
{
    __m256i bits = _mm256_castps_si256(values);
    __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    return _mm256_srli_epi32(_mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff))), 16);
}

/* The bits of e4m3, moved, are a half of a 2^8th of the value, below 8 too: the scale brings that back. Whole vectors; the scale is
 * a number, and so are its products with 2^8. */
static void fp8_run_in_lanes(const uint8_t *restrict from, float scale, uint16_t *restrict to, size_t count)
{
    const __m256 scales = _mm256_set1_ps(scale * 0x1p8f);
    const __m256i all_ones = _mm256_set1_epi16(0x7f);
    for (size_t i = 0; i < count; i += LANES) {
        __m256i bytes = _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)(from + i)));
        __m256i magnitude = _mm256_and_si256(bytes, all_ones);
        __m256i sign = _mm256_slli_epi16(_mm256_andnot_si256(all_ones, bytes), 8);
        __m256i halves = _mm256_or_si256(_mm256_slli_epi16(magnitude, 7), sign);
        __m256i lower = to_bf16_lanes(_mm256_mul_ps(_mm256_cvtph_ps(_mm256_castsi256_si128(halves)), scales));
        __m256i upper = to_bf16_lanes(_mm256_mul_ps(_mm256_cvtph_ps(_mm256_extracti128_si256(halves, 1)), scales));
        __m256i made = _mm256_permute4x64_epi64(_mm256_packus_epi32(lower, upper), 0xd8);
        __m256i is_nan = _mm256_cmpeq_epi16(magnitude, all_ones);
        _mm256_storeu_si256((__m256i *)(to + i), _mm256_blendv_epi8(made, _mm256_set1_epi16(0x7fc0), is_nan));
    }
}
#else
enum { LANES = 1 };
#define fp8_run_in_lanes fp8_run
#endif

static void make_fp8(const Job *job, size_t first, size_t count)
{
    const float *scales = job->scales;
    size_t cols = job->cols, block_cols = job->block_cols, blocks = cols / block_cols;
    for (size_t row = first; row < first + count; row++) {
        for (size_t block = 0; block < blocks; block++) {
            float scale = scales[row / job->block_rows * blocks + block];
            const uint8_t *restrict from = job->from + row * cols + block * block_cols;
            uint16_t *restrict to = job->out + row * cols + block * block_cols;
            if (block_cols % LANES == 0 && fabsf(scale) < 0x1p119f)
                fp8_run_in_lanes(from, scale, to, block_cols);
            else
                fp8_run(from, scale, to, block_cols);
        }
    }
}

/* weight [rows, cols] e4m3, scales [rows / block_rows, cols / block_cols] -> out [rows, cols]. Blocks divide both. */
EXPORT void paramstore_fp8(
    const uint8_t *weight, const float *scales, uint16_t *out, size_t rows, size_t cols, size_t block_rows, size_t block_cols,
    unsigned threads)
{
    Job job = {make_fp8, weight, scales, out, rows, cols, block_rows, block_cols, NULL};
    run(&job, threads);
}

enum { LEAST = 2, MOST = 252 };

/* e2m1 (0, .5, 1, 1.5, 2, 3, 4, 6 and their negatives) times 2^(scale - 127). shift: scale - 127 in the exponent's place; right for
 * scales from LEAST to MOST, whose products are normal numbers of bf16, or zeros. */
static inline uint16_t from_e2m1(uint16_t nibble, uint16_t shift)
{
    uint16_t magnitude = nibble & 7u, sign = (uint16_t)((nibble & 8u) << 12);
    uint16_t unscaled = magnitude < 2 ? 126u << 7 : (uint16_t)((magnitude << 6) + (126u << 7));
    return (magnitude ? (uint16_t)(unscaled + shift) : 0) | sign;
}

static inline uint16_t from_e2m1_slowly(uint8_t nibble, uint8_t scale)
{
    static const float values[16] = {0, .5f, 1, 1.5f, 2, 3, 4, 6, -0.0f, -.5f, -1, -1.5f, -2, -3, -4, -6};
    return to_bf16(values[nibble] * ldexpf(1.0f, (int)scale - 127));
}

/* A group of each of `count` rows, turned into columns. blocks, scales, to: where the first row's begin. */
static void mxfp4_group(const Job *job, const uint8_t *blocks, const uint8_t *scales, uint16_t *to, size_t count)
{
    size_t rows = job->rows, groups = job->cols;
    uint8_t bytes[GROUP_BYTES][TILE] = {{0}}, exponents[TILE];
    uint16_t shifts[TILE] = {0};
    int is_normal = 1;
    for (size_t row = 0; row < count; row++) {
        for (size_t i = 0; i < GROUP_BYTES; i++)
            bytes[i][row] = blocks[row * groups * GROUP_BYTES + i];
        exponents[row] = scales[row * groups];
        is_normal &= exponents[row] >= LEAST && exponents[row] <= MOST;
        shifts[row] = (uint16_t)((exponents[row] - 127) * 128);
    }
    for (size_t i = 0; i < GROUP_BYTES; i++, to += 2 * rows) {
        uint16_t lower[TILE], upper[TILE];
        if (is_normal) {
            for (size_t row = 0; row < TILE; row++) {
                lower[row] = from_e2m1(bytes[i][row] & 15u, shifts[row]);
                upper[row] = from_e2m1(bytes[i][row] >> 4, shifts[row]);
            }
        } else {
            for (size_t row = 0; row < count; row++) {
                lower[row] = from_e2m1_slowly(bytes[i][row] & 15u, exponents[row]);
                upper[row] = from_e2m1_slowly(bytes[i][row] >> 4, exponents[row]);
            }
        }
        memcpy(to, lower, count * sizeof *lower);
        memcpy(to + rows, upper, count * sizeof *upper);
    }
}

#if defined(__AVX2__) && defined(__F16C__)
/* The bytes of a value in bf16, looked up by its magnitude in e2m1, with 8 more where the scale's exponent is odd. The upper byte
 * is half that exponent, and one, less so much: from a zero all is taken. */
static const int8_t LOWER[16] = {0, -128, 0, 64, -128, -64, 0, 64, 0, 0, -128, -64, 0, 64, -128, -64};
static const int8_t UPPER_LESS[16] = {-1, 2, 1, 1, 1, 1, 0, 0, -1, 1, 1, 1, 0, 0, 0, 0};

static inline __m256i look_up(const int8_t *table, __m256i index)
{
    return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)table)), index);
}

/* signs: the highest bits of its bytes. odd: 8 where the exponent is odd. halves: of exponents, and one. */
static inline void put_in_lanes(__m256i nibbles, __m256i signs, __m256i odd, __m256i halves, uint16_t *to)
{
    __m256i index = _mm256_or_si256(_mm256_and_si256(nibbles, _mm256_set1_epi8(7)), odd);
    __m256i lower = look_up(LOWER, index), upper = _mm256_subs_epu8(halves, look_up(UPPER_LESS, index));
    __m256i signed_upper = _mm256_or_si256(upper, _mm256_and_si256(signs, _mm256_set1_epi8(-128)));
    _mm256_storeu_si256((__m256i *)to, _mm256_unpacklo_epi8(lower, signed_upper));
    _mm256_storeu_si256((__m256i *)(to + LANES), _mm256_unpackhi_epi8(lower, signed_upper));
}

/* Four times this turns 16 rows of 16 bytes, in both lanes, into columns. */
static inline void interleave(const __m256i from[GROUP_BYTES], __m256i to[GROUP_BYTES])
{
    for (size_t i = 0; i < GROUP_BYTES / 2; i++) {
        to[2 * i] = _mm256_unpacklo_epi8(from[i], from[i + GROUP_BYTES / 2]);
        to[2 * i + 1] = _mm256_unpackhi_epi8(from[i], from[i + GROUP_BYTES / 2]);
    }
}

/* mxfp4_group of a whole tile; returns 0, with nothing done, where an exponent is too small or large. Rows lie in vectors as 0-7
 * and 16-23, then 8-15 and 24-31: so they are in order when bytes of both lanes have been interleaved. */
static int mxfp4_group_in_lanes(const Job *job, const uint8_t *blocks, const uint8_t *scales, uint16_t *to)
{
    size_t rows = job->rows, groups = job->cols, stride = groups * GROUP_BYTES;
    uint8_t of_rows[TILE];
    for (size_t row = 0; row < TILE; row++)
        of_rows[row] = scales[row * groups];
    __m256i exponents = _mm256_permute4x64_epi64(_mm256_loadu_si256((const __m256i *)of_rows), 0xd8);
    __m256i least = _mm256_set1_epi8(LEAST), range = _mm256_set1_epi8((char)(MOST - LEAST));
    __m256i beyond = _mm256_subs_epu8(_mm256_sub_epi8(exponents, least), range);
    if (!_mm256_testz_si256(beyond, beyond))
        return 0;
    __m256i columns[GROUP_BYTES], between[GROUP_BYTES];
    for (size_t i = 0; i < GROUP_BYTES; i++) {
        const uint8_t *row = blocks + (i + (i & 8)) * stride;
        columns[i] = _mm256_loadu2_m128i((const __m128i *)(row + 8 * stride), (const __m128i *)row);
    }
    for (int i = 0; i < 2; i++) {
        interleave(columns, between);
        interleave(between, columns);
    }
    __m256i one = _mm256_set1_epi8(1), odd = _mm256_slli_epi16(_mm256_and_si256(exponents, one), 3);
    __m256i halves = _mm256_add_epi8(_mm256_and_si256(_mm256_srli_epi16(exponents, 1), _mm256_set1_epi8(0x7f)), one);
    for (size_t i = 0; i < GROUP_BYTES; i++, to += 2 * rows) {
        put_in_lanes(columns[i], _mm256_slli_epi16(columns[i], 4), odd, halves, to);
        put_in_lanes(_mm256_srli_epi16(columns[i], 4), columns[i], odd, halves, to + rows);
    }
    return 1;
}
#else
#define mxfp4_group_in_lanes(job, blocks, scales, to) 0
#endif

static void make_mxfp4(const Job *job, size_t first, size_t count)
{
    size_t groups = job->cols;
    for (size_t group = 0; group < groups; group++) {
        const uint8_t *blocks = job->from + (first * groups + group) * GROUP_BYTES;
        const uint8_t *scales = (const uint8_t *)job->scales + first * groups + group;
        uint16_t *to = job->out + group * GROUP * job->rows + first;
        if (count < TILE || !mxfp4_group_in_lanes(job, blocks, scales, to))
            mxfp4_group(job, blocks, scales, to, count);
    }
}

/* blocks [rows, groups, 16], two values a byte, the lower nibble first; scales [rows, groups] -> out [groups * 32, rows]. */
EXPORT void paramstore_mxfp4(
    const uint8_t *blocks, const uint8_t *scales, uint16_t *out, size_t rows, size_t groups, unsigned threads)
{
    Job job = {make_mxfp4, blocks, scales, out, rows, groups, 1, 1, NULL};
    run(&job, threads);
}
