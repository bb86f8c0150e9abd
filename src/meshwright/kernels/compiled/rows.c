/* Loops over rows that a step of serving is made of, each of which would be several operations of torch.

   No row reads another one, and sums of a row have one order: its bits depend on itself alone. Letters: R rows, D width
   of a row, H query heads, K key heads, E width of keys and V of values of a head. Strides count elements. Compiled with
   -fassociative-math, so that sums are vectors; NaN and infinity stay what they are. */

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#ifdef __AVX512VNNI__
#include <immintrin.h>
#endif

typedef float lanes __attribute__((vector_size(64), aligned(4))); /* 16 numbers, anywhere in memory */

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
void rms_norm(const float *x, const float *added, const float *weight, float eps, float *out, float *total, int64_t rows,
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
void rotate(const float *x, int64_t x_row, int64_t x_head, const float *cosine, const float *sine, float *out,
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
void swiglu(const float *gate, int64_t gate_row, const float *up, int64_t up_row, float *out, int64_t rows,
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

#ifdef __AVX512VNNI__
/* Sums of the numbers of each of four vectors. */
static inline __m128i sums_of_four(__m512i a, __m512i b, __m512i c, __m512i d) {
    __m512i ab = _mm512_add_epi32(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
    __m512i cd = _mm512_add_epi32(_mm512_unpacklo_epi32(c, d), _mm512_unpackhi_epi32(c, d));
    __m512i all = _mm512_add_epi32(_mm512_unpacklo_epi64(ab, cd), _mm512_unpackhi_epi64(ab, cd));
    __m256i half = _mm256_add_epi32(_mm512_castsi512_si256(all), _mm512_extracti64x4_epi64(all, 1));
    return _mm_add_epi32(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
}

/* `rows` (at most 4) of codes times four rows of a matrix, times the scales of these, into out. */
static inline __attribute__((always_inline)) void four_columns(const uint8_t *codes, const int8_t *matrix,
                                                               const int32_t *sums, const float *scales, float *out,
                                                               int64_t columns, int64_t width, const int rows) {
    __m512i total[4][4];
    for (int r = 0; r < rows; r++)
        for (int c = 0; c < 4; c++) total[r][c] = _mm512_setzero_si512();
    for (int64_t i = 0; i < width; i += 64) {
        __m512i w[4];
        for (int c = 0; c < 4; c++) {
            w[c] = _mm512_loadu_si512(matrix + c * width + i);
            _mm_prefetch((const char *)(matrix + c * width + i + 4 * width), _MM_HINT_T0);
        }
        for (int r = 0; r < rows; r++) {
            __m512i code = _mm512_loadu_si512(codes + r * width + i);
            for (int c = 0; c < 4; c++) total[r][c] = _mm512_dpbusd_epi32(total[r][c], code, w[c]);
        }
    }
    __m128i shift = _mm_slli_epi32(_mm_loadu_si128((const __m128i *)sums), 7);
    __m128 scale = _mm_loadu_ps(scales);
    for (int r = 0; r < rows; r++) {
        __m128i sum = sums_of_four(total[r][0], total[r][1], total[r][2], total[r][3]);
        _mm_storeu_ps(out + r * columns, _mm_mul_ps(_mm_cvtepi32_ps(_mm_sub_epi32(sum, shift)), scale));
    }
}
#endif

/* x (R, D) rounded as by round_rows, times matrix (N, D) transposed, whose rows sum to `sums`; times scales of the matrix
   (N,), then those of the rows, into out (R, N). D is a multiple of 64, N of 4. Returns 0, or 1 where there was no
   memory. */
int64_t int8_linear(const float *x, int64_t x_row, const int8_t *matrix, const int32_t *sums, const float *matrix_scales,
                    float *out, int64_t rows, int64_t columns, int64_t width) {
#ifdef __AVX512VNNI__
    uint8_t *codes = malloc(rows * width);
    float *scales = malloc(rows * sizeof(float));
    if (codes && scales) {
        round_rows(x, x_row, codes, scales, rows, width);
        for (int64_t n = 0; n < columns; n += 4) {
            const int8_t *from = matrix + n * width;
            int64_t r = 0;
            for (; r + 4 <= rows; r += 4)
                four_columns(codes + r * width, from, sums + n, matrix_scales + n, out + r * columns + n, columns, width, 4);
            const uint8_t *rest = codes + r * width;
            float *to = out + r * columns + n;
            if (rows - r == 3) four_columns(rest, from, sums + n, matrix_scales + n, to, columns, width, 3);
            else if (rows - r == 2) four_columns(rest, from, sums + n, matrix_scales + n, to, columns, width, 2);
            else if (rows - r == 1) four_columns(rest, from, sums + n, matrix_scales + n, to, columns, width, 1);
        }
        for (int64_t r = 0; r < rows; r++)
            for (int64_t n = 0; n < columns; n++) out[r * columns + n] *= scales[r];
    }
    int64_t failed = !codes || !scales;
    free(codes);
    free(scales);
    return failed;
#else
    (void)x, (void)x_row, (void)matrix, (void)sums, (void)matrix_scales, (void)out, (void)rows, (void)columns, (void)width;
    return 1;
#endif
}

/* Attention of rows, each over the positions `first` .. `last` of its own sequence.

   q (R, H, E); keys and values: stores of positions (P, K, E) and (P, K, V), in fp32 or as codes with a scale for each
   position and head (P, K); a position of the sequence lies at tables[offset + position / block] * block + position %
   block. window: positions that are seen, 0 = all. Into out (R, H, V). `numbers`: what codes stand for, (256,). Returns
   0, or 1 where there was no memory. */
typedef struct {
    const float *q;
    int64_t q_row;
    const void *keys, *values;
    const float *key_scales, *value_scales, *numbers;
    const int64_t *tables, *offsets, *last;
    float *out;
    int64_t rows, heads, key_heads, width, value_width, value_stride, block, window;
    float scale;
} Attention;

/* The sum of 16 numbers, in one order. */
static inline float sum_of(lanes x) {
    float total = 0.0f;
    for (int i = 0; i < 16; i++) total += x[i];
    return total;
}

#define PLACE(t) ((table[(t) / block] * block + (t) % block) * a->key_heads + own)

/* One query head over its keys. E and V are 16 PARTS, or anything where PARTS is 0. */
#define ATTEND(NAME, TYPE, LOAD, NUMBER)                                                                                \
    static inline __attribute__((always_inline)) void NAME##_sized(const Attention *a, float *restrict scores,          \
                                                                   const int parts) {                                   \
        const int64_t group = a->heads / a->key_heads, block = a->block, width = a->width, wide = a->value_width;       \
        const int64_t value_stride = parts ? parts * 16 : a->value_stride;                                              \
        const float *numbers = a->numbers;                                                                              \
        (void)numbers;                                                                                                  \
        for (int64_t row = 0; row < a->rows; row++) {                                                                   \
            const int64_t *table = a->tables + a->offsets[row], end = a->last[row] + 1;                                 \
            const int64_t first = a->window && end > a->window ? end - a->window : 0;                                   \
            for (int64_t head = 0; head < a->heads; head++) {                                                           \
                const float *q = a->q + row * a->q_row + head * width;                                                  \
                const int64_t own = head / group;                                                                       \
                float most = -INFINITY, sum = 0.0f;                                                                     \
                float *restrict to = a->out + (row * a->heads + head) * wide;                                           \
                lanes query[8], total[8];                                                                               \
                for (int p = 0; p < parts; p++) query[p] = *(const lanes *)(q + 16 * p), total[p] = (lanes){0};         \
                for (int64_t t = first; t < end;) {                                                                     \
                    const int64_t whole = (t / block + 1) * block, until = whole < end ? whole : end;                   \
                    int64_t place = PLACE(t);                                                                           \
                    for (; t < until; t++, place += a->key_heads) {                                                     \
                        const TYPE *code = (const TYPE *)a->keys + place * (parts ? parts * 16 : width);                \
                        float dot = 0.0f;                                                                               \
                        if (parts) {                                                                                    \
                            lanes all = query[0] * LOAD(code);                                                          \
                            for (int p = 1; p < parts; p++) all += query[p] * LOAD(code + 16 * p);                      \
                            dot = sum_of(all);                                                                          \
                        } else                                                                                          \
                            for (int64_t i = 0; i < width; i++) dot += q[i] * NUMBER(code[i]);                          \
                        dot *= a->key_scales ? a->key_scales[place] * a->scale : a->scale;                              \
                        scores[t - first] = dot;                                                                        \
                        most = dot > most ? dot : most;                                                                 \
                    }                                                                                                   \
                }                                                                                                       \
                for (int64_t t = 0; t < end - first; t++) {                                                             \
                    scores[t] = exponential(scores[t] - most);                                                          \
                    sum += scores[t];                                                                                   \
                }                                                                                                       \
                if (!parts)                                                                                             \
                    for (int64_t i = 0; i < wide; i++) to[i] = 0.0f;                                                    \
                for (int64_t t = first; t < end;) {                                                                     \
                    const int64_t whole = (t / block + 1) * block, until = whole < end ? whole : end;                   \
                    int64_t place = PLACE(t);                                                                           \
                    for (; t < until; t++, place += a->key_heads) {                                                     \
                        const TYPE *code = (const TYPE *)a->values + place * value_stride;                              \
                        const float share = scores[t - first] * (a->value_scales ? a->value_scales[place] : 1.0f);      \
                        for (int p = 0; p < parts; p++) total[p] += share * LOAD(code + 16 * p);                        \
                        if (!parts)                                                                                     \
                            for (int64_t i = 0; i < wide; i++) to[i] += share * NUMBER(code[i]);                        \
                    }                                                                                                   \
                }                                                                                                       \
                for (int p = 0; p < parts; p++) *(lanes *)(to + 16 * p) = total[p] / sum;                               \
                if (!parts)                                                                                             \
                    for (int64_t i = 0; i < wide; i++) to[i] /= sum;                                                    \
            }                                                                                                           \
        }                                                                                                               \
    }                                                                                                                   \
    static void NAME(const Attention *a, float *scores) {                                                               \
        const int64_t alike = a->width == a->value_width && a->width == a->value_stride ? a->width : 0;                 \
        if (alike == 64) NAME##_sized(a, scores, 4);                                                                    \
        else if (alike == 128) NAME##_sized(a, scores, 8);                                                              \
        else NAME##_sized(a, scores, 0);                                                                                \
    }

typedef int8_t small_lanes __attribute__((vector_size(16), aligned(1)));

static inline lanes listed_lanes(const float *numbers, const uint8_t *codes) {
    lanes found;
    for (int i = 0; i < 16; i++) found[i] = numbers[codes[i]];
    return found;
}

#define SAME(x) (x)
#define WHOLE(x) ((float)(x))
#define LISTED(x) (numbers[x])
#define SAME_LANES(x) (*(const lanes *)(x))
#define WHOLE_LANES(x) __builtin_convertvector(*(const small_lanes *)(x), lanes)
#define LISTED_LANES(x) listed_lanes(numbers, x)
ATTEND(attend_floats, float, SAME_LANES, SAME)
ATTEND(attend_int8, int8_t, WHOLE_LANES, WHOLE)
ATTEND(attend_listed, uint8_t, LISTED_LANES, LISTED)

int64_t attend(const Attention *a, int64_t longest) {
    float *scores = malloc(longest * sizeof(float));
    if (!scores) return 1;
    if (!a->key_scales) attend_floats(a, scores);
    else if (!a->numbers) attend_int8(a, scores);
    else attend_listed(a, scores);
    free(scores);
    return 0;
}
