/* Products of few rows with matrices in panels. */

#include "rows.h"

/* Whether there are products with int8 and with codes. */
int64_t has_int8(void) {
#ifdef __AVX512VNNI__
    return 1;
#else
    return 0;
#endif
}

#if defined(__AVX512F__) || defined(__AVX2__)
#define HAS_CODES
#endif

int64_t has_codes(void) {
#ifdef HAS_CODES
    return 1;
#else
    return 0;
#endif
}

#define AT_ONCE 8
#define AHEAD 8192       /* bytes of a panel that are asked of memory before they are read */
#define FAR_AHEAD 24576  /* the same of int8, of which fewest are computed with at a time */

/* Pairs of panels, shared by the threads for so many bytes. */
#define EACH_PAIR(BYTES)                                                                                                \
    const int used = threads_for(BYTES);                                                                                \
    _Pragma("omp parallel for num_threads(used)") for (int64_t n = 0; n < m->columns; n += 32)

#ifdef __AVX512VNNI__
#define INT8_PANELS(ROWS)                                                                                               \
    case ROWS: {                                                                                                        \
        __m512i total[ROWS][2];                                                                                         \
        for (int r = 0; r < ROWS; r++) total[r][0] = total[r][1] = _mm512_setzero_si512();                              \
        for (int64_t i = 0; i < width; i += 4) {                                                                        \
            __m512i first = _mm512_loadu_si512(from + 16 * i), second = _mm512_loadu_si512(from + apart + 16 * i);      \
            __builtin_prefetch(from + 16 * i + FAR_AHEAD), __builtin_prefetch(from + apart + 16 * i + FAR_AHEAD);       \
            for (int r = 0; r < ROWS; r++) {                                                                            \
                int32_t four;                                                                                           \
                memcpy(&four, codes + (begin + r) * width + i, 4);                                                      \
                __m512i code = _mm512_set1_epi32(four);                                                                 \
                total[r][0] = _mm512_dpbusd_epi32(total[r][0], code, first);                                            \
                total[r][1] = _mm512_dpbusd_epi32(total[r][1], code, second);                                           \
            }                                                                                                           \
        }                                                                                                               \
        for (int r = 0; r < ROWS; r++)                                                                                  \
            for (int64_t g = 0; g < (n + 32 <= m->columns ? 2 : 1); g++) {                                              \
                __m512i shift = _mm512_slli_epi32(_mm512_loadu_si512(m->sums + n + 16 * g), 7);                         \
                __m512 found = _mm512_cvtepi32_ps(_mm512_sub_epi32(total[r][g], shift));                                \
                found = _mm512_mul_ps(found, _mm512_loadu_ps((const float *)m->scales + n + 16 * g));                                  \
                found = _mm512_mul_ps(found, _mm512_set1_ps(scales[begin + r]));                                        \
                _mm512_storeu_ps(out + (begin + r) * m->columns + n + 16 * g, found);                                   \
            }                                                                                                           \
    } break;
#endif

/* Rows are rounded as by round_rows; sums of whole numbers, times scales of the matrix (N,), then those of the rows, which
   is oneDNN's order. */
static int64_t times_int8(const float *x, int64_t x_row, const Panels *m, float *out, int64_t rows) {
#ifdef __AVX512VNNI__
    const int64_t width = m->width;
    uint8_t *codes = malloc(rows * width);
    float *scales = malloc(rows * sizeof(float));
    if (codes && scales) {
        round_rows(x, x_row, codes, scales, rows, width);
        EACH_PAIR(m->columns * width) {
            const int8_t *from = (const int8_t *)m->numbers + n * width;
            const int64_t apart = n + 32 <= m->columns ? 16 * width : 0;
            for (int64_t begin = 0; begin < rows; begin += AT_ONCE)
                switch (rows - begin < AT_ONCE ? rows - begin : AT_ONCE) {
                    INT8_PANELS(1) INT8_PANELS(2) INT8_PANELS(3) INT8_PANELS(4)
                    INT8_PANELS(5) INT8_PANELS(6) INT8_PANELS(7) INT8_PANELS(8)
                }
        }
    }
    int64_t failed = !codes || !scales;
    free(codes);
    free(scales);
    return failed;
#else
    (void)x, (void)x_row, (void)m, (void)out, (void)rows;
    return 1;
#endif
}

/* An input of two panels, for so many rows. */
#define ADD(ROWS, INPUT, FIRST, SECOND)                                                                                 \
    for (int r = 0; r < ROWS; r++) {                                                                                    \
        const float number = x[(begin + r) * x_row + INPUT];                                                            \
        total[r][0] += number * FIRST;                                                                                  \
        total[r][1] += number * SECOND;                                                                                 \
    }

typedef uint32_t pairs __attribute__((vector_size(64), aligned(4), may_alias)); /* two numbers in bf16 a lane */

#define FLOATS_ADDED(ROWS)                                                                                              \
    for (int64_t i = 0; i < width; i++) {                                                                               \
        const float *next = (const float *)from + 16 * i;                                                               \
        const lanes first = *(const lanes *)next, second = *(const lanes *)(next + apart);                              \
        __builtin_prefetch((const char *)next + AHEAD), __builtin_prefetch((const char *)(next + apart) + AHEAD);       \
        ADD(ROWS, i, first, second)                                                                                     \
    }

#define BF16_ADDED(ROWS)                                                                                                \
    for (int64_t i = 0; i < width; i += 2) {                                                                            \
        const uint16_t *next = (const uint16_t *)from + 16 * i;                                                         \
        const pairs first = *(const pairs *)next, second = *(const pairs *)(next + apart);                              \
        __builtin_prefetch((const char *)next + AHEAD), __builtin_prefetch((const char *)(next + apart) + AHEAD);       \
        ADD(ROWS, i, (lanes)(first << 16), (lanes)(second << 16))                                                       \
        ADD(ROWS, i + 1, (lanes)(first & 0xffff0000u), (lanes)(second & 0xffff0000u))                                   \
    }

#define NUMBER_PANELS(ROWS, ADDED)                                                                                      \
    case ROWS: {                                                                                                        \
        lanes total[ROWS][2];                                                                                           \
        for (int r = 0; r < ROWS; r++) total[r][0] = total[r][1] = (lanes){0};                                          \
        ADDED(ROWS)                                                                                                     \
        for (int r = 0; r < ROWS; r++) {                                                                                \
            *(lanes *)(out + (begin + r) * m->columns + n) = total[r][0];                                               \
            if (apart) *(lanes *)(out + (begin + r) * m->columns + n + 16) = total[r][1];                               \
        }                                                                                                               \
    } break;

#define TIMES_NUMBERS(NAME, TYPE, ADDED)                                                                                \
    static void NAME(const float *x, int64_t x_row, const Panels *m, float *out, int64_t rows) {                        \
        const int64_t width = m->width;                                                                                 \
        EACH_PAIR(m->columns * width * sizeof(TYPE)) {                                                                  \
            const TYPE *from = (const TYPE *)m->numbers + n * width;                                                    \
            const int64_t apart = n + 32 <= m->columns ? 16 * width : 0;                                                \
            for (int64_t begin = 0; begin < rows; begin += AT_ONCE)                                                     \
                switch (rows - begin < AT_ONCE ? rows - begin : AT_ONCE) {                                              \
                    NUMBER_PANELS(1, ADDED) NUMBER_PANELS(2, ADDED) NUMBER_PANELS(3, ADDED) NUMBER_PANELS(4, ADDED)     \
                    NUMBER_PANELS(5, ADDED) NUMBER_PANELS(6, ADDED) NUMBER_PANELS(7, ADDED) NUMBER_PANELS(8, ADDED)     \
                }                                                                                                       \
        }                                                                                                               \
    }
TIMES_NUMBERS(times_floats, float, FLOATS_ADDED)
TIMES_NUMBERS(times_bf16, uint16_t, BF16_ADDED)

#ifdef HAS_CODES
/* 16 bytes. */
static inline whole_lanes bytes_of(const uint8_t *from) {
    const __m128i bytes = _mm_loadu_si128((const __m128i *)from);
#ifdef __AVX512F__
    return (whole_lanes)_mm512_cvtepu8_epi32(bytes);
#else
    union { __m256i halves[2]; whole_lanes all; } found;
    found.halves[0] = _mm256_cvtepu8_epi32(bytes);
    found.halves[1] = _mm256_cvtepu8_epi32(_mm_srli_si128(bytes, 8));
    return found.all;
#endif
}

/* What the lower four bits of each stand for. */
static inline lanes looked_up(const lanes *table, whole_lanes codes) {
#ifdef __AVX512F__
    return (lanes)_mm512_permutexvar_ps((__m512i)codes, (__m512)*table);
#else
    union { __m256i halves[2]; whole_lanes all; } given = {.all = codes};
    union { __m256 halves[2]; lanes all; } found;
    const __m256 low = _mm256_loadu_ps((const float *)table), high = _mm256_loadu_ps((const float *)table + 8);
    for (int h = 0; h < 2; h++) {
        const __m256i code = given.halves[h];
        const __m256 fourth = _mm256_castsi256_ps(_mm256_slli_epi32(code, 28)); /* bit 3, as a sign */
        const __m256 one = _mm256_permutevar8x32_ps(low, code), other = _mm256_permutevar8x32_ps(high, code);
        found.halves[h] = _mm256_blendv_ps(one, other, fourth);
    }
    return found.all;
#endif
}

#define CODES_ADDED(ROWS, FROM, UNTIL)                                                                                  \
    for (int64_t i = FROM; i < UNTIL; i += 2) {                                                                         \
        const uint8_t *next = from + 8 * i;                                                                             \
        const whole_lanes first = bytes_of(next), second = bytes_of(next + apart);                                      \
        if (!(i & 7)) __builtin_prefetch(next + AHEAD), __builtin_prefetch(next + apart + AHEAD); /* 64 bytes */        \
        const lanes one = looked_up(table, first), two = looked_up(table, first >> 4);                                  \
        const lanes three = looked_up(table, second), four = looked_up(table, second >> 4);                             \
        ADD(ROWS, i, one, three)                                                                                        \
        ADD(ROWS, i + 1, two, four)                                                                                     \
    }

#define CODE_PANELS(ROWS)                                                                                               \
    case ROWS: {                                                                                                        \
        lanes found[ROWS][2];                                                                                           \
        for (int r = 0; r < ROWS; r++) found[r][0] = found[r][1] = (lanes){0};                                          \
        for (int64_t g = 0; g < groups; g++) {                                                                          \
            lanes total[ROWS][2];                                                                                       \
            for (int r = 0; r < ROWS; r++) total[r][0] = total[r][1] = (lanes){0};                                      \
            CODES_ADDED(ROWS, g * m->group, end_of(m, g))                                                               \
            for (int p = 0; p < (apart ? 2 : 1); p++) {                                                                 \
                const int64_t place = ((n / 16 + p) * groups + g) * 16;                                                 \
                const lanes scale = of_group(m, m->scales, place);                                                      \
                const lanes zero = m->zeros ? of_group(m, m->zeros, place) : (lanes){0};                                \
                for (int r = 0; r < ROWS; r++) {                                                                        \
                    if (m->zeros) total[r][p] -= zero * sums[(begin + r) * groups + g];                                 \
                    found[r][p] += scale * total[r][p];                                                                 \
                }                                                                                                       \
            }                                                                                                           \
        }                                                                                                               \
        for (int r = 0; r < ROWS; r++) {                                                                                \
            *(lanes *)(out + (begin + r) * m->columns + n) = found[r][0];                                               \
            if (apart) *(lanes *)(out + (begin + r) * m->columns + n + 16) = found[r][1];                               \
        }                                                                                                               \
    } break;

typedef uint16_t half_lanes __attribute__((vector_size(32), aligned(2), may_alias));
typedef uint32_t wide_lanes __attribute__((vector_size(64)));

/* 16 scales or zeros of a panel's group. */
static inline lanes of_group(const Panels *m, const void *numbers, int64_t place) {
    if (!m->narrow) return *(const lanes *)((const float *)numbers + place);
    const half_lanes half = *(const half_lanes *)((const uint16_t *)numbers + place);
    return (lanes)(__builtin_convertvector(half, wide_lanes) << 16);
}

static inline int64_t end_of(const Panels *m, int64_t group) {
    return (group + 1) * m->group < m->width ? (group + 1) * m->group : m->width;
}
#endif

/* Of each group the sum of inputs times numbers of the codes, less the zero times the sum of inputs, all times the scale;
   so a code costs a look into the table and one multiplication. */
static int64_t times_codes(const float *x, int64_t x_row, const Panels *m, float *out, int64_t rows) {
#ifdef HAS_CODES
    const int64_t width = m->width, groups = (width + m->group - 1) / m->group;
    const lanes *table = (const lanes *)m->table;
    float *sums = malloc(rows * groups * sizeof(float));
    if (!sums) return 1;
    for (int64_t row = 0; row < rows; row++)
        for (int64_t g = 0; g < groups; g++) {
            float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
            for (int64_t i = g * m->group; i < end_of(m, g); i++) sum += x[row * x_row + i];
            sums[row * groups + g] = sum;
        }
    EACH_PAIR(m->columns * width / 2) {
        const uint8_t *from = (const uint8_t *)m->numbers + n * width / 2;
        const int64_t apart = n + 32 <= m->columns ? 8 * width : 0;
        for (int64_t begin = 0; begin < rows; begin += AT_ONCE)
            switch (rows - begin < AT_ONCE ? rows - begin : AT_ONCE) {
                CODE_PANELS(1) CODE_PANELS(2) CODE_PANELS(3) CODE_PANELS(4)
                CODE_PANELS(5) CODE_PANELS(6) CODE_PANELS(7) CODE_PANELS(8)
            }
    }
    free(sums);
    return 0;
#else
    (void)x, (void)x_row, (void)m, (void)out, (void)rows;
    return 1;
#endif
}

/* What codes stand for, into out (N, D). */
void restore(const Panels *m, float *out) {
#ifdef HAS_CODES
    const int64_t width = m->width, groups = (width + m->group - 1) / m->group;
    const lanes *table = (const lanes *)m->table;
#pragma omp parallel for num_threads(threads_for(m->columns * width / 2))
    for (int64_t n = 0; n < m->columns; n += 16) {
        const uint8_t *from = (const uint8_t *)m->numbers + n * width / 2;
        float tile[16][16] __attribute__((aligned(64)));
        for (int64_t i = 0; i < width; i += 16) {
            const int64_t some = width - i < 16 ? width - i : 16;
            for (int64_t j = 0; j < some; j += 2) {
                const int64_t place = (n / 16 * groups + (i + j) / m->group) * 16;
                const lanes scale = of_group(m, m->scales, place);
                const lanes zero = m->zeros ? of_group(m, m->zeros, place) : (lanes){0};
                const whole_lanes codes = bytes_of(from + 8 * (i + j));
                *(lanes *)tile[j] = (looked_up(table, codes) - zero) * scale;
                *(lanes *)tile[j + 1] = (looked_up(table, codes >> 4) - zero) * scale;
            }
            for (int64_t c = 0; c < 16; c++)
                for (int64_t j = 0; j < some; j++) out[(n + c) * width + i + j] = tile[j][c];
        }
    }
#else
    (void)m, (void)out;
#endif
}

/* x (R, D) times a matrix, plus its bias, into out (R, N). Returns 0, or 1 where there was no memory. */
int64_t multiply(const float *x, int64_t x_row, const Panels *m, float *out, int64_t rows) {
    if (m->kind == FLOATS) times_floats(x, x_row, m, out, rows);
    else if (m->kind == BF16) times_bf16(x, x_row, m, out, rows);
    else if ((m->kind == INT8 ? times_int8 : times_codes)(x, x_row, m, out, rows)) return 1;
    for (int64_t row = 0; m->bias && row < rows; row++)
        for (int64_t i = 0; i < m->columns; i++) out[row * m->columns + i] += m->bias[i];
    return 0;
}
