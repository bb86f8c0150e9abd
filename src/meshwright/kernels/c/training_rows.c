/* Norms, rotation and the gate of an MLP, forward and backward: one pass over memory each, where torch has three to six.

   Rows of D numbers, a multiple of 16, in fp32 or, where narrow, bf16; the arithmetic is fp32. Threads share the rows;
   no bit depends on their number. */

#include "vectors.h"

#define FOR_EACH_ROW(COUNT)                                                                                             \
    _Pragma("omp parallel for num_threads(thread_count)") for (int64_t row = 0; row < (COUNT); row++)
#define AT(x, row) ((char *)(x) + (row) * width * (narrow ? 2 : 4))

/* Write x (R, D) / rms(x) * weight (D,) to out (R, D), and 1 / rms to scales (R,). */
void norm_rows(const void *x, const void *weight, float eps, void *out, float *scales, int64_t rows, int64_t width,
               int64_t narrow, int64_t thread_count) {
    FOR_EACH_ROW(rows) {
        lanes squares[2] = {{0}, {0}};
        for (int64_t i = 0; i < width; i += 16) {
            const lanes numbers = read_lanes(AT(x, row), i, narrow);
            squares[i / 16 % 2] += numbers * numbers;
        }
        const float scale = 1.0f / sqrtf(sum_lanes(squares[0] + squares[1]) / (float)width + eps);
        scales[row] = scale;
        for (int64_t i = 0; i < width; i += 16)
            write_lanes(read_lanes(AT(x, row), i, narrow) * scale * read_lanes(weight, i, narrow), AT(out, row), i,
                        narrow);
    }
}

/* Write the gradient of x, from g, the gradient of the norm (R, D): r (g w) - x r^3 / D sum(g w x), with r of scales. Sums
   of g x r over every `block` rows go to weight_gradients (R / block, D): blocks, not threads, so no bit depends on these. */
void norm_gradients(const void *gradient, const void *x, const void *weight, const float *scales, void *x_gradient,
                    float *weight_gradients,
                    int64_t rows, int64_t width, int64_t block, int64_t narrow, int64_t thread_count) {
#pragma omp parallel for num_threads(thread_count)
    for (int64_t first = 0; first < rows; first += block) {
        float *block_sums = weight_gradients + first / block * width;
        memset(block_sums, 0, width * sizeof(float));
        for (int64_t row = first; row < rows && row < first + block; row++) {
            const float scale = scales[row];
            lanes dots[2] = {{0}, {0}};
            for (int64_t i = 0; i < width; i += 16) {
                const lanes products = read_lanes(AT(gradient, row), i, narrow) * read_lanes(AT(x, row), i, narrow);
                dots[i / 16 % 2] += products * read_lanes(weight, i, narrow);
                *(lanes *)(block_sums + i) += products * scale;
            }
            const float projection = sum_lanes(dots[0] + dots[1]) * scale * scale * scale / (float)width;
            for (int64_t i = 0; i < width; i += 16) {
                const lanes scaled = read_lanes(AT(gradient, row), i, narrow) * read_lanes(weight, i, narrow) * scale;
                write_lanes(scaled - read_lanes(AT(x, row), i, narrow) * projection, AT(x_gradient, row), i, narrow);
            }
        }
    }
}

/* Single numbers, which the compiler vectorizes: gcc holds `lanes` in memory where they need two registers. */
static inline __attribute__((always_inline)) float read_number(const void *from, int64_t i, const int narrow) {
    union { uint32_t bits; float number; } widened = {.bits = narrow ? (uint32_t)((const uint16_t *)from)[i] << 16 : 0};
    return narrow ? widened.number : ((const float *)from)[i];
}

static inline __attribute__((always_inline)) void write_number(float number, void *to, int64_t i, const int narrow) {
    union { float number; uint32_t bits; } split = {.number = number};
    const uint32_t rounded = (split.bits + 0x7fff + ((split.bits >> 16) & 1)) >> 16;
    if (narrow) ((uint16_t *)to)[i] = (uint16_t)(number != number ? 0x7fc0 : rounded);
    else ((float *)to)[i] = number;
}

static inline float sigmoid(float x) { return x < -87.0f ? 0.0f : 1.0f / (1.0f + exponential(-x)); }

/* Loop over the numbers of rows, compiled for both widths. */
#define FOR_EACH_NUMBER(...)                                                                                            \
    FOR_EACH_ROW(rows)                                                                                                  \
    if (narrow) FOR_EACH_OF_ROW(1, __VA_ARGS__)                                                                         \
    else FOR_EACH_OF_ROW(0, __VA_ARGS__)
#define FOR_EACH_OF_ROW(NARROW, ...)                                                                                    \
    _Pragma("omp simd") for (int64_t i = 0; i < width; i++) {                                                           \
        enum { is_bf16 = NARROW };                                                                                      \
        __VA_ARGS__                                                                                                     \
    }

/* Write silu(gate) * up, all (R, D). */
void gate_rows(const void *gate, const void *up, void *out, int64_t rows, int64_t width, int64_t narrow,
               int64_t thread_count) {
    FOR_EACH_NUMBER({
        const float gate_number = read_number(AT(gate, row), i, is_bf16);
        write_number(gate_number * sigmoid(gate_number) * read_number(AT(up, row), i, is_bf16), AT(out, row), i,
                     is_bf16);
    })
}

/* Write the gradients of gate and up, from that of the product, `gradient`, which gate_gradient may overwrite. Unless `out`
   is NULL, write the product to it. */
void gate_gradients(const void *gradient, const void *gate, const void *up, void *gate_gradient, void *up_gradient,
                    void *out, int64_t rows,
                    int64_t width, int64_t narrow, int64_t thread_count) {
    if (out) gate_rows(gate, up, out, rows, width, narrow, thread_count);
    FOR_EACH_NUMBER({
        const float x = read_number(AT(gate, row), i, is_bf16), y = read_number(AT(up, row), i, is_bf16);
        const float incoming = read_number(AT(gradient, row), i, is_bf16), sigmoid_x = sigmoid(x), silu = x * sigmoid_x;
        write_number(incoming * silu, AT(up_gradient, row), i, is_bf16);
        write_number(incoming * y * (sigmoid_x + silu * (1.0f - sigmoid_x)), AT(gate_gradient, row), i, is_bf16);
    })
}

/* Rotate pairs (i, i + half) of heads of x (B, S, heads, 2 half) by cosine and sine (1 or B, S, half) into out,
   contiguous. `sign`: 1, or -1 to rotate back. Strides are those of rows, positions and heads; `table_stride`:
   that of the tables' rows, 0 for one row. */
void rotate_rows(const void *x, int64_t x_row, int64_t x_position, int64_t x_head, const float *cosine,
                 const float *sine,
               int64_t table_stride, float sign, void *out, int64_t rows, int64_t positions, int64_t heads,
                   int64_t half,
               int64_t narrow, int64_t thread_count) {
    const int64_t width = 2 * half, size = narrow ? 2 : 4;
    FOR_EACH_ROW(rows * positions) {
        const int64_t batch_row = row / positions, position = row % positions;
        const float *cosines = cosine + batch_row * table_stride + position * half,
            *sines = sine + batch_row * table_stride + position * half;
        for (int64_t head = 0; head < heads; head++) {
            const char *head_in = (const char *)x + (batch_row * x_row + position * x_position + head * x_head) * size;
            char *head_out = AT(out, row * heads + head);
            for (int64_t i = 0; i < half; i += 16) {
                const lanes first = read_lanes(head_in, i, narrow), second = read_lanes(head_in, half + i, narrow);
                const lanes cosine_lanes = *(const lanes *)(cosines + i),
                    sine_lanes = *(const lanes *)(sines + i) * sign;
                write_lanes(first * cosine_lanes - second * sine_lanes, head_out, i, narrow);
                write_lanes(second * cosine_lanes + first * sine_lanes, head_out, half + i, narrow);
            }
        }
    }
}
