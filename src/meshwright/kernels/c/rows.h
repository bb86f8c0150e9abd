/* Loops over rows for a step of serving, each of which would be several operations of torch.

   No row reads another row, and sums of a row have one order, so its bits depend on itself alone. Letters: R rows, D width
   of a row, H query heads, K key heads, E width of keys and V of values of a head. Strides count elements. Sums that may
   be reordered into vectors say so (omp simd). NaN and infinity propagate. */

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#if defined(__AVX512F__) || defined(__AVX2__)
#include <immintrin.h>
#endif

#define INLINE static inline __attribute__((always_inline))

#ifdef _OPENMP
#include <omp.h>
#define thread_number() omp_get_thread_num()
#else
#define thread_number() 0
#endif

typedef float lanes __attribute__((vector_size(64), aligned(4))); /* 16 numbers, anywhere in memory */
typedef int32_t whole_lanes __attribute__((vector_size(64)));

/* Numbers of a vector register. Compilers hold wider vectors in memory, which is ten times as slow. */
#if defined(__AVX512F__)
#define WIDE 16
#elif defined(__AVX__)
#define WIDE 8
#else
#define WIDE 4
#endif
typedef float wide __attribute__((vector_size(4 * WIDE), aligned(4), may_alias));
typedef int32_t wide_integers __attribute__((vector_size(4 * WIDE), aligned(4), may_alias));
typedef uint32_t words __attribute__((vector_size(4 * WIDE), aligned(4), may_alias));
typedef uint16_t narrow_wide __attribute__((vector_size(2 * WIDE), aligned(2), may_alias));

typedef float eight __attribute__((vector_size(32), aligned(4), may_alias));
typedef float four __attribute__((vector_size(16), aligned(4), may_alias));

/* Sum 16 numbers in one order. */
static inline float sum_lanes(lanes x) {
    /* In halves, not by an intrinsic: compilers would choose an order for each processor. */
    const eight *halves = (const eight *)&x;
    eight eight_sums = halves[0] + halves[1];
    const four *quarters = (const four *)&eight_sums;
    four four_sums = quarters[0] + quarters[1];
    return (four_sums[0] + four_sums[1]) + (four_sums[2] + four_sums[3]);
}

static inline float exponential(float x) {
    /* 2^n (1 + r)...: relative error below 2e-7 where the result is normal. Below -87 the result is that of -87. */
    x = x < -87.0f ? -87.0f : (x > 88.0f ? 88.0f : x);
    float n = rintf(x * 1.44269504088896341f);
    /* ln 2 in two parts: the first has few bits, so its product with n is exact. */
    float r = x - n * 0.693145751953125f;
    r = r - n * 1.42860682030941723e-6f;
    float p = 1.0f + r * (1.0f + r * (0.5f + r * (0.166666671633720f + r * (0.0416666455566883f +
              r * (0.00833336170762777f + r * 0.00139316345565021f)))));
    union { uint32_t i; float f; } power;
    power.i = (uint32_t)((int32_t)n + 127) << 23;
    return p * power.f;
}

/* Threads that share a matrix, or heads, where there is more to read than LEAST_BYTES: starting and joining them costs
   some microseconds. The order of a sum does not depend on the thread that computes it. */
#define LEAST_BYTES (1 << 17)
extern int threads;

static inline int threads_for(int64_t bytes) { return bytes < LEAST_BYTES ? 1 : threads; }

/* A matrix (N, D) in panels, see serving_library.py. A lane of a vector is one of its rows, so no vector is summed up. Several
   input rows share each read of a panel. Sums have one order, however many rows there are. */
typedef struct {
    const void *numbers;
    const int32_t *sums;
    const void *scales, *zeros; /* fp32; for codes bf16 where `narrow` */
    const float *table, *bias;
    int64_t columns, width, group, kind, narrow; /* N, D */
} Panels;
enum { FLOATS, BF16, INT8, CODES };

/* Attention of rows, each over the positions `first` .. `last` of its own sequence.

   q (R, H, E); keys and values: stores of positions (P, K, E) and (P, K, V), in fp32 or as codes with a scale for each
   position and head (P, K); a position of the sequence lies at tables[offset + position / block] * block + position %
   block. window: visible positions, 0 = all. Writes out (R, H, V). `e4m3`: codes are of this kind, else integers.
   Returns 0, or 1 without memory. */
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

void rms_norm(const float *x, const float *added, const float *weight, float eps, float *out, float *total,
              int64_t rows,
              int64_t width);
void rotate(const float *x, int64_t x_row, int64_t x_head, const float *cosine, const float *sine, float *out,
            int64_t out_row, int64_t out_head, int64_t rows, int64_t heads, int64_t half);
void swiglu(const float *gate, int64_t gate_row, const float *up, int64_t up_row, float *out, int64_t rows,
            int64_t width);
void round_rows(const float *x, int64_t x_row, uint8_t *codes, float *scales, int64_t rows, int64_t width);
void store_floats(const float *x, int64_t x_row, int64_t x_head, const int64_t *slots, float *store, int64_t rows,
                 int64_t heads, int64_t width);
void store_int8(const float *x, int64_t x_row, int64_t x_head, const int64_t *slots, int8_t *codes, float *scales,
               int64_t rows, int64_t heads, int64_t width);
int64_t multiply(const float *x, int64_t x_row, const Panels *m, float *out, int64_t rows);
int64_t attend(const Attention *a, int64_t longest);
