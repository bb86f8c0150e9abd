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

#define AT_ONCE 8 /* rows of a product for which a matrix is read once */

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
        float most = 0.0f, poison = 0.0f;
        for (int64_t i = 0; i < width; i++) {
            float size = fabsf(from[i]);
            most = size > most ? size : most;
            poison += from[i] * 0.0f;
        }
        float scale = most / 127.0f;
        scale = scale == 0.0f ? 1.0f : scale;
        for (int64_t i = 0; i < width; i++) {
            float code = rintf(from[i] / scale);
            code = code > 127.0f ? 127.0f : (code < -127.0f ? -127.0f : code);
            to[i] = (uint8_t)((int32_t)code + 128);
        }
        scales[row] = scale + poison;
    }
}

/* Whether int8_product is there. */
int64_t has_int8_product(void) {
#ifdef __AVX512VNNI__
    return 1;
#else
    return 0;
#endif
}

/* codes (R, D), each 128 more than it stands for, times matrix (N, D) transposed, whose rows sum to `sums`; times scales
   of the matrix (N,), then those of rows (R,), into out (R, N). D is a multiple of 64. */
void int8_product(const uint8_t *codes, const float *scales, const int8_t *matrix, const int32_t *sums,
                  const float *matrix_scales, float *out, int64_t rows, int64_t columns, int64_t width) {
#ifdef __AVX512VNNI__
#define PRODUCT(ROWS)                                                                                                   \
    case ROWS:                                                                                                          \
        for (int64_t n = 0; n < columns; n++) {                                                                         \
            const int8_t *from = matrix + n * width;                                                                    \
            __m512i total[ROWS];                                                                                        \
            for (int r = 0; r < ROWS; r++) total[r] = _mm512_setzero_si512();                                           \
            for (int64_t i = 0; i < width; i += 64) {                                                                   \
                __m512i w = _mm512_loadu_si512(from + i);                                                               \
                _mm_prefetch((const char *)(from + i + 4096), _MM_HINT_T0);                                             \
                for (int r = 0; r < ROWS; r++)                                                                          \
                    total[r] = _mm512_dpbusd_epi32(total[r], _mm512_loadu_si512(codes + r * width + i), w);             \
            }                                                                                                           \
            for (int r = 0; r < ROWS; r++)                                                                              \
                out[r * columns + n] = (float)(_mm512_reduce_add_epi32(total[r]) - 128 * sums[n]) * matrix_scales[n];   \
        }                                                                                                               \
        break;
    for (int64_t begin = 0; begin < rows; begin += AT_ONCE) {
        switch (rows - begin < AT_ONCE ? rows - begin : AT_ONCE) {
            PRODUCT(1) PRODUCT(2) PRODUCT(3) PRODUCT(4) PRODUCT(5) PRODUCT(6) PRODUCT(7) PRODUCT(8)
        }
        const int64_t end = begin + AT_ONCE < rows ? begin + AT_ONCE : rows;
        for (int64_t r = 0; r < end - begin; r++)
            for (int64_t n = 0; n < columns; n++) out[r * columns + n] *= scales[begin + r];
        codes += AT_ONCE * width;
        out += AT_ONCE * columns;
    }
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

#define ATTEND(NAME, TYPE, NUMBER)                                                                                      \
    static inline __attribute__((always_inline)) void NAME##_sized(const Attention *a, float *restrict scores,          \
                                                                   const int64_t width, const int64_t wide) {           \
        const int64_t group = a->heads / a->key_heads, block = a->block;                                                \
        const float *numbers = a->numbers;                                                                              \
        (void)numbers;                                                                                                  \
        for (int64_t row = 0; row < a->rows; row++) {                                                                   \
            const int64_t *table = a->tables + a->offsets[row], end = a->last[row] + 1;                                 \
            const int64_t first = a->window && end > a->window ? end - a->window : 0;                                   \
            for (int64_t head = 0; head < a->heads; head++) {                                                           \
                const float *restrict q = a->q + row * a->q_row + head * width;                                         \
                const int64_t own = head / group;                                                                       \
                float most = -INFINITY, sum = 0.0f;                                                                     \
                float *restrict to = a->out + (row * a->heads + head) * wide;                                           \
                for (int64_t t = first; t < end;) {                                                                     \
                    const int64_t whole = (t / block + 1) * block, until = whole < end ? whole : end;                   \
                    int64_t place = (table[t / block] * block + t % block) * a->key_heads + own;                        \
                    for (; t < until; t++, place += a->key_heads) {                                                     \
                        const TYPE *restrict code = (const TYPE *)a->keys + place * width;                              \
                        float dot = 0.0f;                                                                               \
                        for (int64_t i = 0; i < width; i++) dot += q[i] * NUMBER(code[i]);                              \
                        dot *= a->key_scales ? a->key_scales[place] * a->scale : a->scale;                              \
                        scores[t - first] = dot;                                                                        \
                        most = dot > most ? dot : most;                                                                 \
                    }                                                                                                   \
                }                                                                                                       \
                for (int64_t t = 0; t < end - first; t++) {                                                             \
                    scores[t] = exponential(scores[t] - most);                                                          \
                    sum += scores[t];                                                                                   \
                }                                                                                                       \
                for (int64_t i = 0; i < wide; i++) to[i] = 0.0f;                                                        \
                for (int64_t t = first; t < end;) {                                                                     \
                    const int64_t whole = (t / block + 1) * block, until = whole < end ? whole : end;                   \
                    int64_t place = (table[t / block] * block + t % block) * a->key_heads + own;                        \
                    for (; t < until; t++, place += a->key_heads) {                                                     \
                        const TYPE *restrict code = (const TYPE *)a->values + place * a->value_stride;                  \
                        const float share = scores[t - first] * (a->value_scales ? a->value_scales[place] : 1.0f);      \
                        for (int64_t i = 0; i < wide; i++) to[i] += share * NUMBER(code[i]);                            \
                    }                                                                                                   \
                }                                                                                                       \
                for (int64_t i = 0; i < wide; i++) to[i] /= sum;                                                        \
            }                                                                                                           \
        }                                                                                                               \
    }                                                                                                                   \
    static void NAME(const Attention *a, float *scores) {                                                               \
        if (a->width == 64 && a->value_width == 64) NAME##_sized(a, scores, 64, 64);                                    \
        else if (a->width == 128 && a->value_width == 128) NAME##_sized(a, scores, 128, 128);                           \
        else NAME##_sized(a, scores, a->width, a->value_width);                                                         \
    }

#define SAME(x) (x)
#define WHOLE(x) ((float)(x))
#define LISTED(x) (numbers[x])
ATTEND(attend_floats, float, SAME)
ATTEND(attend_int8, int8_t, WHOLE)
ATTEND(attend_listed, uint8_t, LISTED)

int64_t attend(const Attention *a, int64_t longest) {
    float *scores = malloc(longest * sizeof(float));
    if (!scores) return 1;
    if (!a->key_scales) attend_floats(a, scores);
    else if (!a->numbers) attend_int8(a, scores);
    else attend_listed(a, scores);
    free(scores);
    return 0;
}
