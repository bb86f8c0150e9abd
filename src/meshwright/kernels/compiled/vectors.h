/* Vectors of 16 numbers in fp32, read from memory and written to it in fp32 or, where that is narrow, bf16. */

#include "rows.h"

typedef uint16_t half_lanes __attribute__((vector_size(32), aligned(2), may_alias));
typedef uint32_t bit_lanes __attribute__((vector_size(64), may_alias));

static inline lanes read_lanes(const void *from, int64_t i, int64_t narrow) {
    if (!narrow) return *(const lanes *)((const float *)from + i);
    return (lanes)(__builtin_convertvector(*(const half_lanes *)((const uint16_t *)from + i), bit_lanes) << 16);
}

/* To the nearest, ties to even; what is no number stays none. */
static inline void write_lanes(lanes found, void *to, int64_t i, int64_t narrow) {
    if (!narrow) {
        *(lanes *)((float *)to + i) = found;
        return;
    }
    const bit_lanes bits = (bit_lanes)found, none = (bit_lanes)(found != found);
    const bit_lanes rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    *(half_lanes *)((uint16_t *)to + i) = __builtin_convertvector((rounded & ~none) | (0x7fc0 & none), half_lanes);
}

static inline lanes either(whole_lanes which, lanes a, lanes b) {
    return (lanes)((which & (whole_lanes)a) | (~which & (whole_lanes)b));
}

/* a > b ? a : b, and a < b ? a : b: b where one is no number. */
#ifdef __AVX512F__
static inline lanes larger(lanes a, lanes b) { return (lanes)_mm512_max_ps((__m512)a, (__m512)b); }
static inline lanes smaller(lanes a, lanes b) { return (lanes)_mm512_min_ps((__m512)a, (__m512)b); }
#else
static inline lanes larger(lanes a, lanes b) { return either(a > b, a, b); }
static inline lanes smaller(lanes a, lanes b) { return either(a < b, a, b); }
#endif

/* As `exponential`. */
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

#ifdef __clang__
#define SHUFFLED(A, B, ...) __builtin_shufflevector(A, B, __VA_ARGS__)
#else
#define SHUFFLED(A, B, ...) __builtin_shuffle(A, B, (whole_lanes){__VA_ARGS__})
#endif

/* (rows, columns), both multiples of 16, -> (columns, rows): 16 by 16, by exchanging halves of halves. */
static __attribute__((noinline, unused)) void transpose(const float *from, int64_t from_row, int64_t rows, int64_t columns, float *to,
                             int64_t to_row) {
    for (int64_t r = 0; r < rows; r += 16)
        for (int64_t c = 0; c < columns; c += 16) {
            lanes x[16], y[16];
            for (int i = 0; i < 16; i++) x[i] = *(const lanes *)(from + (r + i) * from_row + c);
#define EXCHANGE(A, B, STEP)                                                                                            \
    for (int i = 0; i < 16; i++)                                                                                        \
        if (!(i & STEP)) {                                                                                              \
            B[i] = SHUFFLED(A[i], A[i + STEP], LOW_##STEP);                                                             \
            B[i + STEP] = SHUFFLED(A[i], A[i + STEP], HIGH_##STEP);                                                     \
        }
#define LOW_8 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23
#define HIGH_8 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31
#define LOW_4 0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27
#define HIGH_4 4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31
#define LOW_2 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29
#define HIGH_2 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31
#define LOW_1 0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30
#define HIGH_1 1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31
            EXCHANGE(x, y, 8)
            EXCHANGE(y, x, 4)
            EXCHANGE(x, y, 2)
            EXCHANGE(y, x, 1)
            for (int i = 0; i < 16; i++) *(lanes *)(to + (c + i) * to_row + r) = x[i];
        }
}
