/* Products of few rows with matrices in panels. */

#include "rows.h"

/* Return 1 if this processor has products with int8, and with codes. */
int64_t has_int8(void) {
#ifdef __AVX512VNNI__
    return 1;
#else
    return 0;
#endif
}

#if defined(__AVX2__) && WIDE >= 8
#define HAS_CODES
#endif

int64_t has_codes(void) {
#ifdef HAS_CODES
    return 1;
#else
    return 0;
#endif
}

/* Two panels are multiplied together: their 32 columns are ACROSS vectors. Sums of MOST_ROWS rows stay in registers, and so
   do VECTORS_READ vectors of the panels, so that a number of a row is read once for them. */
#define ACROSS (32 / WIDE)
#if WIDE == 16
#define MOST_ROWS 8
#define VECTORS_READ 2
#else
#define MOST_ROWS 3
#define VECTORS_READ 1
#endif
#define AHEAD 8192       /* bytes between the panel row in use and the one that is prefetched */
#define FAR_AHEAD 24576  /* the same for int8, where a byte takes least time to compute with */

/* Panel of vector P, 0 or 1, and where it begins in a row of 16. */
#define PANEL(P) ((P) * WIDE / 16)
#define START(P) ((P) * WIDE % 16)

/* Loop over pairs of panels, on as many threads as so many bytes are worth. */
#define FOR_EACH_PAIR(BYTES)                                                                                            \
    const int thread_count = threads_for(BYTES);                                                                        \
    _Pragma("omp parallel for num_threads(thread_count)") for (int64_t n = 0; n < m->columns; n += 32)

/* Call FUNCTION(..., rows) for all rows, at most MOST_ROWS at a time. Its loops over rows are unrolled for every count. */
#if MOST_ROWS == 8
#define FURTHER_COUNTS(CALL) CALL(4) CALL(5) CALL(6) CALL(7) CALL(8)
#else
#define FURTHER_COUNTS(CALL)
#endif
#define FOR_EACH_COUNT(CALL)                                                                                            \
    for (int64_t begin = 0; begin < rows; begin += MOST_ROWS)                                                           \
        switch (rows - begin < MOST_ROWS ? rows - begin : MOST_ROWS) { CALL(1) CALL(2) CALL(3) FURTHER_COUNTS(CALL) }

#ifdef __AVX512VNNI__
INLINE void int8_sums(const uint8_t *codes, const float *scales, const Panels *m, int64_t n, float *out,
                      const int rows) {
    const int64_t width = m->width;
    const int8_t *panel = (const int8_t *)m->numbers + n * width;
    const int64_t panels = n + 32 <= m->columns ? 2 : 1, panel_stride = panels == 2 ? 16 * width : 0;
    __m512i total[MOST_ROWS][2];
    for (int r = 0; r < rows; r++) total[r][0] = total[r][1] = _mm512_setzero_si512();
    for (int64_t i = 0; i < width; i += 4) {
        const int8_t *panel_row = panel + 16 * i;
        const __m512i first = _mm512_loadu_si512(panel_row), second = _mm512_loadu_si512(panel_row + panel_stride);
        __builtin_prefetch(panel_row + FAR_AHEAD), __builtin_prefetch(panel_row + panel_stride + FAR_AHEAD);
        for (int r = 0; r < rows; r++) {
            int32_t four_codes;
            memcpy(&four_codes, codes + r * width + i, 4);
            const __m512i code = _mm512_set1_epi32(four_codes);
            total[r][0] = _mm512_dpbusd_epi32(total[r][0], code, first);
            total[r][1] = _mm512_dpbusd_epi32(total[r][1], code, second);
        }
    }
    for (int r = 0; r < rows; r++)
        for (int64_t p = 0; p < panels; p++) {
            /* dpbusd takes unsigned rows, which are 128 too large: 128 times the sum of the weights is taken off. */
            const __m512i shift = _mm512_slli_epi32(_mm512_loadu_si512(m->sums + n + 16 * p), 7);
            __m512 product = _mm512_cvtepi32_ps(_mm512_sub_epi32(total[r][p], shift));
            product = _mm512_mul_ps(product, _mm512_loadu_ps((const float *)m->scales + n + 16 * p));
            product = _mm512_mul_ps(product, _mm512_set1_ps(scales[r]));
            _mm512_storeu_ps(out + r * m->columns + n + 16 * p, product);
        }
}
#endif

/* Round the rows as round_rows does and multiply whole numbers. The sums are multiplied by the scales of the matrix (N,)
   first and by those of the rows second: that is oneDNN's order, and gives its bits. */
static int64_t multiply_int8(const float *x, int64_t x_row, const Panels *m, float *out, int64_t rows) {
#ifdef __AVX512VNNI__
    const int64_t width = m->width;
    uint8_t *codes = malloc(rows * width);
    float *scales = malloc(rows * sizeof(float));
    if (codes && scales) {
        round_rows(x, x_row, codes, scales, rows, width);
#define INT8_CALL(ROWS)                                                                                                 \
    case ROWS: int8_sums(codes + begin * width, scales + begin, m, n, out + begin * m->columns, ROWS); break;
        FOR_EACH_PAIR(m->columns * width) { FOR_EACH_COUNT(INT8_CALL) }
    }
    const int64_t failed = !codes || !scales;
    free(codes);
    free(scales);
    return failed;
#else
    (void)x, (void)x_row, (void)m, (void)out, (void)rows;
    return 1;
#endif
}

/* Add input `i` of rows times VECTORS_READ vectors to the sums of vectors `p` and following. */
INLINE void add_inputs(wide total[MOST_ROWS][ACROSS], const float *x, int64_t x_row, int64_t i,
                       const wide numbers[VECTORS_READ],
                       const int p, const int rows) {
    for (int r = 0; r < rows; r++)
        for (int b = 0; b < VECTORS_READ; b++) total[r][p + b] += x[r * x_row + i] * numbers[b];
}

/* Write the sums of rows: those of both panels, or of the first where there is no second. */
INLINE void write_sums(wide total[MOST_ROWS][ACROSS], float *out, int64_t out_row, int64_t panels, const int rows) {
    for (int r = 0; r < rows; r++)
        for (int p = 0; p < ACROSS; p++)
            if (PANEL(p) < panels) *(wide *)(out + r * out_row + WIDE * p) = total[r][p];
}

INLINE void float_sums(const float *x, int64_t x_row, const Panels *m, int64_t n, float *out, const int rows) {
    const int64_t width = m->width, panels = n + 32 <= m->columns ? 2 : 1, panel_stride = panels == 2 ? 16 * width : 0;
    const float *panel = (const float *)m->numbers + n * width;
    wide total[MOST_ROWS][ACROSS];
    for (int r = 0; r < rows; r++)
        for (int p = 0; p < ACROSS; p++) total[r][p] = (wide){0};
    for (int64_t i = 0; i < width; i++) {
        const float *panel_row = panel + 16 * i;
        __builtin_prefetch((const char *)panel_row + AHEAD),
            __builtin_prefetch((const char *)(panel_row + panel_stride) + AHEAD);
        for (int p = 0; p < ACROSS; p += VECTORS_READ) {
            wide numbers[VECTORS_READ];
            for (int b = 0; b < VECTORS_READ; b++)
                numbers[b] = *(const wide *)(panel_row + PANEL(p + b) * panel_stride + START(p + b));
            add_inputs(total, x, x_row, i, numbers, p, rows);
        }
    }
    write_sums(total, out + n, m->columns, panels, rows);
}

/* A word holds two inputs in bf16. */
INLINE void bf16_sums(const float *x, int64_t x_row, const Panels *m, int64_t n, float *out, const int rows) {
    const int64_t width = m->width, panels = n + 32 <= m->columns ? 2 : 1, panel_stride = panels == 2 ? 16 * width : 0;
    const uint16_t *panel = (const uint16_t *)m->numbers + n * width;
    wide total[MOST_ROWS][ACROSS];
    for (int r = 0; r < rows; r++)
        for (int p = 0; p < ACROSS; p++) total[r][p] = (wide){0};
    for (int64_t i = 0; i < width; i += 2) {
        const uint16_t *panel_row = panel + 16 * i;
        __builtin_prefetch((const char *)panel_row + AHEAD),
            __builtin_prefetch((const char *)(panel_row + panel_stride) + AHEAD);
        for (int p = 0; p < ACROSS; p += VECTORS_READ) {
            wide first[VECTORS_READ], second[VECTORS_READ];
            for (int b = 0; b < VECTORS_READ; b++) {
                const words pair = *(const words *)(panel_row + PANEL(p + b) * panel_stride + 2 * START(p + b));
                first[b] = (wide)(pair << 16), second[b] = (wide)(pair & 0xffff0000u);
            }
            add_inputs(total, x, x_row, i, first, p, rows);
            add_inputs(total, x, x_row, i + 1, second, p, rows);
        }
    }
    write_sums(total, out + n, m->columns, panels, rows);
}

static void multiply_floats(const float *x, int64_t x_row, const Panels *m, float *out, int64_t rows) {
#define FLOAT_CALL(ROWS)                                                                                                \
    case ROWS: float_sums(x + begin * x_row, x_row, m, n, out + begin * m->columns, ROWS); break;
    FOR_EACH_PAIR(m->columns * m->width * 4) { FOR_EACH_COUNT(FLOAT_CALL) }
}

static void multiply_bf16(const float *x, int64_t x_row, const Panels *m, float *out, int64_t rows) {
#define BF16_CALL(ROWS)                                                                                                 \
    case ROWS: bf16_sums(x + begin * x_row, x_row, m, n, out + begin * m->columns, ROWS); break;
    FOR_EACH_PAIR(m->columns * m->width * 2) { FOR_EACH_COUNT(BF16_CALL) }
}

#ifdef HAS_CODES
/* A vector of bytes. */
static inline wide_integers read_bytes(const uint8_t *bytes) {
#if WIDE == 16
    return (wide_integers)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)bytes));
#else
    return (wide_integers)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)bytes));
#endif
}

/* A table of 16 numbers, in registers. */
typedef struct {
#if WIDE == 16
    __m512 all;
#else
    __m256 low, high;
#endif
} Table;

static inline Table read_table(const float *numbers) {
#if WIDE == 16
    return (Table){_mm512_loadu_ps(numbers)};
#else
    return (Table){_mm256_loadu_ps(numbers), _mm256_loadu_ps(numbers + 8)};
#endif
}

/* Look the lower four bits of codes up in the table. */
static inline wide look_up(Table table, wide_integers codes) {
#if WIDE == 16
    return (wide)_mm512_permutexvar_ps((__m512i)codes, table.all);
#else
    const __m256i code = (__m256i)codes;
    const __m256 bit_3 = _mm256_castsi256_ps(_mm256_slli_epi32(code, 28)); /* as a sign */
    const __m256 low = _mm256_permutevar8x32_ps(table.low, code), high = _mm256_permutevar8x32_ps(table.high, code);
    return (wide)_mm256_blendv_ps(low, high, bit_3);
#endif
}

/* Scales or zeros of a vector of a panel's group. */
static inline wide read_group_numbers(const Panels *m, const void *numbers, int64_t position) {
    if (!m->narrow) return *(const wide *)((const float *)numbers + position);
    const narrow_wide half = *(const narrow_wide *)((const uint16_t *)numbers + position);
    return (wide)(__builtin_convertvector(half, words) << 16);
}

static inline int64_t group_end(const Panels *m, int64_t group) {
    return (group + 1) * m->group < m->width ? (group + 1) * m->group : m->width;
}

/* Return a b + c, rounded once on x86 with FMA. Written out there: a compiler may fuse it in the code for one count of rows
   and not for another, and a row's bits would depend on the rows beside it. Elsewhere the compiler decides. */
static inline wide multiply_add(wide a, wide b, wide c) {
#if WIDE == 16
    return (wide)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
    return (wide)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
    return a * b + c;
#endif
}

/* sums (rows, groups): sums of the inputs of a group. */
INLINE void code_sums(const float *x, int64_t x_row, const float *sums, const Panels *m, int64_t n, float *out,
                      const int rows) {
    const int64_t width = m->width, groups = (width + m->group - 1) / m->group;
    const int64_t panels = n + 32 <= m->columns ? 2 : 1, panel_stride = panels == 2 ? 8 * width : 0;
    const uint8_t *panel = (const uint8_t *)m->numbers + n * width / 2;
    const Table table = read_table(m->table);
    wide scaled[MOST_ROWS][ACROSS];
    for (int r = 0; r < rows; r++)
        for (int p = 0; p < ACROSS; p++) scaled[r][p] = (wide){0};
    for (int64_t g = 0; g < groups; g++) {
        wide group_total[MOST_ROWS][ACROSS];
        for (int r = 0; r < rows; r++)
            for (int p = 0; p < ACROSS; p++) group_total[r][p] = (wide){0};
        for (int64_t i = g * m->group; i < group_end(m, g); i += 2) {
            const uint8_t *panel_row = panel + 8 * i;
            if (!(i & 7)) /* a cache line of 64 bytes */
                __builtin_prefetch(panel_row + AHEAD), __builtin_prefetch(panel_row + panel_stride + AHEAD);
            for (int p = 0; p < ACROSS; p += VECTORS_READ) {
                wide first[VECTORS_READ], second[VECTORS_READ];
                for (int b = 0; b < VECTORS_READ; b++) {
                    const wide_integers codes = read_bytes(panel_row + PANEL(p + b) * panel_stride + START(p + b));
                    first[b] = look_up(table, codes), second[b] = look_up(table, codes >> 4);
                }
                add_inputs(group_total, x, x_row, i, first, p, rows);
                add_inputs(group_total, x, x_row, i + 1, second, p, rows);
            }
        }
        for (int p = 0; p < ACROSS; p++) {
            const int64_t panel_number = n / 16 + (panels == 2 ? PANEL(p) : 0);
            const int64_t position = (panel_number * groups + g) * 16 + START(p);
            const wide scale = read_group_numbers(m, m->scales, position);
            const wide zero = m->zeros ? read_group_numbers(m, m->zeros, position) : (wide){0};
            for (int r = 0; r < rows; r++) {
                if (m->zeros) group_total[r][p] = multiply_add(-zero, (wide){0} + sums[r * groups + g],
                                                               group_total[r][p]);
                scaled[r][p] = multiply_add(scale, group_total[r][p], scaled[r][p]);
            }
        }
    }
    write_sums(scaled, out + n, m->columns, panels, rows);
}
#endif

/* Multiply by a matrix of codes. A group adds (sum of input * table[code] - zero * sum of inputs) * scale, so that a code
   costs a look into the table and one multiplication. */
static int64_t multiply_codes(const float *x, int64_t x_row, const Panels *m, float *out, int64_t rows) {
#ifdef HAS_CODES
    const int64_t width = m->width, groups = (width + m->group - 1) / m->group;
    float *sums = malloc(rows * groups * sizeof(float));
    if (!sums) return 1;
    for (int64_t row = 0; row < rows; row++)
        for (int64_t g = 0; g < groups; g++) {
            float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
            for (int64_t i = g * m->group; i < group_end(m, g); i++) sum += x[row * x_row + i];
            sums[row * groups + g] = sum;
        }
#define CODE_CALL(ROWS)                                                                                                 \
    case ROWS:                                                                                                          \
        code_sums(x + begin * x_row, x_row, sums + begin * groups, m, n, out + begin * m->columns, ROWS);               \
        break;
    FOR_EACH_PAIR(m->columns * width / 2) { FOR_EACH_COUNT(CODE_CALL) }
    free(sums);
    return 0;
#else
    (void)x, (void)x_row, (void)m, (void)out, (void)rows;
    return 1;
#endif
}

/* Write the numbers that codes stand for to out (N, D). */
void restore(const Panels *m, float *out) {
#ifdef HAS_CODES
    const int64_t width = m->width, groups = (width + m->group - 1) / m->group;
    const Table table = read_table(m->table);
#pragma omp parallel for num_threads(threads_for(m->columns * width / 2))
    for (int64_t n = 0; n < m->columns; n += 16) {
        const uint8_t *panel = (const uint8_t *)m->numbers + n * width / 2;
        float tile[16][16] __attribute__((aligned(64)));
        for (int64_t i = 0; i < width; i += 16) {
            const int64_t count = width - i < 16 ? width - i : 16;
            for (int64_t j = 0; j < count; j += 2)
                for (int64_t start = 0; start < 16; start += WIDE) {
                    const int64_t position = (n / 16 * groups + (i + j) / m->group) * 16 + start;
                    const wide scale = read_group_numbers(m, m->scales, position);
                    const wide zero = m->zeros ? read_group_numbers(m, m->zeros, position) : (wide){0};
                    const wide_integers codes = read_bytes(panel + 8 * (i + j) + start);
                    *(wide *)(tile[j] + start) = (look_up(table, codes) - zero) * scale;
                    *(wide *)(tile[j + 1] + start) = (look_up(table, codes >> 4) - zero) * scale;
                }
            for (int64_t c = 0; c < 16; c++)
                for (int64_t j = 0; j < count; j++) out[(n + c) * width + i + j] = tile[j][c];
        }
    }
#else
    (void)m, (void)out;
#endif
}

/* Write x (R, D) times a matrix, plus its bias, to out (R, N). Returns 0, or 1 where there was no memory. */
int64_t multiply(const float *x, int64_t x_row, const Panels *m, float *out, int64_t rows) {
    if (m->kind == FLOATS) multiply_floats(x, x_row, m, out, rows);
    else if (m->kind == BF16) multiply_bf16(x, x_row, m, out, rows);
    else if ((m->kind == INT8 ? multiply_int8 : multiply_codes)(x, x_row, m, out, rows)) return 1;
    for (int64_t row = 0; m->bias && row < rows; row++)
        for (int64_t i = 0; i < m->columns; i++) out[row * m->columns + i] += m->bias[i];
    return 0;
}
