/* AdamW over elements of fields: gradients in, fp32 states in place, parameters out, in one pass over memory.
 *
 * The arithmetic is that of ATen's FusedAdamKernel (aten/src/ATen/native/cpu/FusedAdamKernel.cpp) on fp32, as its AVX2 and
 * AVX-512 builds come out of the compiler: the lerp of exp_avg is one fused multiply-add, and so is the sum of exp_avg_sq. Which
 * operations are fused is written out with fmaf, and -ffp-contract=off keeps the compiler from fusing others. Casts, sums and
 * scaling of 16-bit gradients are those of ATen too: in fp32, rounded to nearest even after each.
 *
 * Elements are taken in blocks that stay in the first-level cache, however many steps are made on them; loops over a block are
 * plain, for the compiler to vectorise. A gradient is read once: another process may write to it meanwhile. */
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#ifdef __AVX__
#include <immintrin.h>
#endif

#define BLOCK 1024
#define EXPORT __attribute__((visibility("default")))

enum { FLOAT32, BFLOAT16, FLOAT16 };

typedef struct {
    float decay;            /* 1 - lr * weight_decay */
    float has_decay;        /* 0 or 1 */
    float weight;           /* of the gradient in exp_avg, for fma(weight, gradient - exp_avg, base) */
    float starts_at_moment; /* whether base is exp_avg; else it is the gradient */
    float beta2;
    float square_weight;    /* 1 - beta2 */
    float correction;       /* sqrt(1 - beta2 ** step) */
    float eps;
    float rate;             /* -lr / (1 - beta1 ** step) */
} adamw_step;

typedef struct {
    float *master, *exp_avg, *exp_avg_sq;
    const char *const *gradients; /* one for each rank */
    size_t ranks;
    char *param;                  /* may be NULL */
    size_t count;                 /* elements, a multiple of 16 */
    int gradient_dtype, param_dtype;
} adamw_span;

static inline float bfloat16_to_float(uint16_t bits)
{
    uint32_t wide = (uint32_t)bits << 16;
    float value;
    memcpy(&value, &wide, sizeof value);
    return value;
}

static inline uint16_t float_to_bfloat16(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    return (uint16_t)((bits & 0x7fffffffu) > 0x7f800000u ? 0xffffu : rounded);
}

/* --- 16-bit values to fp32 and back, a block at a time */

static void widen_bfloat16(float *restrict target, const uint16_t *restrict source, size_t count)
{
    for (size_t i = 0; i < count; i++)
        target[i] = bfloat16_to_float(source[i]);
}

static void narrow_bfloat16(uint16_t *restrict target, const float *restrict source, size_t count)
{
    for (size_t i = 0; i < count; i++)
        target[i] = float_to_bfloat16(source[i]);
}

#ifdef __F16C__
static void widen_float16(float *restrict target, const uint16_t *restrict source, size_t count)
{
    for (size_t i = 0; i < count; i += 8)
        _mm256_storeu_ps(target + i, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(source + i))));
}

static void narrow_float16(uint16_t *restrict target, const float *restrict source, size_t count)
{
    for (size_t i = 0; i < count; i += 8)
        _mm_storeu_si128((__m128i *)(target + i), _mm256_cvtps_ph(_mm256_loadu_ps(source + i), _MM_FROUND_TO_NEAREST_INT));
}
#else
static void widen_float16(float *restrict target, const uint16_t *restrict source, size_t count) {}
static void narrow_float16(uint16_t *restrict target, const float *restrict source, size_t count) {}
#endif

static void widen(float *restrict target, const void *restrict source, int dtype, size_t count)
{
    if (dtype == FLOAT32)
        memcpy(target, source, count * sizeof(float));
    else if (dtype == BFLOAT16)
        widen_bfloat16(target, source, count);
    else
        widen_float16(target, source, count);
}

static void narrow(void *restrict target, const float *restrict source, int dtype, size_t count)
{
    if (dtype == FLOAT32)
        memcpy(target, source, count * sizeof(float));
    else if (dtype == BFLOAT16)
        narrow_bfloat16(target, source, count);
    else
        narrow_float16(target, source, count);
}

/* --- gradients */

static void round_to(float *restrict values, int dtype, size_t count)
{
    uint16_t narrowed[BLOCK];
    if (dtype == FLOAT32)
        return;
    narrow(narrowed, values, dtype, count);
    widen(values, narrowed, dtype, count);
}

static void gather(
    float *restrict sum, const char *const *gradients, size_t ranks, int dtype, size_t start, size_t count, float scale)
{
    size_t width = dtype == FLOAT32 ? 4 : 2;
    float other[BLOCK];
    widen(sum, gradients[0] + start * width, dtype, count);
    for (size_t rank = 1; rank < ranks; rank++) {
        widen(other, gradients[rank] + start * width, dtype, count);
        for (size_t i = 0; i < count; i++)
            sum[i] += other[i];
        round_to(sum, dtype, count);
    }
    if (scale != 1.0f) {
        for (size_t i = 0; i < count; i++)
            sum[i] *= scale;
        round_to(sum, dtype, count);
    }
}

/* --- the update */

static inline __attribute__((always_inline)) void update_block(
    float *restrict master, float *restrict exp_avg, float *restrict exp_avg_sq, const float *restrict gradient, size_t count,
    adamw_step step, int has_decay, int starts_at_moment)
{
    for (size_t i = 0; i < count; i++) {
        float value = gradient[i], moment = exp_avg[i];
        float decayed = has_decay ? master[i] * step.decay : master[i];
        moment = fmaf(step.weight, value - moment, starts_at_moment ? moment : value);
        float square = fmaf(step.square_weight * value, value, exp_avg_sq[i] * step.beta2);
        float denominator = sqrtf(square) / step.correction + step.eps;
        exp_avg[i] = moment;
        exp_avg_sq[i] = square;
        master[i] = decayed + step.rate * moment / denominator;
    }
}

static void update(
    float *restrict master, float *restrict exp_avg, float *restrict exp_avg_sq, const float *restrict gradient, size_t count,
    const adamw_step *step)
{
    if (step->has_decay != 0.0f && step->starts_at_moment != 0.0f)
        update_block(master, exp_avg, exp_avg_sq, gradient, count, *step, 1, 1);
    else if (step->has_decay != 0.0f)
        update_block(master, exp_avg, exp_avg_sq, gradient, count, *step, 1, 0);
    else if (step->starts_at_moment != 0.0f)
        update_block(master, exp_avg, exp_avg_sq, gradient, count, *step, 0, 1);
    else
        update_block(master, exp_avg, exp_avg_sq, gradient, count, *step, 0, 0);
}

/* Leaves out the cache where it can: a parameter is not read again soon, and the line it lies in need not be read first. */
static void store(char *restrict target, const char *restrict source, size_t length)
{
    size_t done = 0;
#ifdef __AVX__
    if (((uintptr_t)target & 31) == 0)
        for (; done + 32 <= length; done += 32)
            _mm256_stream_si256((__m256i *)(target + done), _mm256_loadu_si256((const __m256i *)(source + done)));
#endif
    memcpy(target + done, source + done, length - done);
}

/* 1 if this build serves the dtype, 0 if not: without the instructions for them, fmaf and casts are slower than ATen. */
EXPORT int paramstore_adamw_serves(int dtype)
{
#if !defined(__FMA__) && !defined(__FP_FAST_FMAF)
    return 0;
#elif defined(__F16C__)
    return dtype >= FLOAT32 && dtype <= FLOAT16;
#else
    return dtype == FLOAT32 || dtype == BFLOAT16;
#endif
}

static void update_span(const adamw_span *span, float scale, const adamw_step *steps, size_t step_count)
{
    static const float zeros[BLOCK];
    float gradient[BLOCK] __attribute__((aligned(64)));
    uint16_t narrowed[BLOCK] __attribute__((aligned(64)));
    size_t width = span->param_dtype == FLOAT32 ? 4 : 2;
    for (size_t start = 0; start < span->count; start += BLOCK) {
        size_t length = span->count - start < BLOCK ? span->count - start : BLOCK;
        float *master = span->master + start;
        for (size_t step = 0; step < step_count; step++) {
            int is_missed = span->ranks == 0 || step + 1 < step_count;
            if (!is_missed)
                gather(gradient, span->gradients, span->ranks, span->gradient_dtype, start, length, scale);
            update(master, span->exp_avg + start, span->exp_avg_sq + start, is_missed ? zeros : gradient, length, steps + step);
        }
        if (span->param == NULL)
            continue;
        const char *made = (const char *)master;
        if (span->param_dtype != FLOAT32) {
            narrow(narrowed, master, span->param_dtype, length);
            made = (const char *)narrowed;
        }
        store(span->param + start * width, made, length * width);
    }
}

/* Makes `steps` on each span, in order: the last one with the sum of its gradients unless it has none, all others with a gradient
 * of zeros. */
EXPORT void paramstore_adamw(
    const adamw_span *spans, size_t span_count, float scale, const adamw_step *steps, size_t step_count)
{
    for (size_t place = 0; place < span_count; place++)
        update_span(spans + place, scale, steps, step_count);
#ifdef __AVX__
    _mm_sfence();
#endif
}
