/* Loops over rows that a step of serving is made of, each of which would be several operations of torch.

   No row reads another one, and sums of a row have one order: its bits depend on itself alone. Letters: R rows, D width
   of a row, H query heads, K key heads, E width of keys and V of values of a head. Strides count elements. Compiled with
   -fassociative-math, so that sums are vectors; NaN and infinity stay what they are. */

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#ifdef __AVX512F__
#include <immintrin.h>
#endif

#ifdef _OPENMP
#include <omp.h>
#define this_thread() omp_get_thread_num()
#else
#define this_thread() 0
#endif

typedef float lanes __attribute__((vector_size(64), aligned(4))); /* 16 numbers, anywhere in memory */

#define ALONE __attribute__((noinline)) /* the same instructions, so the same bits, whoever calls */

static inline float exponential(float x) {
    /* 2^n (1 + r)...: relative error below 2e-7 where the result is normal; 0 below -87. */
    x = x < -87.0f ? -87.0f : (x > 88.0f ? 88.0f : x);
    float n = rintf(x * 1.44269504088896341f);
    float r = x - n * 0.693145751953125f;
    r = r - n * 1.42860682030941723e-6f;
    float p = 1.0f + r * (1.0f + r * (0.5f + r * (0.166666671633720f + r * (0.0416666455566883f +
              r * (0.00833336170762777f + r * 0.00139316345565021f)))));
    union { int32_t i; float f; } power;
    power.i = ((int32_t)n + 127) << 23;
    return p * power.f;
}

/* x (R, D) + added (R, D), which may be missing, into total; total / rms(total) * weight (D,) into out. */
ALONE void rms_norm(const float *x, const float *added, const float *weight, float eps, float *out, float *total, int64_t rows,
              int64_t width) {
    for (int64_t row = 0; row < rows; row++) {
        const float *from = x + row * width;
        float *to = out + row * width, sum = 0.0f;
        if (added) {
            float *both = total + row * width;
            const float *more = added + row * width;
            for (int64_t i = 0; i < width; i++) both[i] = from[i] + more[i];
            from = both;
        }
        for (int64_t i = 0; i < width; i++) sum += from[i] * from[i];
        float scale = 1.0f / sqrtf(sum / (float)width + eps);
        for (int64_t i = 0; i < width; i++) to[i] = from[i] * scale * weight[i];
    }
}

/* Pairs (i, i + half) of each head of x (R, heads, 2 half) turned by cos and sin (R, half), into out (R, heads, 2 half);
   out may be x. */
ALONE void rotate(const float *x, int64_t x_row, int64_t x_head, const float *cosine, const float *sine, float *out,
            int64_t out_row, int64_t out_head, int64_t rows, int64_t heads, int64_t half) {
    for (int64_t row = 0; row < rows; row++) {
        const float *c = cosine + row * half, *s = sine + row * half;
        for (int64_t head = 0; head < heads; head++) {
            const float *from = x + row * x_row + head * x_head;
            float *to = out + row * out_row + head * out_head;
            for (int64_t i = 0; i < half; i++) {
                float first = from[i], second = from[i + half];
                to[i] = first * c[i] - second * s[i];
                to[i + half] = second * c[i] + first * s[i];
            }
        }
    }
}

/* silu(gate) * up, both (R, D) with a stride of rows, into out (R, D). */
ALONE void swiglu(const float *gate, int64_t gate_row, const float *up, int64_t up_row, float *out, int64_t rows,
            int64_t width) {
    for (int64_t row = 0; row < rows; row++) {
        const float *g = gate + row * gate_row, *u = up + row * up_row;
        float *to = out + row * width;
        for (int64_t i = 0; i < width; i++) to[i] = g[i] / (1.0f + exponential(-g[i])) * u[i];
    }
}

/* x (R, D) -> codes, each 128 more than it stands for, and the scale of each row. A row with a number that is not finite
   has a scale that is not. */
void round_rows(const float *x, int64_t x_row, uint8_t *codes, float *scales, int64_t rows, int64_t width) {
    for (int64_t row = 0; row < rows; row++) {
        const float *from = x + row * x_row;
        uint8_t *to = codes + row * width;
        union { uint32_t bits; float number; } most = {0}; /* bits of positive floats are in their order, NaN above all */
        for (int64_t i = 0; i < width; i++) {
            uint32_t bits;
            memcpy(&bits, from + i, sizeof bits);
            bits &= 0x7fffffffu;
            most.bits = bits > most.bits ? bits : most.bits;
        }
        float scale = most.number / 127.0f;
        scale = scale == 0.0f ? 1.0f : scale;
        for (int64_t i = 0; i < width; i++) {
            float code = rintf(from[i] / scale);
            code = code > 127.0f ? 127.0f : (code < -127.0f ? -127.0f : code);
            to[i] = (uint8_t)((int32_t)code + 128);
        }
        scales[row] = scale;
    }
}

/* x (R, K, E) to slots (R,) of a store (P, K, E). */
void keep_floats(const float *x, int64_t x_row, int64_t x_head, const int64_t *slots, float *store, int64_t rows,
                 int64_t heads, int64_t width) {
    for (int64_t row = 0; row < rows; row++)
        for (int64_t head = 0; head < heads; head++)
            memcpy(store + (slots[row] * heads + head) * width, x + row * x_row + head * x_head, width * sizeof(float));
}

/* x (R, K, E) -> codes and scales of K heads at slots (R,): stores (P, K, E) and (P, K). As round_rows, without the 128. */
void keep_int8(const float *x, int64_t x_row, int64_t x_head, const int64_t *slots, int8_t *codes, float *scales,
               int64_t rows, int64_t heads, int64_t width) {
    for (int64_t row = 0; row < rows; row++)
        for (int64_t head = 0; head < heads; head++) {
            const int64_t place = slots[row] * heads + head;
            uint8_t *to = (uint8_t *)codes + place * width;
            round_rows(x + row * x_row + head * x_head, 0, to, scales + place, 1, width);
            for (int64_t i = 0; i < width; i++) to[i] ^= 128;
        }
}

/* Whether int8_linear is there. */
int64_t has_int8_linear(void) {
#ifdef __AVX512VNNI__
    return 1;
#else
    return 0;
#endif
}

/* Products of R rows with a matrix (N, D) in panels: `panels` is (N / 16, D / 4, 16, 4) of int8, (N / 16, D, 16) of
   floats. A lane of a vector is a column, so that no vector is summed up; AT_ONCE rows share what is read of a panel. */
#define AT_ONCE 8
#define AHEAD 8192 /* bytes of a panel that are asked of memory before they are read */

/* Threads that share panels, or heads, where there is more to read than LEAST bytes: to begin and to meet again costs
   them some microseconds. Who computes a sum changes nothing of its order. */
#define LEAST (1 << 17)
static int threads = 1;

void use_threads(int64_t count) { threads = (int)count; }

static inline int threads_for(int64_t bytes) { return bytes < LEAST ? 1 : threads; }

#ifdef __AVX512VNNI__
#define INT8_PANELS(ROWS)                                                                                               \
    case ROWS: {                                                                                                        \
        __m512i total[ROWS][2];                                                                                         \
        for (int r = 0; r < ROWS; r++) total[r][0] = total[r][1] = _mm512_setzero_si512();                              \
        for (int64_t i = 0; i < width; i += 4) {                                                                        \
            __m512i first = _mm512_loadu_si512(from + 16 * i), second = _mm512_loadu_si512(from + apart + 16 * i);      \
            __builtin_prefetch(from + 16 * i + AHEAD), __builtin_prefetch(from + apart + 16 * i + AHEAD);               \
            for (int r = 0; r < ROWS; r++) {                                                                            \
                int32_t four;                                                                                           \
                memcpy(&four, codes + (begin + r) * width + i, 4);                                                      \
                __m512i code = _mm512_set1_epi32(four);                                                                 \
                total[r][0] = _mm512_dpbusd_epi32(total[r][0], code, first);                                            \
                total[r][1] = _mm512_dpbusd_epi32(total[r][1], code, second);                                           \
            }                                                                                                           \
        }                                                                                                               \
        for (int r = 0; r < ROWS; r++)                                                                                  \
            for (int64_t g = 0; g < (n + 32 <= columns ? 2 : 1); g++) {                                                 \
                __m512i shift = _mm512_slli_epi32(_mm512_loadu_si512(sums + n + 16 * g), 7);                            \
                __m512 found = _mm512_cvtepi32_ps(_mm512_sub_epi32(total[r][g], shift));                                \
                found = _mm512_mul_ps(found, _mm512_loadu_ps(matrix_scales + n + 16 * g));                              \
                __asm__("" : "+v"(found)); /* the order of these two is oneDNN's */                                     \
                found = _mm512_mul_ps(found, _mm512_set1_ps(scales[begin + r]));                                        \
                _mm512_storeu_ps(out + (begin + r) * columns + n + 16 * g, found);                                      \
            }                                                                                                           \
    } break;
#endif

/* x (R, D) rounded as by round_rows, times int8 panels, whose columns sum to `sums`; times scales of the matrix (N,), then
   those of the rows, into out (R, N). D is a multiple of 4, N of 16. Returns 0, or 1 where there was no memory. */
ALONE int64_t int8_linear(const float *x, int64_t x_row, const int8_t *panels, const int32_t *sums, const float *matrix_scales,
                    float *out, int64_t rows, int64_t columns, int64_t width) {
#ifdef __AVX512VNNI__
    uint8_t *codes = malloc(rows * width);
    float *scales = malloc(rows * sizeof(float));
    if (codes && scales) {
        round_rows(x, x_row, codes, scales, rows, width);
#pragma omp parallel for num_threads(threads_for(columns * width))
        for (int64_t n = 0; n < columns; n += 32) {
            const int8_t *from = panels + n * width;
            const int64_t apart = n + 32 <= columns ? 16 * width : 0;
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
    (void)x, (void)x_row, (void)panels, (void)sums, (void)matrix_scales, (void)out, (void)rows, (void)columns, (void)width;
    return 1;
#endif
}

#define PANELS(ROWS)                                                                                                    \
    case ROWS: {                                                                                                        \
        lanes total[ROWS][2];                                                                                           \
        for (int r = 0; r < ROWS; r++) total[r][0] = total[r][1] = (lanes){0};                                          \
        for (int64_t i = 0; i < width; i++) {                                                                           \
            lanes first = *(const lanes *)(from + 16 * i), second = *(const lanes *)(from + apart + 16 * i);            \
            for (int r = 0; r < ROWS; r++) {                                                                            \
                float number = x[(begin + r) * x_row + i];                                                              \
                total[r][0] += number * first;                                                                          \
                total[r][1] += number * second;                                                                         \
            }                                                                                                           \
        }                                                                                                               \
        for (int r = 0; r < ROWS; r++) {                                                                                \
            *(lanes *)(out + (begin + r) * columns + n) = total[r][0];                                                  \
            if (apart) *(lanes *)(out + (begin + r) * columns + n + 16) = total[r][1];                                  \
        }                                                                                                               \
    } break;

/* x (R, D) times panels of floats, into out (R, N). N is a multiple of 16. A sum has one order, whatever R is. */
ALONE void linear(const float *x, int64_t x_row, const float *panels, float *out, int64_t rows, int64_t columns,
            int64_t width) {
#pragma omp parallel for num_threads(threads_for(columns * width * sizeof(float)))
    for (int64_t n = 0; n < columns; n += 32) {
        const float *from = panels + n * width;
        const int64_t apart = n + 32 <= columns ? 16 * width : 0;
        for (int64_t begin = 0; begin < rows; begin += AT_ONCE)
            switch (rows - begin < AT_ONCE ? rows - begin : AT_ONCE) {
                PANELS(1) PANELS(2) PANELS(3) PANELS(4) PANELS(5) PANELS(6) PANELS(7) PANELS(8)
            }
    }
}

/* Attention of rows, each over the positions `first` .. `last` of its own sequence.

   q (R, H, E); keys and values: stores of positions (P, K, E) and (P, K, V), in fp32 or as codes with a scale for each
   position and head (P, K); a position of the sequence lies at tables[offset + position / block] * block + position %
   block. window: positions that are seen, 0 = all. Into out (R, H, V). `e4m3`: codes are of this kind, and else whole
   numbers. Returns 0, or 1 where there was no memory. */
typedef struct {
    const float *q;
    int64_t q_row;
    const void *keys, *values;
    const float *key_scales, *value_scales;
    const int64_t *tables, *offsets, *last;
    float *out;
    int64_t rows, heads, key_heads, width, value_width, value_stride, block, window, e4m3;
    float scale;
} Attention;

typedef float eight __attribute__((vector_size(32), aligned(4), may_alias));
typedef float four __attribute__((vector_size(16), aligned(4), may_alias));
typedef int32_t whole_lanes __attribute__((vector_size(64)));
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
    for (int64_t t = 0; t < count; t++) most = scores[t] > most ? scores[t] : most;
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

/* A matrix (N, D) as int8_linear reads it, or as linear where there are no `sums`; with a bias (N,), or none. */
typedef struct {
    const void *panels;
    const int32_t *sums;
    const float *scales, *bias;
    int64_t columns, width;
} Panels;

static int64_t times(const float *x, int64_t x_row, const Panels *m, float *out, int64_t rows) {
    if (!m->sums) linear(x, x_row, m->panels, out, rows, m->columns, m->width);
    else if (int8_linear(x, x_row, m->panels, m->sums, m->scales, out, rows, m->columns, m->width)) return 1;
    if (m->bias)
        for (int64_t row = 0; row < rows; row++)
            for (int64_t i = 0; i < m->columns; i++) out[row * m->columns + i] += m->bias[i];
    return 0;
}

/* What a block computes with: x + attention(norm(x)), then x + down(silu(gate) * up) of its norm. Queries, keys and
   values are one product, as are gate and up. `attention`: stores and sizes. q_norm and k_norm (E,) may be missing. */
typedef struct {
    Attention attention;
    Panels qkv, o, gate_up, down;
    const float *norm, *q_norm, *k_norm, *mlp_norm;
    float eps, qk_eps, mlp_eps;
} Block;

/* The rows of a step: cosine and sine (R, E / 2), slots (R,) where keys and values are kept, and as in Attention. */
typedef struct {
    const float *cosine, *sine;
    const int64_t *slots, *tables, *offsets, *last;
    int64_t rows, longest;
} Step;

/* x (R, D) through a block into out (R, D). Returns 0, or 1 where there was no memory. */
int64_t block(const Block *b, const Step *s, const float *x, float *out) {
    Attention a = b->attention;
    const int64_t rows = s->rows, hidden = b->qkv.width, read = b->qkv.columns, ffn = b->down.width;
    const int64_t width = a.width, queries = a.heads * width, keys = a.key_heads * width;
    float *room = malloc(rows * (3 * hidden + read + queries + 3 * ffn) * sizeof(float));
    if (!room) return 1;
    float *normed = room, *found = normed + rows * hidden, *total = found + rows * hidden, *q = total + rows * hidden;
    float *attended = q + rows * read, *gate = attended + rows * queries, *gated = gate + rows * 2 * ffn;
    float *k = q + queries, *v = k + keys;

    rms_norm(x, NULL, b->norm, b->eps, normed, NULL, rows, hidden);
    int64_t failed = times(normed, hidden, &b->qkv, q, rows);
    for (int64_t row = 0; b->q_norm && row < rows; row++) {
        rms_norm(q + row * read, NULL, b->q_norm, b->qk_eps, q + row * read, NULL, a.heads, width);
        rms_norm(k + row * read, NULL, b->k_norm, b->qk_eps, k + row * read, NULL, a.key_heads, width);
    }
    rotate(q, read, width, s->cosine, s->sine, q, read, width, rows, a.heads + a.key_heads, width / 2);
    if (a.key_scales) {
        keep_int8(k, read, width, s->slots, (int8_t *)a.keys, (float *)a.key_scales, rows, a.key_heads, width);
        keep_int8(v, read, width, s->slots, (int8_t *)a.values, (float *)a.value_scales, rows, a.key_heads, width);
    } else {
        keep_floats(k, read, width, s->slots, (float *)a.keys, rows, a.key_heads, width);
        keep_floats(v, read, width, s->slots, (float *)a.values, rows, a.key_heads, width);
    }
    a.q = q, a.q_row = read, a.out = attended, a.rows = rows;
    a.tables = s->tables, a.offsets = s->offsets, a.last = s->last;
    failed = failed || attend(&a, s->longest) || times(attended, queries, &b->o, found, rows);
    rms_norm(x, found, b->mlp_norm, b->mlp_eps, normed, total, rows, hidden);
    failed = failed || times(normed, hidden, &b->gate_up, gate, rows);
    swiglu(gate, 2 * ffn, gate + ffn, 2 * ffn, gated, rows, ffn);
    failed = failed || times(gated, ffn, &b->down, found, rows);
    for (int64_t i = 0; i < rows * hidden; i++) out[i] = total[i] + found[i];
    free(room);
    return failed;
}
