/* Cross-entropy of rows of logits and its gradient in their place, as triton/logit_rows.py.

   Rows of V logits in fp32 or, where narrow, bf16, `row_stride` numbers from start to start. A row is
   read from memory once and written once: the cache holds it in between. Threads share the rows; no bit depends on
   their number. */

#include "vectors.h"

#define AT(row) ((char *)logits + (row) * row_stride * (narrow ? 2 : 4))
#define FOR_EACH_ROW                                                                                                    \
    _Pragma("omp parallel for num_threads(thread_count)") for (int64_t row = 0; row < rows; row++)

typedef struct {
    float peak, total, logit_sum, target_logit;
} RowSums;

/* Read the last `count` logits of a row, fewer than a vector, filled up with -inf. */
static inline lanes last_lanes(const void *from, int64_t i, int64_t count, int64_t narrow) {
    union { float in_fp32[16]; uint16_t in_bf16[16]; } lanes_read;
    for (int j = 0; j < 16; j++)
        if (narrow) lanes_read.in_bf16[j] = j < count ? ((const uint16_t *)from)[i + j] : 0xff80;
        else lanes_read.in_fp32[j] = j < count ? ((const float *)from)[i + j] : -INFINITY;
    return read_lanes(&lanes_read, 0, narrow);
}

static inline lanes row_lanes(const void *from, int64_t i, int64_t columns, int64_t narrow) {
    return i + 16 <= columns ? read_lanes(from, i, narrow) : last_lanes(from, i, columns - i, narrow);
}

static inline float number_at(const void *from, int64_t i, int64_t narrow) { return last_lanes(from, i, 1, narrow)[0]; }

static inline void write_number(float number, void *to, int64_t i, int64_t narrow) {
    float copies[16];
    write_lanes((lanes){0} + number, copies, 0, narrow);
    memcpy((char *)to + i * (narrow ? 2 : 4), copies, narrow ? 2 : 4);
}

/* exp(x), exactly 0 far below 0: a masked logit gets no gradient. */
static inline lanes exponentials_or_zero(lanes x) { return select_lanes(x < (lanes){0} - 87.0f, (lanes){0},
                                                                        exponentials(x)); }

/* Return the maximum of a row, the sum of exp(logit - maximum), the sum of logits, and the logit of `target`, or 0. */
static RowSums gather(const void *row, int64_t target, int64_t columns, int64_t narrow) {
    lanes peaks = (lanes){0} - INFINITY, totals[2] = {{0}, {0}}, logit_sums[2] = {{0}, {0}};
    for (int64_t i = 0; i < columns; i += 16) peaks = larger(row_lanes(row, i, columns, narrow), peaks);
    RowSums sums = {.peak = peaks[0]};
    for (int j = 1; j < 16; j++) sums.peak = peaks[j] > sums.peak ? peaks[j] : sums.peak;
    const float shift = sums.peak == -INFINITY ? 0.0f : sums.peak; /* for a row of -inf only: exp(-inf) is 0 */
    for (int64_t i = 0; i < columns; i += 16) {
        const lanes x = row_lanes(row, i, columns, narrow);
        totals[i / 16 % 2] += exponentials_or_zero(x - shift);
        if (i + 16 <= columns) logit_sums[i / 16 % 2] += x;
        else
            for (int64_t j = i; j < columns; j++) logit_sums[0][j - i] += x[j - i];
    }
    sums.total = sum_lanes(totals[0] + totals[1]);
    sums.logit_sum = sum_lanes(logit_sums[0] + logit_sums[1]);
    sums.target_logit = target >= 0 && target < columns ? number_at(row, target, narrow) : 0.0f;
    return sums;
}

/* Write factor * (softmax * (1 + 2 z lse) - (1 - smoothing) onehot - smoothing / V) over the logits of a row. */
static void write_gradient(void *row, int64_t target, int64_t columns, int64_t vocabulary, float lse, float factor,
                           float smoothing, float z, int64_t narrow) {
    const float softmax_factor = factor * (1.0f + 2.0f * z * lse),
        smoothing_share = factor * smoothing / (float)vocabulary;
    const int has_target = target >= 0 && target < columns;
    const float target_logit = has_target ? number_at(row, target, narrow) : 0.0f;
    for (int64_t i = 0; i < columns; i += 16) {
        const lanes gradient = exponentials_or_zero(row_lanes(row, i, columns,
                                                              narrow) - lse) * softmax_factor - smoothing_share;
        if (i + 16 <= columns) write_lanes(gradient, row, i, narrow);
        else
            for (int64_t j = i; j < columns; j++) write_number(gradient[j - i], row, j, narrow);
    }
    if (has_target) {
        const lanes probability = exponentials_or_zero((lanes){0} + (target_logit - lse));
        write_number(probability[0] * softmax_factor - smoothing_share - factor * (1.0f - smoothing), row, target,
                     narrow);
    }
}

/* Write the loss of each row (R,): 0 where ignored, NaN for a target without a column. `gradient`: overwrite the logits
   by it, times factors (R,), NULL = 1. */
void losses_of_rows(void *logits, int64_t row_stride, const int64_t *targets, const float *factors, float *losses,
                    int64_t rows, int64_t columns, int64_t ignored, int64_t gradient, float smoothing,
                    float z, int64_t narrow, int64_t thread_count) {
    FOR_EACH_ROW {
        const int64_t target = targets[row];
        if (target == ignored) {
            losses[row] = 0.0f;
            if (gradient) memset(AT(row), 0, columns * (narrow ? 2 : 4));
            continue;
        }
        const RowSums sums = gather(AT(row), target, columns, narrow);
        const float lse = sums.peak + logf(sums.total);
        float loss = lse - sums.target_logit + z * lse * lse;
        if (smoothing != 0.0f) loss += smoothing * (sums.target_logit - sums.logit_sum / (float)columns);
        losses[row] = target >= 0 && target < columns ? loss : NAN;
        const float factor = factors ? factors[row] : 1.0f;
        if (gradient) write_gradient(AT(row), target, columns, columns, lse, factor, smoothing, z, narrow);
    }
}

/* Write the sums that `gather` returns for each row to found (4, R). */
void gather_rows(void *logits, int64_t row_stride, const int64_t *targets, int64_t first, float *gathered, int64_t rows,
                 int64_t columns, int64_t narrow, int64_t thread_count) {
    FOR_EACH_ROW {
        const RowSums sums = gather(AT(row), targets[row] - first, columns, narrow);
        gathered[row] = sums.peak;
        gathered[rows + row] = sums.total;
        gathered[2 * rows + row] = sums.logit_sum;
        gathered[3 * rows + row] = sums.target_logit;
    }
}

/* Write the gradient over rows with a known log-sum-exp over all devices. 0 where the factor is 0. */
void gradient_rows(void *logits, int64_t row_stride, const int64_t *targets, int64_t first, const float *sums,
                   const float *factors, int64_t rows, int64_t columns, int64_t vocabulary, float smoothing, float z,
                   int64_t narrow, int64_t thread_count) {
    FOR_EACH_ROW {
        if (factors[row] == 0.0f) memset(AT(row), 0, columns * (narrow ? 2 : 4));
        else
            write_gradient(AT(row), targets[row] - first, columns, vocabulary, sums[row], factors[row], smoothing, z,
                           narrow);
    }
}
