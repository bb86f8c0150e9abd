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

/* Sum a vector, as `sum_of`. */
INLINE float sum_of_wide(wide x) {
#if WIDE == 16
    return sum_of(x);
#else
    const four *quarters = (const four *)&x;
#if WIDE == 8
    const four rest = quarters[0] + quarters[1];
#else
    const four rest = quarters[0];
#endif
    return (rest[0] + rest[1]) + (rest[2] + rest[3]);
#endif
}

/* Replace scores by exp(score - the largest). Returns 1 / their sum. */
static inline float softmax(float *restrict scores, int64_t count) {
    float most = -INFINITY, sum = 0.0f;
#pragma omp simd reduction(max : most)
    for (int64_t t = 0; t < count; t++) most = scores[t] > most ? scores[t] : most;
#pragma omp simd reduction(+ : sum)
    for (int64_t t = 0; t < count; t++) {
        scores[t] = exponential(scores[t] - most);
        sum += scores[t];
    }
    return 1.0f / sum;
}

/* Positions `first` .. `end` - 1. */
typedef struct {
    int64_t first, end;
} Seen;

/* Consecutive rows of one sequence that are attended together, and vectors of sums that stay in registers. */
enum { TOGETHER = 8, SUMS = 8 };

/* Blocks of the sequence that any of the rows sees, with the position of each start and its index in a store. */
#define EACH_BLOCK(...)                                                                                                 \
    for (int64_t begin = seen[0].first / a->block * a->block; begin < seen[count - 1].end; begin += a->block) {         \
        const int64_t stored_at = table[begin / a->block] * a->block * a->key_heads + key_head;                         \
        for (int64_t r = 0; r < count; r++) __VA_ARGS__                                                                 \
    }

/* Positions t of a block that row `r` sees, with their index. */
#define EACH_POSITION(...)                                                                                              \
    {                                                                                                                   \
        const int64_t first_here = seen[r].first > begin ? seen[r].first : begin;                                       \
        const int64_t end_here = seen[r].end < begin + a->block ? seen[r].end : begin + a->block;                       \
        int64_t position = stored_at + (first_here - begin) * a->key_heads;                                             \
        for (int64_t t = first_here; t < end_here; t++, position += a->key_heads) __VA_ARGS__                           \
    }

/* Add VECTORS vectors of values from `from` on, times their weights. */
#define ADD_VALUES(VECTORS)                                                                                             \
    {                                                                                                                   \
        wide sums[VECTORS];                                                                                             \
        for (int p = 0; p < VECTORS; p++) sums[p] = *(const wide *)(to + WIDE * (from + p));                            \
        EACH_POSITION({                                                                                                 \
            const float weight = scores[t] * (a->value_scales ? a->value_scales[position] : 1.0f);                      \
            for (int p = 0; p < VECTORS; p++)                                                                           \
                sums[p] += weight * stored_wide(a->values, position * value_stride + WIDE * (from + p), kind);          \
        })                                                                                                              \
        for (int p = 0; p < VECTORS; p++) *(wide *)(to + WIDE * (from + p)) = sums[p];                                  \
    }

/* Partial sums of a score: more than one, so no addition waits for the one before. */
#define CHAINS (WIDE == 16 ? 1 : 2)

/* Multiply a query, as `vectors` and as q, by the key that begins at `first`: `parts` vectors and the rest. */
INLINE float score_of(const wide *vectors, const float *q, const void *keys, int64_t first, int64_t width, const int kind,
                      const int parts) {
    wide sums[2] = {{0}, {0}};
    for (int p = 0; p + CHAINS <= parts; p += CHAINS)
        for (int chain = 0; chain < CHAINS; chain++)
            sums[chain] += vectors[p + chain] * stored_wide(keys, first + WIDE * (p + chain), kind);
    if (parts % CHAINS) sums[0] += vectors[parts - 1] * stored_wide(keys, first + WIDE * (parts - 1), kind);
    if (CHAINS == 2) sums[0] += sums[1];
    float dot = sum_of_wide(sums[0]);
    for (int64_t i = WIDE * parts; i < width; i++) dot += q[i] * stored_number(keys, first + i, kind);
    return dot;
}

/* Attend one query head of `count` rows over its keys. Blocks are the outer loop, so each is read once for all rows.
   `parts` and `value_parts`: whole vectors of E and V; `fixed`: known at compile time, at most 128 numbers.
   `room`: `longest` scores of each row. */
INLINE void attend_head(const Attention *a, float *restrict room, int64_t longest, int64_t row, int64_t count,
                        int64_t head, const int kind, const int fixed, const int parts, const int value_parts) {
    const int64_t *table = a->tables + a->offsets[row];
    const int64_t key_head = head / (a->heads / a->key_heads), width = a->width;
    const int64_t value_width = a->value_width, value_stride = a->value_stride;
    const float *queries = a->q + row * a->q_row + head * width;
    float *restrict out = a->out + (row * a->heads + head) * value_width;
    const int64_t out_row = a->heads * value_width;
    Seen seen[TOGETHER] = {{0, 0}};
    for (int64_t r = 0; r < count; r++) {
        const int64_t end = a->last[row + r] + 1;
        seen[r] = (Seen){a->window && end > a->window ? end - a->window : 0, end};
        for (int64_t i = 0; i < value_width; i++) out[r * out_row + i] = 0.0f;
    }
    EACH_BLOCK({
        const float *q = queries + r * a->q_row;
        float *const scores = room + r * longest - seen[r].first;
        wide query[128 / WIDE]; /* a copy, which the compiler may hold in registers */
        for (int p = 0; fixed && p < parts; p++) query[p] = ((const wide *)q)[p];
        EACH_POSITION({
            const wide *vectors = fixed ? query : (const wide *)q;
            const float dot = score_of(vectors, q, a->keys, position * width, width, kind, parts);
            scores[t] = dot * (a->key_scales ? a->key_scales[position] * a->scale : a->scale);
        })
    })
    float shares[TOGETHER];
    for (int64_t r = 0; r < count; r++) shares[r] = softmax(room + r * longest, seen[r].end - seen[r].first);
    EACH_BLOCK({
        float *restrict to = out + r * out_row;
        const float *const scores = room + r * longest - seen[r].first;
        int from = 0;
        for (; from + SUMS <= value_parts; from += SUMS) ADD_VALUES(SUMS)
        for (; from + 4 <= value_parts; from += 4) ADD_VALUES(4)
        for (; from < value_parts; from++) ADD_VALUES(1)
        if (WIDE * value_parts < value_width)
            EACH_POSITION({
                const float weight = scores[t] * (a->value_scales ? a->value_scales[position] : 1.0f);
                for (int64_t i = WIDE * value_parts; i < value_width; i++)
                    to[i] += weight * stored_number(a->values, position * value_stride + i, kind);
            })
    })
    for (int64_t r = 0; r < count; r++)
        for (int64_t i = 0; i < value_width; i++) out[r * out_row + i] *= shares[r];
}

/* Common widths are compiled separately. */
#define ATTEND(NAME, KIND)                                                                                              \
    static void NAME(const Attention *a, float *room, int64_t longest, int64_t row, int64_t count, int64_t head) {      \
        const int parts = a->width / WIDE, value_parts = a->value_width / WIDE;                                         \
        if (a->width == 64 && a->value_width == 64)                                                                     \
            attend_head(a, room, longest, row, count, head, KIND, 1, 64 / WIDE, 64 / WIDE);                                \
        else if (a->width == 128 && a->value_width == 128)                                                              \
            attend_head(a, room, longest, row, count, head, KIND, 1, 128 / WIDE, 128 / WIDE);                              \
        else attend_head(a, room, longest, row, count, head, KIND, 0, parts, value_parts);                                 \
    }
ATTEND(attend_floats, STORED_FLOATS)
ATTEND(attend_int8, STORED_INT8)
ATTEND(attend_e4m3, STORED_E4M3)

/* Return whether a row follows the one before in the same sequence, and sees one position more. */
static inline int goes_on(const Attention *a, int64_t row) {
    return a->offsets[row] == a->offsets[row - 1] && a->last[row] == a->last[row - 1] + 1;
}

int64_t attend(const Attention *a, int64_t longest) {
    const int64_t numbers = a->rows * a->heads * longest * (a->width + a->value_width);
    const int shared_by = threads_for(numbers * (a->key_scales ? 1 : sizeof(float)));
    int64_t groups = 0, most = 1, *begins = malloc((a->rows + 1) * sizeof(int64_t));
    if (!begins) return 1;
    for (int64_t row = 0; row < a->rows; row++) {
        if (!row || row - begins[groups - 1] == TOGETHER || !goes_on(a, row)) begins[groups++] = row;
        if (row - begins[groups - 1] + 1 > most) most = row - begins[groups - 1] + 1;
    }
    begins[groups] = a->rows;
    float *room = malloc(shared_by * most * longest * sizeof(float));
    if (!room) return free(begins), 1;
#pragma omp parallel for num_threads(shared_by)
    for (int64_t number = 0; number < groups * a->heads; number++) {
        float *scores = room + this_thread() * most * longest;
        const int64_t group = number / a->heads, head = number % a->heads;
        const int64_t row = begins[group], count = begins[group + 1] - row;
        if (!a->key_scales) attend_floats(a, scores, longest, row, count, head);
        else if (a->e4m3) attend_e4m3(a, scores, longest, row, count, head);
        else attend_int8(a, scores, longest, row, count, head);
    }
    free(room);
    free(begins);
    return 0;
}
