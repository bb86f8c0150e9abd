/* Norms, rotation and the gate of an MLP, forward and backward: one pass over memory each, where torch has three to six.

   Rows of D numbers, a multiple of 16, in fp32 or, where narrow, bf16; the arithmetic is fp32. Threads share the rows;
   no bit depends on their number. */

#include "vectors.h"

#define EACH_ROW(COUNT)                                                                                                 \
    const int64_t used = shared_by;                                                                                     \
    _Pragma("omp parallel for num_threads(used)") for (int64_t row = 0; row < (COUNT); row++)
#define AT(x, row) ((char *)(x) + (row) * width * (narrow ? 2 : 4))

/* Write x (R, D) / rms(x) * weight (D,) to out (R, D), and 1 / rms to scales (R,). */
void norm_rows(const void *x, const void *weight, float eps, void *out, float *scales, int64_t rows, int64_t width,
               int64_t narrow, int64_t shared_by) {
    EACH_ROW(rows) {
        lanes squares[2] = {{0}, {0}};
        for (int64_t i = 0; i < width; i += 16) {
            const lanes read = read_lanes(AT(x, row), i, narrow);
            squares[i / 16 % 2] += read * read;
        }
        const float scale = 1.0f / sqrtf(sum_of(squares[0] + squares[1]) / (float)width + eps);
        scales[row] = scale;
        for (int64_t i = 0; i < width; i += 16)
            write_lanes(read_lanes(AT(x, row), i, narrow) * scale * read_lanes(weight, i, narrow), AT(out, row), i, narrow);
    }
}

/* From g, the gradient of the norm (R, D), write that of x: r (g w) - x r^3 / D sum(g w x), with r of scales; and the
   sums over each `block` rows of g x r to of_weight (R / block, D). */
void norm_gradients(const void *g, const void *x, const void *weight, const float *scales, void *of_x, float *of_weight,
                    int64_t rows, int64_t width, int64_t block, int64_t narrow, int64_t shared_by) {
    const int64_t used = shared_by;
#pragma omp parallel for num_threads(used)
    for (int64_t first = 0; first < rows; first += block) {
        float *sums = of_weight + first / block * width;
        memset(sums, 0, width * sizeof(float));
        for (int64_t row = first; row < rows && row < first + block; row++) {
            const float scale = scales[row];
            lanes all[2] = {{0}, {0}};
            for (int64_t i = 0; i < width; i += 16) {
                const lanes both = read_lanes(AT(g, row), i, narrow) * read_lanes(AT(x, row), i, narrow);
                all[i / 16 % 2] += both * read_lanes(weight, i, narrow);
                *(lanes *)(sums + i) += both * scale;
            }
            const float along = sum_of(all[0] + all[1]) * scale * scale * scale / (float)width;
            for (int64_t i = 0; i < width; i += 16) {
                const lanes scaled = read_lanes(AT(g, row), i, narrow) * read_lanes(weight, i, narrow) * scale;
                write_lanes(scaled - read_lanes(AT(x, row), i, narrow) * along, AT(of_x, row), i, narrow);
            }
        }
    }
}

/* Single numbers, which the compiler vectorizes: gcc holds `lanes` in memory where they need two registers. */
static inline __attribute__((always_inline)) float read_number(const void *from, int64_t i, const int narrow) {
    union { uint32_t bits; float number; } read = {.bits = narrow ? (uint32_t)((const uint16_t *)from)[i] << 16 : 0};
    return narrow ? read.number : ((const float *)from)[i];
}

static inline __attribute__((always_inline)) void write_number(float number, void *to, int64_t i, const int narrow) {
    union { float number; uint32_t bits; } read = {.number = number};
    const uint32_t rounded = (read.bits + 0x7fff + ((read.bits >> 16) & 1)) >> 16;
    if (narrow) ((uint16_t *)to)[i] = (uint16_t)(number != number ? 0x7fc0 : rounded);
    else ((float *)to)[i] = number;
}

static inline float sigmoid(float x) { return x < -87.0f ? 0.0f : 1.0f / (1.0f + exponential(-x)); }

/* Numbers of rows, for both widths. */
#define EACH_NUMBER(...)                                                                                                \
    EACH_ROW(rows)                                                                                                      \
    if (narrow) EACH_OF_ROW(1, __VA_ARGS__)                                                                             \
    else EACH_OF_ROW(0, __VA_ARGS__)
#define EACH_OF_ROW(NARROW, ...)                                                                                        \
    _Pragma("omp simd") for (int64_t i = 0; i < width; i++) {                                                           \
        enum { half = NARROW };                                                                                         \
        __VA_ARGS__                                                                                                     \
    }

/* Write silu(gate) * up, all (R, D). */
void gate_rows(const void *gate, const void *up, void *out, int64_t rows, int64_t width, int64_t narrow,
               int64_t shared_by) {
    EACH_NUMBER({
        const float x = read_number(AT(gate, row), i, half);
        write_number(x * sigmoid(x) * read_number(AT(up, row), i, half), AT(out, row), i, half);
    })
}

/* From g, the gradient of that, write those of gate and up; of_gate may be g. And the product to `out`, unless NULL. */
void gate_gradients(const void *g, const void *gate, const void *up, void *of_gate, void *of_up, void *out, int64_t rows,
                    int64_t width, int64_t narrow, int64_t shared_by) {
    if (out) gate_rows(gate, up, out, rows, width, narrow, shared_by);
    EACH_NUMBER({
        const float x = read_number(AT(gate, row), i, half), y = read_number(AT(up, row), i, half);
        const float incoming = read_number(AT(g, row), i, half), share = sigmoid(x), silu = x * share;
        write_number(incoming * silu, AT(of_up, row), i, half);
        write_number(incoming * y * (share + silu * (1.0f - share)), AT(of_gate, row), i, half);
    })
}

/* Rotate pairs (i, i + half) of heads of x (B, S, heads, 2 half) by cosine and sine (1 or B, S, half) into out,
   contiguous. `sign`: 1, or -1 to rotate back. Strides are those of rows, positions and heads; `apart`: of the tables. */
void turn_rows(const void *x, int64_t x_row, int64_t x_position, int64_t x_head, const float *cosine, const float *sine,
               int64_t apart, float sign, void *out, int64_t rows, int64_t positions, int64_t heads, int64_t half,
               int64_t narrow, int64_t shared_by) {
    const int64_t width = 2 * half, size = narrow ? 2 : 4;
    EACH_ROW(rows * positions) {
        const int64_t b = row / positions, s = row % positions;
        const float *c = cosine + b * apart + s * half, *t = sine + b * apart + s * half;
        for (int64_t head = 0; head < heads; head++) {
            const char *from = (const char *)x + (b * x_row + s * x_position + head * x_head) * size;
            char *to = AT(out, row * heads + head);
            for (int64_t i = 0; i < half; i += 16) {
                const lanes first = read_lanes(from, i, narrow), second = read_lanes(from, half + i, narrow);
                const lanes along = *(const lanes *)(c + i), across = *(const lanes *)(t + i) * sign;
                write_lanes(first * along - second * across, to, i, narrow);
                write_lanes(second * along + first * across, to, half + i, narrow);
            }
        }
    }
}
