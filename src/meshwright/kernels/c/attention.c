/* Attention of rows over blocks of keys and values. */

#include "rows.h"

typedef int8_t small_integers __attribute__((vector_size(WIDE), aligned(1)));

/* Formats of stored keys and values. */
enum { STORED_FLOATS, STORED_INT8, STORED_E4M3 };

/* Compilers turn __builtin_convertvector from 8 bits into single steps. */
INLINE wide_integers signed_integers(const int8_t *codes) {
#if WIDE == 16
    return (wide_integers)_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)codes));
#elif defined(__AVX2__) && WIDE == 8
    return (wide_integers)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)codes));
#else
    return __builtin_convertvector(*(const small_integers *)codes, wide_integers);
#endif
}

/* Sign, four bits of exponent with a bias of 7, three of mantissa. NaN is in the scale, not in the code. */
INLINE wide e4m3_numbers(const int8_t *codes) {
    const wide_integers code = signed_integers(codes), size = code & 127, is_small = size < 8;
    const wide_integers normal = (size << 20) + (120 << 23);
    const wide subnormal = __builtin_convertvector(size, wide) * 0x1p-9f;
    const wide_integers magnitude = (is_small & (wide_integers)subnormal) | (~is_small & normal);
    return (wide)(magnitude | (code & (int32_t)0x80000000u));
}

INLINE float e4m3_number(uint8_t code) {
    const int size = code & 127;
    const float magnitude = size < 8 ? (float)size * 0x1p-9f : ldexpf((float)(8 + (size & 7)), (size >> 3) - 10);
    return code & 128 ? -magnitude : magnitude;
}

/* Read a vector of numbers of a store from `i` on, or a single one. */
INLINE wide stored_wide(const void *store, int64_t i, const int kind) {
    if (kind == STORED_FLOATS) return *(const wide *)((const float *)store + i);
    const int8_t *codes = (const int8_t *)store + i;
    return kind == STORED_INT8 ? __builtin_convertvector(signed_integers(codes), wide) : e4m3_numbers(codes);
}

INLINE float stored_number(const void *store, int64_t i, const int kind) {
    if (kind == STORED_FLOATS) return ((const float *)store)[i];
    return kind == STORED_INT8 ? (float)((const int8_t *)store)[i] : e4m3_number(((const uint8_t *)store)[i]);
}

/* Sum a vector, as `sum_lanes`. */
INLINE float sum_wide(wide x) {
#if WIDE == 16
    return sum_lanes(x);
#else
    const four *quarters = (const four *)&x;
#if WIDE == 8
    const four four_sums = quarters[0] + quarters[1];
#else
    const four four_sums = quarters[0];
#endif
    return (four_sums[0] + four_sums[1]) + (four_sums[2] + four_sums[3]);
#endif
}

/* Replace scores by exp(score - the largest). Returns 1 / their sum. */
static inline float softmax(float *restrict scores, int64_t count) {
    float peak = -INFINITY, sum = 0.0f;
#pragma omp simd reduction(max : peak)
    for (int64_t t = 0; t < count; t++) peak = scores[t] > peak ? scores[t] : peak;
#pragma omp simd reduction(+ : sum)
    for (int64_t t = 0; t < count; t++) {
        scores[t] = exponential(scores[t] - peak);
        sum += scores[t];
    }
    return 1.0f / sum;
}

/* Positions that a row sees: `first` .. `end` - 1. */
typedef struct {
    int64_t first, end;
} Visible;

/* Most rows of one sequence that are attended together, and vectors of sums that stay in registers. */
enum { MOST_ROWS = 8, SUM_VECTORS = 8 };

/* Loop over the blocks of the sequence that any of the rows sees. `stored_at`: index of a block's start in a store. */
#define FOR_EACH_BLOCK(...)                                                                                             \
    for (int64_t block_begin = visible[0].first / a->block * a->block; block_begin < visible[count - 1].end;                \
         block_begin += a->block) {                                                                                      \
        const int64_t stored_at = table[block_begin / a->block] * a->block * a->key_heads + key_head;                   \
        for (int64_t r = 0; r < count; r++) __VA_ARGS__                                                                 \
    }

/* Loop over the positions t of a block that row `r` sees, with their index in the store. */
#define FOR_EACH_POSITION(...)                                                                                          \
    {                                                                                                                   \
        const int64_t block_first = visible[r].first > block_begin ? visible[r].first : block_begin;                    \
        const int64_t block_end = visible[r].end < block_begin + a->block ? visible[r].end : block_begin + a->block;    \
        int64_t position = stored_at + (block_first - block_begin) * a->key_heads;                                      \
        for (int64_t t = block_first; t < block_end; t++, position += a->key_heads) __VA_ARGS__                         \
    }

/* Add VECTORS vectors of values from `from` on, times their weights. */
#define ADD_VALUES(VECTORS)                                                                                             \
    {                                                                                                                   \
        wide sums[VECTORS];                                                                                             \
        for (int p = 0; p < VECTORS; p++) sums[p] = *(const wide *)(row_out + WIDE * (vector + p));                     \
        FOR_EACH_POSITION({                                                                                             \
            const float weight = scores[t] * (a->value_scales ? a->value_scales[position] : 1.0f);                      \
            for (int p = 0; p < VECTORS; p++)                                                                           \
                sums[p] += weight * stored_wide(a->values, position * value_stride + WIDE * (vector + p), kind);        \
        })                                                                                                              \
        for (int p = 0; p < VECTORS; p++) *(wide *)(row_out + WIDE * (vector + p)) = sums[p];                           \
    }

/* Partial sums of a score: more than one, so no addition waits for the one before. */
#define CHAINS (WIDE == 16 ? 1 : 2)

/* Multiply a query, as `vectors` and as q, by the key that begins at `first`: `parts` vectors and the rest. */
INLINE float score_of(const wide *vectors, const float *q, const void *keys, int64_t first, int64_t width,
                      const int kind,
                      const int parts) {
    wide sums[2] = {{0}, {0}};
    for (int p = 0; p + CHAINS <= parts; p += CHAINS)
        for (int chain = 0; chain < CHAINS; chain++)
            sums[chain] += vectors[p + chain] * stored_wide(keys, first + WIDE * (p + chain), kind);
    if (parts % CHAINS) sums[0] += vectors[parts - 1] * stored_wide(keys, first + WIDE * (parts - 1), kind);
    if (CHAINS == 2) sums[0] += sums[1];
    float dot = sum_wide(sums[0]);
    for (int64_t i = WIDE * parts; i < width; i++) dot += q[i] * stored_number(keys, first + i, kind);
    return dot;
}

/* Attend one query head of `count` rows over its keys. Blocks are the outer loop, so each is read once for all rows.
   `parts` and `value_parts`: whole vectors of E and V; `fixed`: known at compile time, at most 128 numbers.
   `scratch`: `longest` scores of each row. */
INLINE void attend_head(const Attention *a, float *restrict scratch, int64_t longest, int64_t row, int64_t count,
                        int64_t head, const int kind, const int is_fixed, const int parts, const int value_parts) {
    const int64_t *table = a->tables + a->offsets[row];
    const int64_t key_head = head / (a->heads / a->key_heads), width = a->width;
    const int64_t value_width = a->value_width, value_stride = a->value_stride;
    const float *queries = a->q + row * a->q_row + head * width;
    float *restrict out = a->out + (row * a->heads + head) * value_width;
    const int64_t out_row = a->heads * value_width;
    Visible visible[MOST_ROWS] = {{0, 0}};
    for (int64_t r = 0; r < count; r++) {
        const int64_t end = a->last[row + r] + 1;
        visible[r] = (Visible){a->window && end > a->window ? end - a->window : 0, end};
        for (int64_t i = 0; i < value_width; i++) out[r * out_row + i] = 0.0f;
    }
    FOR_EACH_BLOCK({
        const float *row_query = queries + r * a->q_row;
        float *const scores = scratch + r * longest - visible[r].first;
        wide query[128 / WIDE]; /* a copy, which the compiler may hold in registers */
        for (int p = 0; is_fixed && p < parts; p++) query[p] = ((const wide *)row_query)[p];
        FOR_EACH_POSITION({
            const wide *vectors = is_fixed ? query : (const wide *)row_query;
            const float dot = score_of(vectors, row_query, a->keys, position * width, width, kind, parts);
            scores[t] = dot * (a->key_scales ? a->key_scales[position] * a->scale : a->scale);
        })
    })
    float inverse_sums[MOST_ROWS];
    for (int64_t r = 0; r < count; r++) inverse_sums[r] = softmax(scratch + r * longest,
                                                                  visible[r].end - visible[r].first);
    FOR_EACH_BLOCK({
        float *restrict row_out = out + r * out_row;
        const float *const scores = scratch + r * longest - visible[r].first;
        int vector = 0;
        for (; vector + SUM_VECTORS <= value_parts; vector += SUM_VECTORS) ADD_VALUES(SUM_VECTORS)
        for (; vector + 4 <= value_parts; vector += 4) ADD_VALUES(4)
        for (; vector < value_parts; vector++) ADD_VALUES(1)
        if (WIDE * value_parts < value_width)
            FOR_EACH_POSITION({
                const float weight = scores[t] * (a->value_scales ? a->value_scales[position] : 1.0f);
                for (int64_t i = WIDE * value_parts; i < value_width; i++)
                    row_out[i] += weight * stored_number(a->values, position * value_stride + i, kind);
            })
    })
    /* The sums divide the result, not each weight: value_width products in place of one a position. */
    for (int64_t r = 0; r < count; r++)
        for (int64_t i = 0; i < value_width; i++) out[r * out_row + i] *= inverse_sums[r];
}

/* Common widths are compiled separately. */
#define ATTEND(NAME, KIND)                                                                                              \
    static void NAME(const Attention *a, float *scratch, int64_t longest, int64_t row, int64_t count, int64_t head) {   \
        const int parts = a->width / WIDE, value_parts = a->value_width / WIDE;                                         \
        if (a->width == 64 && a->value_width == 64)                                                                     \
            attend_head(a, scratch, longest, row, count, head, KIND, 1, 64 / WIDE, 64 / WIDE);                          \
        else if (a->width == 128 && a->value_width == 128)                                                              \
            attend_head(a, scratch, longest, row, count, head, KIND, 1, 128 / WIDE, 128 / WIDE);                        \
        else attend_head(a, scratch, longest, row, count, head, KIND, 0, parts, value_parts);                           \
    }
ATTEND(attend_floats, STORED_FLOATS)
ATTEND(attend_int8, STORED_INT8)
ATTEND(attend_e4m3, STORED_E4M3)

/* Return 1 if a row follows the one before in the same sequence, and sees one position more. */
static inline int continues_previous(const Attention *a, int64_t row) {
    return a->offsets[row] == a->offsets[row - 1] && a->last[row] == a->last[row - 1] + 1;
}

int64_t attend(const Attention *a, int64_t longest) {
    const int64_t products = a->rows * a->heads * longest * (a->width + a->value_width);
    const int thread_count = threads_for(products * (a->key_scales ? 1 : sizeof(float)));
    int64_t groups = 0, largest_group = 1, *begins = malloc((a->rows + 1) * sizeof(int64_t));
    if (!begins) return 1;
    for (int64_t row = 0; row < a->rows; row++) {
        if (!row || row - begins[groups - 1] == MOST_ROWS || !continues_previous(a, row)) begins[groups++] = row;
        if (row - begins[groups - 1] + 1 > largest_group) largest_group = row - begins[groups - 1] + 1;
    }
    begins[groups] = a->rows;
    float *scratch = malloc(thread_count * largest_group * longest * sizeof(float));
    if (!scratch) return free(begins), 1;
#pragma omp parallel for num_threads(thread_count)
    for (int64_t task = 0; task < groups * a->heads; task++) {
        float *scores = scratch + thread_number() * largest_group * longest;
        const int64_t group = task / a->heads, head = task % a->heads;
        const int64_t row = begins[group], count = begins[group + 1] - row;
        if (!a->key_scales) attend_floats(a, scores, longest, row, count, head);
        else if (a->e4m3) attend_e4m3(a, scores, longest, row, count, head);
        else attend_int8(a, scores, longest, row, count, head);
    }
    free(scratch);
    free(begins);
    return 0;
}
