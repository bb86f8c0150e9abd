/* Attention of rows over blocks of keys and values. */

#include "rows.h"

typedef int8_t small_lanes __attribute__((vector_size(16), aligned(1)));

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

/* The positions t that a row sees of each block of its sequence, row after row, so that a block is read once for all. */
#define EACH_BLOCK(...)                                                                                                 \
    for (int64_t begin = seen[0].first / block * block; begin < seen[count - 1].end; begin += block) {                  \
        const int64_t start = table[begin / block] * block * a->key_heads + own;                                        \
        for (int64_t r = 0; r < count; r++) {                                                                           \
            const int64_t first = seen[r].first, from = first > begin ? first : begin;                                  \
            const int64_t end = seen[r].end < begin + block ? seen[r].end : begin + block;                              \
            float *const scores = room + r * longest - first;                                                           \
            __VA_ARGS__                                                                                                 \
        }                                                                                                               \
    }
#define EACH_POSITION(...)                                                                                              \
    for (int64_t t = from, place = start + (from - begin) * a->key_heads; t < end; t++, place += a->key_heads)          \
        __VA_ARGS__

/* Positions `first` .. `end` - 1. */
typedef struct {
    int64_t first, end;
} Seen;

/* Rows of one sequence that are attended together, one behind the other. */
enum { TOGETHER = 8 };

/* One query head of `count` rows over its keys. E and V are 16 PARTS, or anything where PARTS is 0. `room`: for
   `longest` scores of each row. */
#define ATTEND(NAME, TYPE, LOAD, NUMBER)                                                                                \
    static inline __attribute__((always_inline)) void NAME##_head(const Attention *a, float *restrict room,             \
                                                                  int64_t longest, int64_t row, int64_t count,          \
                                                                  int64_t head, const int parts) {                      \
        const int64_t block = a->block, *table = a->tables + a->offsets[row];                                           \
        const int64_t own = head / (a->heads / a->key_heads), width = parts ? parts * 16 : a->width;                    \
        const int64_t wide = a->value_width, value_stride = parts ? width : a->value_stride;                            \
        const float *queries = a->q + row * a->q_row + head * width;                                                    \
        float *restrict out = a->out + (row * a->heads + head) * wide, shares[TOGETHER];                                \
        lanes totals[TOGETHER][8];                                                                                      \
        Seen seen[TOGETHER];                                                                                            \
        for (int64_t r = 0; r < count; r++) {                                                                           \
            const int64_t end = a->last[row + r] + 1;                                                                   \
            seen[r] = (Seen){a->window && end > a->window ? end - a->window : 0, end};                                  \
            for (int p = 0; p < parts; p++) totals[r][p] = (lanes){0};                                                  \
        }                                                                                                               \
        EACH_BLOCK({                                                                                                    \
            const float *q = queries + r * a->q_row;                                                                    \
            lanes query[8];                                                                                             \
            for (int p = 0; p < parts; p++) query[p] = *(const lanes *)(q + 16 * p);                                    \
            EACH_POSITION({                                                                                             \
                const TYPE *code = (const TYPE *)a->keys + place * width;                                               \
                float dot = 0.0f;                                                                                       \
                if (parts) {                                                                                            \
                    lanes all = query[0] * LOAD(code);                                                                  \
                    for (int p = 1; p < parts; p++) all += query[p] * LOAD(code + 16 * p);                              \
                    dot = sum_of(all);                                                                                  \
                } else                                                                                                  \
                    _Pragma("omp simd reduction(+ : dot)")                                                              \
                    for (int64_t i = 0; i < width; i++) dot += q[i] * NUMBER(code[i]);                                  \
                scores[t] = dot * (a->key_scales ? a->key_scales[place] * a->scale : a->scale);                         \
            })                                                                                                          \
        })                                                                                                              \
        for (int64_t r = 0; r < count; r++) {                                                                           \
            shares[r] = softmax(room + r * longest, seen[r].end - seen[r].first);                                       \
            for (int64_t i = 0; !parts && i < wide; i++) out[r * a->heads * wide + i] = 0.0f;                           \
        }                                                                                                               \
        EACH_BLOCK({                                                                                                    \
            float *restrict to = out + r * a->heads * wide;                                                             \
            lanes total[8];                                                                                             \
            for (int p = 0; p < parts; p++) total[p] = totals[r][p];                                                    \
            EACH_POSITION({                                                                                             \
                const TYPE *code = (const TYPE *)a->values + place * value_stride;                                      \
                const float weight = scores[t] * (a->value_scales ? a->value_scales[place] : 1.0f);                     \
                for (int p = 0; p < parts; p++) total[p] += weight * LOAD(code + 16 * p);                               \
                if (!parts)                                                                                             \
                    for (int64_t i = 0; i < wide; i++) to[i] += weight * NUMBER(code[i]);                               \
            })                                                                                                          \
            for (int p = 0; p < parts; p++) totals[r][p] = total[p];                                                    \
        })                                                                                                              \
        for (int64_t r = 0; r < count; r++) {                                                                           \
            float *restrict to = out + r * a->heads * wide;                                                             \
            for (int p = 0; p < parts; p++) *(lanes *)(to + 16 * p) = totals[r][p] * shares[r];                         \
            for (int64_t i = 0; !parts && i < wide; i++) to[i] *= shares[r];                                            \
        }                                                                                                               \
    }                                                                                                                   \
    static void NAME(const Attention *a, float *room, int64_t longest, int64_t row, int64_t count, int64_t head) {      \
        const int64_t alike = a->width == a->value_width && a->width == a->value_stride ? a->width : 0;                 \
        if (alike == 64) NAME##_head(a, room, longest, row, count, head, 4);                                            \
        else if (alike == 128) NAME##_head(a, room, longest, row, count, head, 8);                                      \
        else if (alike == 32) NAME##_head(a, room, longest, row, count, head, 2);                                       \
        else NAME##_head(a, room, longest, row, count, head, 0);                                                        \
    }

#define SAME(x) (x)
#define WHOLE(x) ((float)(x))
#define SAME_LANES(x) (*(const lanes *)(x))
ATTEND(attend_floats, float, SAME_LANES, SAME)
ATTEND(attend_int8, int8_t, int8_lanes, WHOLE)
ATTEND(attend_e4m3, uint8_t, e4m3_lanes, e4m3_number)

/* Whether a row is of the same sequence as the one before, and sees one position more. */
static inline int goes_on(const Attention *a, int64_t row) {
    return a->offsets[row] == a->offsets[row - 1] && a->last[row] == a->last[row - 1] + 1;
}

int64_t attend(const Attention *a, int64_t longest) {
    const int64_t each = a->width + a->value_width, all = a->rows * a->heads;
    const int used = threads_for(all * longest * each * (a->key_scales ? 1 : sizeof(float)));
    int64_t groups = 0, most = 1, *begins = malloc((a->rows + 1) * sizeof(int64_t));
    if (!begins) return 1;
    for (int64_t row = 0; row < a->rows; row++) {
        if (!row || row - begins[groups - 1] == TOGETHER || !goes_on(a, row)) begins[groups++] = row;
        if (row - begins[groups - 1] + 1 > most) most = row - begins[groups - 1] + 1;
    }
    begins[groups] = a->rows;
    float *room = malloc(used * most * longest * sizeof(float));
    if (!room) return free(begins), 1;
#pragma omp parallel for num_threads(used)
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
