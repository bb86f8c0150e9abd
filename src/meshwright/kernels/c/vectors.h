/* Vectors of 16 numbers in fp32, read from memory and written to it in fp32 or, where that is narrow, bf16. */

#include "rows.h"

typedef uint16_t half_lanes __attribute__((vector_size(32), aligned(2), may_alias));
typedef uint32_t bit_lanes __attribute__((vector_size(64), may_alias));

static inline lanes read_lanes(const void *from, int64_t i, int64_t narrow) {
    if (!narrow) return *(const lanes *)((const float *)from + i);
    return (lanes)(__builtin_convertvector(*(const half_lanes *)((const uint16_t *)from + i), bit_lanes) << 16);
}

/* Round to the nearest, ties to even. NaN stays NaN. */
static inline void write_lanes(lanes numbers, void *to, int64_t i, int64_t narrow) {
    if (!narrow) {
        *(lanes *)((float *)to + i) = numbers;
        return;
    }
    const bit_lanes bits = (bit_lanes)numbers, nan = (bit_lanes)(numbers != numbers);
    const bit_lanes rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    *(half_lanes *)((uint16_t *)to + i) = __builtin_convertvector((rounded & ~nan) | (0x7fc0 & nan), half_lanes);
}

static inline lanes select_lanes(whole_lanes mask, lanes a, lanes b) {
    return (lanes)((mask & (whole_lanes)a) | (~mask & (whole_lanes)b));
}

/* a > b ? a : b, and a < b ? a : b. Both give b where one is NaN. */
#ifdef __AVX512F__
static inline lanes larger(lanes a, lanes b) { return (lanes)_mm512_max_ps((__m512)a, (__m512)b); }
static inline lanes smaller(lanes a, lanes b) { return (lanes)_mm512_min_ps((__m512)a, (__m512)b); }
#else
static inline lanes larger(lanes a, lanes b) { return select_lanes(a > b, a, b); }
static inline lanes smaller(lanes a, lanes b) { return select_lanes(a < b, a, b); }
#endif

/* `exponential` of each lane. */
static inline lanes exponentials(lanes x) {
    const lanes least = (lanes){0} - 87.0f;
    x = smaller(-least, larger(least, x));
    const float half = 12582912.0f;
    const lanes n = (x * 1.44269504088896341f + half) - half;
    lanes r = x - n * 0.693145751953125f;
    r = r - n * 1.42860682030941723e-6f;
    lanes p = 1.0f + r * (1.0f + r * (0.5f + r * (0.166666671633720f + r * (0.0416666455566883f +
              r * (0.00833336170762777f + r * 0.00139316345565021f)))));
#ifdef __AVX512F__
    return (lanes)_mm512_scalef_ps((__m512)p, (__m512)n);
#else
    return p * (lanes)((__builtin_convertvector(n, whole_lanes) + 127) << 23);
#endif
}
