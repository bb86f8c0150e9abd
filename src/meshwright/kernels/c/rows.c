/* Norms, rotation, the gate of an MLP, and the write of keys and values. */

#include "rows.h"

int threads = 1;

void use_threads(int64_t count) { threads = (int)count; }

/* Write total = x (R, D) + added (R, D), which may be NULL, and out = total / rms(total) * weight (D,). */
void rms_norm(const float *x, const float *added, const float *weight, float eps, float *out, float *total,
              int64_t rows,
              int64_t width) {
    for (int64_t row = 0; row < rows; row++) {
        const float *input = x + row * width;
        float *normed = out + row * width, squares = 0.0f;
        if (added) {
            float *summed = total + row * width;
            const float *added_row = added + row * width;
            for (int64_t i = 0; i < width; i++) summed[i] = input[i] + added_row[i];
            input = summed;
        }
#pragma omp simd reduction(+ : squares)
        for (int64_t i = 0; i < width; i++) squares += input[i] * input[i];
        float scale = 1.0f / sqrtf(squares / (float)width + eps);
        for (int64_t i = 0; i < width; i++) normed[i] = input[i] * scale * weight[i];
    }
}

/* Rotate pairs (i, i + half) of each head of x (R, heads, 2 half) by cos and sin (R, half) into out (R, heads, 2 half),
   which may be x. */
void rotate(const float *x, int64_t x_row, int64_t x_head, const float *cosine, const float *sine, float *out,
            int64_t out_row, int64_t out_head, int64_t rows, int64_t heads, int64_t half) {
    for (int64_t row = 0; row < rows; row++) {
        const float *cosines = cosine + row * half, *sines = sine + row * half;
        for (int64_t head = 0; head < heads; head++) {
            const float *input = x + row * x_row + head * x_head;
            float *rotated = out + row * out_row + head * out_head;
            for (int64_t i = 0; i < half; i++) {
                float first = input[i], second = input[i + half];
                rotated[i] = first * cosines[i] - second * sines[i];
                rotated[i + half] = second * cosines[i] + first * sines[i];
            }
        }
    }
}

/* Write silu(gate) * up, both (R, D) with a stride of rows, to out (R, D). */
void swiglu(const float *gate, int64_t gate_row, const float *up, int64_t up_row, float *out, int64_t rows,
            int64_t width) {
    for (int64_t row = 0; row < rows; row++) {
        const float *gates = gate + row * gate_row, *ups = up + row * up_row;
        float *gated = out + row * width;
        for (int64_t i = 0; i < width; i++) gated[i] = gates[i] / (1.0f + exponential(-gates[i])) * ups[i];
    }
}

/* Round x (R, D) to codes, offset by 128, with a scale for each row. A row that is not finite has such a scale. */
void round_rows(const float *x, int64_t x_row, uint8_t *codes, float *scales, int64_t rows, int64_t width) {
    for (int64_t row = 0; row < rows; row++) {
        const float *input = x + row * x_row;
        uint8_t *row_codes = codes + row * width;
        /* bits of positive floats sort like the numbers, NaN above all: a row with NaN gets a scale of NaN */
        union { uint32_t bits; float number; } peak = {0};
        for (int64_t i = 0; i < width; i++) {
            uint32_t bits;
            memcpy(&bits, input + i, sizeof bits);
            bits &= 0x7fffffffu;
            peak.bits = bits > peak.bits ? bits : peak.bits;
        }
        float scale = peak.number / 127.0f;
        scale = scale == 0.0f ? 1.0f : scale;
        for (int64_t i = 0; i < width; i++) {
            float code = rintf(input[i] / scale);
            code = code > 127.0f ? 127.0f : (code < -127.0f ? -127.0f : code);
            row_codes[i] = (uint8_t)((int32_t)code + 128);
        }
        scales[row] = scale;
    }
}

/* Write x (R, K, E) to slots (R,) of a store (P, K, E). */
void store_floats(const float *x, int64_t x_row, int64_t x_head, const int64_t *slots, float *store, int64_t rows,
                 int64_t heads, int64_t width) {
    for (int64_t row = 0; row < rows; row++)
        for (int64_t head = 0; head < heads; head++)
            memcpy(store + (slots[row] * heads + head) * width, x + row * x_row + head * x_head, width * sizeof(float));
}

/* Write codes and scales of x (R, K, E) to slots (R,) of stores (P, K, E) and (P, K). As round_rows, without the 128. */
void store_int8(const float *x, int64_t x_row, int64_t x_head, const int64_t *slots, int8_t *codes, float *scales,
               int64_t rows, int64_t heads, int64_t width) {
    for (int64_t row = 0; row < rows; row++)
        for (int64_t head = 0; head < heads; head++) {
            const int64_t index = slots[row] * heads + head;
            uint8_t *slot_codes = (uint8_t *)codes + index * width;
            round_rows(x + row * x_row + head * x_head, 0, slot_codes, scales + index, 1, width);
            for (int64_t i = 0; i < width; i++) slot_codes[i] ^= 128;
        }
}
