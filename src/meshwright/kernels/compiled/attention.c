/* Attention of rows over blocks of keys and values. */

#include "rows.h"

typedef float eight __attribute__((vector_size(32), aligned(4), may_alias));
typedef float four __attribute__((vector_size(16), aligned(4), may_alias));
typedef int8_t small_lanes __attribute__((vector_size(16), aligned(1)));

/* The sum of 16 numbers, in one order. */
static inline float sum_of(lanes x) {
    const eight *halves = (const eight *)&x;
    eight half = halves[0] + halves[1];
    const four *quarters = (const four *)&half;
    four rest = quarters[0] + quarters[1];
    return (rest[0] + rest[1]) + (rest[2] + rest[3]);
}

/* Compilers make 16 single steps of __builtin_convertvector from 8 bits. */
static inline whole_lanes signed_lanes(const int8_t *codes) {
#ifdef __AVX512F__
    return (whole_lanes)_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)codes));
#else
    return __builtin_convertvector(*(const small_lanes *)codes, whole_lanes);
#endif
}

static inline lanes int8_lanes(const int8_t *codes) {
    return __builtin_convertvector(signed_lanes(codes), lanes);
}

/* Sign, four bits of exponent with a bias of 7, three of mantissa. What is no number has a scale that is none. */
static inline lanes e4m3_lanes(const uint8_t *codes) {
    whole_lanes code = signed_lanes((const int8_t *)codes), size = code & 127, small = size < 8;
    whole_lanes normal = (size << 20) + (120 << 23);
    lanes subnormal = __builtin_convertvector(size, lanes) * 0x1p-9f;
    whole_lanes found = (small & (whole_lanes)subnormal) | (~small & normal);
    return (lanes)(found | (code & (int32_t)0x80000000u));
}

static inline float e4m3_number(uint8_t code) {
    int size = code & 127;
    float found = size < 8 ? (float)size * 0x1p-9f : ldexpf((float)(8 + (size & 7)), (size >> 3) - 10);
    return code & 128 ? -found : found;
}

/* exp(score - the largest) of each, and 1 / their sum. */
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

/* All positions t, in runs of a block, of which the first one's place in the store is known. */
#define EACH_POSITION(...)                                                                                              \
    for (int64_t t = first; t < end;) {                                                                                 \
        const int64_t whole = (t / block + 1) * block, until = whole < end ? whole : end;                               \
        int64_t place = (table[t / block] * block + t % block) * a->key_heads + own;                                    \
        for (; t < until; t++, place += a->key_heads) __VA_ARGS__                                                       \
    }

/* One query head over its keys. E and V are 16 PARTS, or anything where PARTS is 0. */
#define ATTEND(NAME, TYPE, LOAD, NUMBER)                                                                                \
    static inline __attribute__((always_inline)) void NAME##_head(const Attention *a, float *restrict scores,           \
                                                                  int64_t row, int64_t head, const int parts) {         \
        const int64_t block = a->block, *table = a->tables + a->offsets[row], end = a->last[row] + 1;                   \
        const int64_t first = a->window && end > a->window ? end - a->window : 0;                                       \
        const int64_t own = head / (a->heads / a->key_heads), width = parts ? parts * 16 : a->width;                    \
        const int64_t wide = a->value_width, value_stride = parts ? width : a->value_stride;                            \
        const float *q = a->q + row * a->q_row + head * width;                                                          \
        float *restrict to = a->out + (row * a->heads + head) * wide;                                                   \
        lanes query[8], total[8];                                                                                       \
        for (int p = 0; p < parts; p++) query[p] = *(const lanes *)(q + 16 * p), total[p] = (lanes){0};                 \
        EACH_POSITION({                                                                                                 \
            const TYPE *code = (const TYPE *)a->keys + place * width;                                                   \
            float dot = 0.0f;                                                                                           \
            if (parts) {                                                                                                \
                lanes all = query[0] * LOAD(code);                                                                      \
                for (int p = 1; p < parts; p++) all += query[p] * LOAD(code + 16 * p);                                  \
                dot = sum_of(all);                                                                                      \
            } else                                                                                                      \
                _Pragma("omp simd reduction(+ : dot)")                                                                  \
                for (int64_t i = 0; i < width; i++) dot += q[i] * NUMBER(code[i]);                                      \
            scores[t - first] = dot * (a->key_scales ? a->key_scales[place] * a->scale : a->scale);                     \
        })                                                                                                              \
        const float share = softmax(scores, end - first);                                                               \
        if (!parts)                                                                                                     \
            for (int64_t i = 0; i < wide; i++) to[i] = 0.0f;                                                            \
        EACH_POSITION({                                                                                                 \
            const TYPE *code = (const TYPE *)a->values + place * value_stride;                                          \
            const float weight = scores[t - first] * (a->value_scales ? a->value_scales[place] : 1.0f);                 \
            for (int p = 0; p < parts; p++) total[p] += weight * LOAD(code + 16 * p);                                   \
            if (!parts)                                                                                                 \
                for (int64_t i = 0; i < wide; i++) to[i] += weight * NUMBER(code[i]);                                   \
        })                                                                                                              \
        for (int p = 0; p < parts; p++) *(lanes *)(to + 16 * p) = total[p] * share;                                     \
        if (!parts)                                                                                                     \
            for (int64_t i = 0; i < wide; i++) to[i] *= share;                                                          \
    }                                                                                                                   \
    static void NAME(const Attention *a, float *scores, int64_t row, int64_t head) {                                    \
        const int64_t alike = a->width == a->value_width && a->width == a->value_stride ? a->width : 0;                 \
        if (alike == 64) NAME##_head(a, scores, row, head, 4);                                                          \
        else if (alike == 128) NAME##_head(a, scores, row, head, 8);                                                    \
        else if (alike == 32) NAME##_head(a, scores, row, head, 2);                                                     \
        else NAME##_head(a, scores, row, head, 0);                                                                      \
    }

#define SAME(x) (x)
#define WHOLE(x) ((float)(x))
#define SAME_LANES(x) (*(const lanes *)(x))
ATTEND(attend_floats, float, SAME_LANES, SAME)
ATTEND(attend_int8, int8_t, int8_lanes, WHOLE)
ATTEND(attend_e4m3, uint8_t, e4m3_lanes, e4m3_number)

int64_t attend(const Attention *a, int64_t longest) {
    const int64_t each = a->width + a->value_width, heads = a->rows * a->heads;
    const int used = threads_for(heads * longest * each * (a->key_scales ? 1 : sizeof(float)));
    float *room = malloc(used * longest * sizeof(float));
    if (!room) return 1;
#pragma omp parallel for num_threads(used)
    for (int64_t number = 0; number < heads; number++) {
        float *scores = room + this_thread() * longest;
        const int64_t row = number / a->heads, head = number % a->heads;
        if (!a->key_scales) attend_floats(a, scores, row, head);
        else if (a->e4m3) attend_e4m3(a, scores, row, head);
        else attend_int8(a, scores, row, head);
    }
    free(room);
    return 0;
}
